"""Two legs as one: a request goes to a producer and a consumer, and comes back as one answer.

Rules: whatever ends a dispatch early (a leg's failure, a client that goes away, a lost engine, the
deadline) ends both legs, and tells the producer that nobody will fetch the KV; every place that was
taken is given back; a request is dispatched again only while its client has been given nothing.

The idea of push: both legs are sent at once, so the consumer's registration waits for the prefill
and not the other way round. Its price is that the consumer is chosen, and its blocks are parked,
before the prompt is computed. Pull chooses the consumer when the prompt is computed.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import structlog

from kvflow.errors import CapacityError, KVFlowError
from kvflow.ids import Address, TransferId
from kvflow.io import side_channel
from kvflow.io.seal import Seal
from kvflow.router import legs, upstream
from kvflow.router.config import Config, Mode
from kvflow.router.engines import Engine, Fleet, Place, Role, Wanted
from kvflow.router.ids import new_transfer_id
from kvflow.router.metrics import Metrics
from kvflow.router.upstream import Answer, LegError, UnreachableError
from kvflow.router.watching import Watch

_RELEASE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a client asked for."""

    path: str
    body: Mapping[str, Any]
    headers: Mapping[str, str]
    head: bytes
    tokens: int


@dataclass(slots=True, kw_only=True)
class Dispatch:
    """One try, as it is told in the log.

    local       why there are no legs; None if there are.
    address, rank
                the producer's side channel, and the data-parallel rank that computes.
    prefill_s, first_s
                when the prefill leg was answered, and when the client could be given something.
    """

    mode: Mode | None = None
    local: str | None = None
    transfer_id: TransferId | None = None
    producer: Engine | None = None
    consumer: Engine | None = None
    address: Address | None = None
    rank: int | None = None
    began: float = field(default_factory=time.monotonic)
    prefill_s: float | None = None
    first_s: float | None = None
    is_fetched: bool = False

    def computes_at(self, producer: Engine) -> None:
        """Which producer was chosen; it may go out at any time from now on."""
        self.producer = producer
        self.address, self.rank = producer.next_rank()

    def blamed(self, error: LegError) -> frozenset[str]:
        """Engines that the next dispatch had better do without.

        A consumer that answers with an error may lack KV that its producer has not delivered.
        """
        suspects = [error.engine]
        if error.engine is self.consumer and error.status is not None and self.producer is not None:
            suspects.append(self.producer)
        return frozenset(each.url for each in suspects)

    def since(self) -> float:
        """Seconds since the dispatch began."""
        return time.monotonic() - self.began


class Dispatcher:
    """Answers requests with the engines of a fleet."""

    def __init__(
        self,
        *,
        fleet: Fleet,
        session: aiohttp.ClientSession,
        config: Config,
        watch: Watch,
        metrics: Metrics,
        seal: Seal,
    ) -> None:
        self._fleet = fleet
        self._session = session
        self._config = config
        self._watch = watch
        self._metrics = metrics
        self._seal = seal
        self._releases: set[asyncio.Task[None]] = set()
        self._log = structlog.get_logger("kvflow.router")

    @asynccontextmanager
    async def answer(self, asked: Asked, tries: list[Dispatch]) -> AsyncIterator[Answer]:
        """The answer, when it has begun; both legs end with the block.

        tries  is appended to: the dispatches that were made, the last one being the answer's.

        Raises `LegError` when it failed, for the last time; `NoEngineError`; `CapacityError`.
        """
        tried: frozenset[str] = frozenset()
        for number in range(self._config.dispatches_max):
            dispatch = Dispatch(local=legs.why_local(asked.path, asked.body))
            async with AsyncExitStack() as held:
                try:
                    answer = await self._begin(asked, dispatch, tried, held)
                except LegError as error:
                    self._failed(dispatch, error)
                    if error.is_clients or number + 1 == self._config.dispatches_max:
                        raise
                    tried |= dispatch.blamed(error)
                    continue
                finally:
                    tries.append(dispatch)
                    self._metrics.dispatched(str(dispatch.mode or "local"), dispatch.local)
                dispatch.first_s = dispatch.since()
                yield answer
                return

    async def close(self) -> None:
        """Waits for what is still being said to producers."""
        await asyncio.gather(*self._releases, return_exceptions=True)

    # -- the ways ----------------------------------------------------------------------------------

    async def _begin(
        self, asked: Asked, dispatch: Dispatch, tried: frozenset[str], held: AsyncExitStack
    ) -> Answer:
        if dispatch.local is not None:
            return await self._local(asked, dispatch, tried, held)
        dispatch.transfer_id = new_transfer_id()
        dispatch.mode = self._mode()
        held.push_async_callback(self._let_go, dispatch)
        way = self._push if dispatch.mode is Mode.PUSH else self._pull
        answer = await way(asked, dispatch, tried, held)
        dispatch.is_fetched = True
        return answer

    def _mode(self) -> Mode:
        if self._config.mode is not Mode.AUTO:
            return self._config.mode
        consumers = self._fleet.usable(Role.DECODE)
        if all(each.met is not None and each.met.mode == "pull" for each in consumers):
            return Mode.PULL
        is_full = all(each.kv_usage >= self._config.full_above for each in consumers)
        return Mode.PULL if is_full else Mode.PUSH

    async def _local(
        self, asked: Asked, dispatch: Dispatch, tried: frozenset[str], held: AsyncExitStack
    ) -> Answer:
        (place,) = await self._take(held, self._wanted(Role.DECODE, asked, tried))
        dispatch.consumer = place.engine
        place.engine.local_at = time.monotonic()
        return await self._post(place.engine, asked, legs.local(asked.body), held)

    async def _push(
        self, asked: Asked, dispatch: Dispatch, tried: frozenset[str], held: AsyncExitStack
    ) -> Answer:
        roles = (Role.PREFILL, Role.DECODE)
        wanted = [self._wanted(role, asked, tried) for role in roles]
        computing, answering = await self._take(held, *wanted)
        dispatch.computes_at(computing.engine)
        dispatch.consumer = answering.engine
        prefill = asyncio.create_task(self._prefill(asked, dispatch, held))
        prefill.add_done_callback(computing.free)
        decode = asyncio.create_task(self._decode(asked, dispatch, {}, held))
        held.push_async_callback(_end, prefill, decode)
        await asyncio.wait({prefill, decode}, return_when=asyncio.FIRST_COMPLETED)
        if decode.done() and not decode.exception():
            return decode.result()
        if prefill.done() and not prefill.exception():
            return await decode
        raise _worst(prefill, decode)

    async def _pull(
        self, asked: Asked, dispatch: Dispatch, tried: frozenset[str], held: AsyncExitStack
    ) -> Answer:
        (computing,) = await self._take(held, self._wanted(Role.PREFILL, asked, tried))
        dispatch.computes_at(computing.engine)
        passed_on = await self._prefill(asked, dispatch, held)
        computing.free()
        (answering,) = await self._take(held, self._wanted(Role.DECODE, asked, tried))
        dispatch.consumer = answering.engine
        return await self._decode(asked, dispatch, passed_on, held)

    # -- legs --------------------------------------------------------------------------------------

    async def _prefill(
        self, asked: Asked, dispatch: Dispatch, held: AsyncExitStack
    ) -> Mapping[str, Any]:
        """The parameters that the producer answers with, for the decode leg."""
        assert dispatch.transfer_id is not None and dispatch.producer is not None
        body = legs.prefill_leg(asked.body, dispatch.transfer_id)
        rank = {} if dispatch.rank is None else {legs.RANK_HEADER: str(dispatch.rank)}
        answer = await self._post(dispatch.producer, asked, body, held, rank)
        dispatch.prefill_s = dispatch.since()
        self._metrics.leg(Role.PREFILL, dispatch.prefill_s)
        try:
            passed_on: Mapping[str, Any] = upstream.json_of(answer).get("kv_transfer_params") or {}
        except ValueError as error:
            raise LegError(dispatch.producer, f"answers nonsense: {error}") from error
        return passed_on

    async def _decode(
        self,
        asked: Asked,
        dispatch: Dispatch,
        passed_on: Mapping[str, Any],
        held: AsyncExitStack,
    ) -> Answer:
        assert dispatch.transfer_id is not None
        assert dispatch.address is not None and dispatch.consumer is not None
        sent = dispatch.since()
        body = legs.decode_leg(asked.body, dispatch.transfer_id, dispatch.address, passed_on)
        answer = await self._post(dispatch.consumer, asked, body, held)
        self._metrics.leg(Role.DECODE, dispatch.since() - sent)
        return answer

    async def _post(
        self,
        engine: Engine,
        asked: Asked,
        body: Mapping[str, Any],
        held: AsyncExitStack,
        extra: Mapping[str, str] | None = None,
    ) -> Answer:
        headers = {**asked.headers, **(extra or {})}
        try:
            answer = await upstream.post(self._session, engine, asked.path, body, headers)
        except UnreachableError:
            self._watch.suspect(engine)
            raise
        held.callback(answer.close)
        return answer

    # -- places, failures, ends --------------------------------------------------------------------

    def _wanted(self, role: Role, asked: Asked, tried: frozenset[str]) -> Wanted:
        return Wanted(role=role, head=asked.head, tokens=asked.tokens, tried=tried)

    async def _take(self, held: AsyncExitStack, *wanted: Wanted) -> tuple[Place, ...]:
        """Places, held until `held` ends or they are freed before.

        Raises `CapacityError` when none was free for `queue_timeout_s`.
        """
        try:
            async with asyncio.timeout(self._config.queue_timeout_s):
                places = await self._fleet.take(*wanted)
        except TimeoutError as error:
            limit = "queue_timeout_s"
            raise CapacityError(limit, round(self._config.queue_timeout_s)) from error
        for place in places:
            held.callback(place.free)
        return places

    def _failed(self, dispatch: Dispatch, error: LegError) -> None:
        self._metrics.failed(error.engine.role)
        self._log.warning(
            "dispatch failed",
            transfer_id=dispatch.transfer_id,
            why=str(error),
            clients=error.is_clients,
        )

    async def _let_go(self, dispatch: Dispatch) -> None:
        """Nobody will fetch what the producer has, or will have."""
        if dispatch.is_fetched or dispatch.address is None or dispatch.transfer_id is None:
            return
        task = asyncio.create_task(self._release(dispatch.address, dispatch.transfer_id))
        self._releases.add(task)
        task.add_done_callback(self._releases.discard)

    async def _release(self, address: Address, transfer_id: TransferId) -> None:
        try:
            await side_channel.release(address, transfer_id, _RELEASE_TIMEOUT_S, self._seal)
        except KVFlowError as error:
            self._log.info("not released", transfer_id=transfer_id, why=str(error))


def _worst(*tasks: "asyncio.Task[Any]") -> BaseException:
    """Why legs failed: a client's mistake, rather than what came of it at the other engine."""
    failures = [error for task in tasks if task.done() and (error := task.exception()) is not None]
    return min(failures, key=lambda e: not (isinstance(e, LegError) and e.is_clients))


async def _end(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
