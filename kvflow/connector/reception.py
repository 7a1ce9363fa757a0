"""An engine's side channel: who its workers are, and what routers say there.

Rules: listens on engines that produce, and on every engine whose live transfers may be inspected.
What a router says comes in the side channel's thread.
"""

from collections import deque
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from vllm import envs

from kvflow.connector.metadata import NewHellos, WorkerHello
from kvflow.connector.worker import loops_here
from kvflow.core.events import ReleaseAsked
from kvflow.errors import TransportError
from kvflow.ids import Address, Rank, TransferId
from kvflow.io.seal import Seal
from kvflow.io.side_channel import SideChannel
from kvflow.observe.log import get_logger
from kvflow.observe.watch import Watch
from kvflow.settings import Settings

_WHY = (
    "a consumer listens since `inspect` is on, and needs a VLLM_NIXL_SIDE_CHANNEL_PORT of its own"
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig


class Reception:
    """The side channel of one engine, as its scheduler half sees it.

    address  where it listens, or would.
    """

    def __init__(
        self, config: "VllmConfig", engine_id: str, settings: Settings, seal: Seal | None
    ) -> None:
        assert config.kv_transfer_config is not None
        self._engine_id = engine_id
        self._gives = config.kv_transfer_config.is_kv_producer
        self._listens = self._gives or settings.inspect
        self.address = Address(
            envs.VLLM_NIXL_SIDE_CHANNEL_HOST,
            envs.VLLM_NIXL_SIDE_CHANNEL_PORT + config.parallel_config.data_parallel_index,
        )
        self._log = get_logger("scheduler", engine=engine_id[:8])
        self._released: deque[TransferId] = deque()
        self.side_channel = SideChannel(
            engine_id=engine_id,
            release=self._release_asked,
            seal=seal or Seal(),
            refused=Watch(engine=engine_id[:8]).refused,
            connections_max=settings.side_channel_connections_max,
            role=config.kv_transfer_config.kv_role,
            inspect=settings.inspect,
        )

    def introduce(self, hellos: Mapping[tuple[int, int], WorkerHello]) -> None:
        """Serve the workers' coordinates. Raises `TransportError` if the port is taken."""
        if not self._listens:
            return
        self.side_channel.introduce({Rank(*rank): h.payload for rank, h in hellos.items()})
        self.side_channel.show({Rank(*rank): h.window for rank, h in hellos.items() if h.window})
        try:
            self.address = self.side_channel.listen(self.address)
        except TransportError as error:
            if self._gives:
                raise
            raise TransportError(f"{error}; {_WHY}") from error
        self._log.info("side channel listens", address=self.address)

    def introduce_again(self, hellos: NewHellos) -> None:
        """Workers have woken up; their windows are where they were."""
        self.side_channel.introduce(hellos.payloads)

    @property
    def has_released(self) -> bool:
        """Whether a router gave up something that no worker has heard of."""
        return bool(self._released)

    def take_released(self) -> Iterator[ReleaseAsked]:
        """What routers gave up, for the workers."""
        while self._released:
            yield ReleaseAsked(transfer_id=self._released.popleft())

    def close(self) -> None:
        """Stop listening. Idempotent."""
        self.side_channel.close()

    def _release_asked(self, transfer_id: TransferId) -> None:
        """A router gives a transfer up; in the side channel's thread.

        An idle engine makes no step, so a worker in this process is told directly.
        """
        loop = loops_here.get(self._engine_id)
        if loop is not None:
            loop.submit([ReleaseAsked(transfer_id=transfer_id)])
        else:
            self._released.append(transfer_id)
