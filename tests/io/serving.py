"""A running side channel, for the tests of its server and of its client."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine

import uvloop

from kvflow.ids import Address
from kvflow.io.side_channel import SideChannelServer, meet
from kvflow.wire import codec
from kvflow.wire import messages as m

from .sides import Memory, identity

HERE = "127.0.0.1"
WAIT_S = 30.0
HELLO = identity(Memory(seed=1), "engine").hello("engine/agent", b"metadata")
REQUEST = codec.encode(m.MeetRequest(engine_id="asker"))


def run(coroutine: Coroutine[object, object, None]) -> None:
    """In a new uvloop, within a bound; whatever a task leaves unhandled is an error."""
    unhandled: list[dict[str, object]] = []

    async def bounded() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, what: unhandled.append(what))
        async with asyncio.timeout(WAIT_S):
            await coroutine
        await asyncio.sleep(0)

    uvloop.run(bounded())
    assert unhandled == []


async def until(holds: Callable[[], object]) -> None:
    while not holds():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


class Served:
    """A running server and what it refused."""

    def __init__(self, address: Address, server: SideChannelServer) -> None:
        self.address = address
        self.server = server
        self.refused: list[tuple[str, str]] = []

    async def meet(self) -> m.MeetReply:
        return await meet(self.address, "asker", WAIT_S)

    async def is_idle(self) -> None:
        """Wait until no connection is being served."""
        await until(lambda: not self.server._connections)


@contextlib.asynccontextmanager
async def serving(
    connections_max: int = 100, ranks: tuple[m.Hello, ...] = (HELLO,)
) -> AsyncIterator[Served]:
    reply = m.MeetReply(engine_id="engine", incarnation="first", ranks=ranks)
    refused: list[tuple[str, str]] = []
    server = SideChannelServer(
        reply=lambda: reply,
        refused=lambda kind, detail: refused.append((kind, detail)),
        connections_max=connections_max,
    )
    served = Served(await server.start(Address(HERE, 0)), server)
    served.refused = refused
    try:
        yield served
    finally:
        await server.close()
        await served.is_idle()


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload
