"""A running side channel, for the tests of its server and of its client."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Coroutine

import uvloop

from kvflow.ids import Address, TransferId
from kvflow.io.seal import Seal
from kvflow.io.side_channel import SideChannelServer, meet
from kvflow.wire import codec
from kvflow.wire import messages as m

from .sides import Memory, identity

HERE = "127.0.0.1"
WAIT_S = 30.0
HELLO = identity(Memory(seed=1), "engine").hello("engine/agent", b"metadata")
REQUEST = codec.encode(m.MeetRequest(engine_id="asker"))
RELEASE = codec.encode(m.ReleaseRequest(transfer_id="t"))


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
        self.released: list[TransferId] = []

    async def meet(self) -> m.MeetReply:
        return await meet(self.address, "asker", WAIT_S)

    async def is_idle(self) -> None:
        """Wait until no connection is being served."""
        await until(lambda: not self.server._connections)


@contextlib.asynccontextmanager
async def serving(
    connections_max: int = 100, ranks: tuple[m.Hello, ...] = (HELLO,), seal: Seal | None = None
) -> AsyncIterator[Served]:
    reply = m.MeetReply(engine_id="engine", incarnation="first", ranks=ranks)
    refused: list[tuple[str, str]] = []
    released: list[TransferId] = []
    server = SideChannelServer(
        reply=lambda: reply,
        refused=lambda kind, detail: refused.append((kind, detail)),
        connections_max=connections_max,
        release=released.append,
        seal=seal or Seal(),
    )
    served = Served(await server.start(Address(HERE, 0)), server)
    served.refused, served.released = refused, released
    try:
        yield served
    finally:
        await server.close()
        await served.is_idle()


@contextlib.asynccontextmanager
async def answering(data: bytes, *, end: bool) -> AsyncIterator[Address]:
    """A server that says `data`, and then nothing, or the end."""
    writers: list[asyncio.StreamWriter] = []

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers.append(writer)
        writer.write(data)
        if end:
            writer.close()

    server = await asyncio.start_server(answer, HERE, 0)
    try:
        yield Address(HERE, server.sockets[0].getsockname()[1])
    finally:
        server.close()
        for writer in writers:
            writer.close()


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload
