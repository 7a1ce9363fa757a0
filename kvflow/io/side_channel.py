"""The side channel: where a consumer asks a producer engine who its workers are.

A router may also tell it that nobody will fetch a transfer, and whoever wants to see live transfers
is told here where the workers show them (`kvflow.io.window`).

One TCP connection carries one request and one reply (`kvflow.io.framing`). The server answers from
what it was given and knows nothing of transfers.
"""

from collections.abc import Callable, Mapping

from kvflow.errors import RemoteProtocolError, TransportError
from kvflow.ids import Address, Rank, TransferId, new_incarnation
from kvflow.io.framing import NO_SEAL, FramedServer, ask
from kvflow.io.seal import Seal
from kvflow.io.thread import LoopThread
from kvflow.wire import codec, live
from kvflow.wire import messages as m

INSPECT_IS_OFF = (
    "live transfers are not shown: the setting `inspect` in this engine's "
    "kv_connector_extra_config is off"
)
_GIVES_NOTHING = "this engine is a consumer (kv_role is kv_consumer): it has no KV to give"
_START_TIMEOUT_S = 10.0


def _ignore(_: TransferId) -> None:
    """For a side channel that has nobody to tell."""


async def meet(
    address: Address, engine_id: str, timeout_s: float, seal: Seal = NO_SEAL
) -> m.MeetReply:
    """Ask the side channel at `address` who it is; `engine_id` is ours.

    Raises `TransportError` when it cannot be reached or does not answer in `timeout_s`, and
    `RemoteProtocolError` when what answers is not a side channel of our version, or has another
    key.
    """
    reply = await ask(address, m.MeetRequest(engine_id=engine_id), timeout_s, seal)
    if not isinstance(reply, m.MeetReply):
        raise RemoteProtocolError(f"{address} answers another question")
    return reply


async def release(
    address: Address, transfer_id: TransferId, timeout_s: float, seal: Seal = NO_SEAL
) -> None:
    """Tell the producer at `address` that nobody will fetch a transfer. Raises as `meet` does."""
    request = m.ReleaseRequest(transfer_id=transfer_id)
    if not isinstance(await ask(address, request, timeout_s, seal), m.Released):
        raise RemoteProtocolError(f"{address} answers another question")


async def windows(address: Address, timeout_s: float, seal: Seal = NO_SEAL) -> live.Windows:
    """Ask the engine at `address` where its workers show what is live. Raises as `meet` does."""
    reply = await ask(address, live.WindowsRequest(), timeout_s, seal)
    if not isinstance(reply, live.Windows):
        raise RemoteProtocolError(f"{address} answers another question")
    return reply


class SideChannelServer(FramedServer):
    """Serves one engine's `MeetReply` until closed.

    reply    called per request, so that a worker may be replaced while serving; None: this engine
             has no KV to give, and says so.
    release  told of each transfer that a router gives up.
    windows  where the workers show what is live; None: they do not.

    The rest: see `FramedServer`.
    """

    what = "side channel"

    def __init__(
        self,
        *,
        reply: Callable[[], m.MeetReply] | None,
        refused: Callable[[str, str], None],
        connections_max: int,
        release: Callable[[TransferId], None] = _ignore,
        windows: Callable[[], live.Windows] | None = None,
        seal: Seal = NO_SEAL,
    ) -> None:
        super().__init__(refused=refused, connections_max=connections_max, seal=seal)
        self._reply = reply
        self._release = release
        self._windows = windows

    async def answer_to(self, request: codec.Request) -> codec.Reply:
        match request:
            case live.WindowsRequest():
                return self._windows() if self._windows else m.Refusal(detail=INSPECT_IS_OFF)
            case live.LiveRequest() | live.InspectRequest():
                known = "one of the workers' windows is to be asked, not the side channel"
                return m.Refusal(detail=known if self._windows else INSPECT_IS_OFF)
            case m.MeetRequest() if self._reply is not None:
                return self._reply()
            case m.ReleaseRequest() if self._reply is not None:
                self._release(TransferId(request.transfer_id))
                return m.Released(transfer_id=request.transfer_id)
        return m.Refusal(detail=_GIVES_NOTHING)


class SideChannel:
    """A server on a thread of its own, answering with the coordinates of an engine's workers.

    refused  told what was refused, in the server's thread.
    release  told of each transfer that a router gives up, in the server's thread.
    role     vLLM's `kv_role`; a consumer's side channel meets nobody.
    inspect  whether it says where the workers show what is live.
    """

    def __init__(
        self,
        *,
        engine_id: str,
        refused: Callable[[str, str], None],
        connections_max: int,
        release: Callable[[TransferId], None] = _ignore,
        seal: Seal = NO_SEAL,
        role: str = "kv_producer",
        inspect: bool = False,
    ) -> None:
        self._engine_id = engine_id
        self._role = role
        self._incarnation = new_incarnation()
        self._hellos: dict[Rank, m.Hello] = {}
        self._windows_of: dict[Rank, Address] = {}
        self._thread: LoopThread | None = None
        self._server = SideChannelServer(
            reply=self._reply if role != "kv_consumer" else None,
            release=release,
            windows=self._windows if inspect else None,
            seal=seal,
            refused=refused,
            connections_max=connections_max,
        )

    def introduce(self, payloads: Mapping[Rank, bytes]) -> None:
        """Workers' coordinates, encoded; those of a rank replace older ones of it.

        Raises `RemoteProtocolError`.
        """
        hellos = {rank: codec.decode_hello(payload) for rank, payload in payloads.items()}
        self._hellos = self._hellos | hellos
        self._incarnation = new_incarnation()

    def show(self, windows: Mapping[Rank, Address]) -> None:
        """Where workers show what is live."""
        self._windows_of = self._windows_of | dict(windows)

    def listen(self, address: Address) -> Address:
        """Start to serve; returns the address, with the port that the system chose if it was 0.

        Raises `TransportError` if the address cannot be bound.
        """
        self._thread = LoopThread("kvflow-side-channel")
        try:
            return self._thread.run(self._server.start(address), _START_TIMEOUT_S)
        except TransportError:
            self.close()
            raise

    def close(self) -> None:
        """Stop serving. Idempotent."""
        if self._thread is not None:
            self._thread.run(self._server.close(), _START_TIMEOUT_S)
            self._thread.stop()
            self._thread = None

    def _reply(self) -> m.MeetReply:
        return m.MeetReply(
            engine_id=self._engine_id,
            incarnation=self._incarnation,
            ranks=tuple(hello for _, hello in sorted(self._hellos.items())),
        )

    def _windows(self) -> live.Windows:
        shown = sorted(self._windows_of.items())
        return live.Windows(
            engine_id=self._engine_id,
            role=self._role,
            windows=tuple(
                live.Window(pp_rank=rank.pp, tp_rank=rank.tp, host=at.host, port=at.port)
                for rank, at in shown
            ),
        )
