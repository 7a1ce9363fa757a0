"""Asks engines what is live in them: the side channel where its workers' windows are, then those.

Rule: an engine or worker that does not answer, or refuses, is a sentence in the result and never
an exception: there are others to be shown.
"""

import asyncio
from dataclasses import dataclass
from typing import TypeVar

from kvflow.errors import KVFlowError, RemoteProtocolError
from kvflow.ids import Address, Rank
from kvflow.io.framing import ask
from kvflow.io.seal import Seal
from kvflow.io.side_channel import windows
from kvflow.wire import live

_ANYWHERE = frozenset({"0.0.0.0", "::", ""})
"""Hosts of windows that are reached where the side channel was."""
Told = TypeVar("Told", live.Live, live.Inspected)


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """How engines are asked."""

    timeout_s: float
    seal: Seal


@dataclass(frozen=True, slots=True, kw_only=True)
class OfWorker:
    """What one worker said is live. `error`: why it said nothing."""

    rank: Rank
    told: live.Live | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class OfEngine:
    """What one engine said. `error`: why it said nothing."""

    address: Address
    told: live.Windows | None = None
    workers: tuple[OfWorker, ...] = ()
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What an engine's workers know of a name. `errors`: of workers that did not answer."""

    engine: live.Windows
    inspected: tuple[live.Inspected, ...]
    errors: tuple[str, ...]

    @property
    def telling(self) -> tuple[live.Inspected, ...]:
        """Whose word counts: where one knows it as a whole id, what others guess does not."""
        exact = tuple(each for each in self.inspected if each.exact)
        return exact or tuple(each for each in self.inspected if each.matched)

    @property
    def transfers(self) -> tuple[str, ...]:
        """The transfers that are so called."""
        return tuple(dict.fromkeys(name for each in self.telling for name in each.transfers))


async def look(address: Address, limit: int, access: Access) -> OfEngine:
    """What is live in an engine: at most `limit` transfers of each worker."""
    try:
        told = await windows(address, access.timeout_s, access.seal)
    except KVFlowError as error:
        return OfEngine(address=address, error=str(error))
    if not told.windows:
        return OfEngine(address=address, told=told, error="none of its workers has a window")
    asking = [_look_at(address, each, limit, access) for each in told.windows]
    return OfEngine(address=address, told=told, workers=tuple(await asyncio.gather(*asking)))


async def find(address: Address, name: str, access: Access) -> Found:
    """What an engine knows of a transfer. Raises `KVFlowError` if none of its workers answers."""
    told = await windows(address, access.timeout_s, access.seal)
    request = live.InspectRequest(name=name)
    asking = [_ask(address, each, request, live.Inspected, access) for each in told.windows]
    answers = await asyncio.gather(*asking)
    errors = tuple(answer for answer in answers if isinstance(answer, str))
    inspected = tuple(answer for answer in answers if not isinstance(answer, str))
    if not inspected:
        raise RemoteProtocolError(
            errors[0] if errors else f"none of the workers of {address} has a window"
        )
    return Found(engine=told, inspected=inspected, errors=errors)


async def _look_at(engine: Address, window: live.Window, limit: int, access: Access) -> OfWorker:
    rank = Rank(window.pp_rank, window.tp_rank)
    answer = await _ask(engine, window, live.LiveRequest(limit=limit), live.Live, access)
    if isinstance(answer, str):
        return OfWorker(rank=rank, error=answer)
    return OfWorker(rank=rank, told=answer)


async def _ask(
    engine: Address,
    window: live.Window,
    request: live.LiveRequest | live.InspectRequest,
    wanted: type[Told],
    access: Access,
) -> Told | str:
    """The answer of one window, or why there is none."""
    host = engine.host if window.host in _ANYWHERE else window.host
    try:
        reply = await ask(Address(host, window.port), request, access.timeout_s, access.seal)
    except KVFlowError as error:
        return f"{Rank(window.pp_rank, window.tp_rank)}: {error}"
    if not isinstance(reply, wanted):
        return f"{host}:{window.port} answers another question"
    return reply
