"""The side channel's server against whoever connects, and the client against whoever answers."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

import pytest
import uvloop
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.core import Reason
from kvflow.core.notices import Failed
from kvflow.errors import KVFlowError, RemoteProtocolError, TransportError
from kvflow.ids import Address, Rank, TransferId
from kvflow.io import side_channel
from kvflow.io.side_channel import SideChannel, SideChannelServer, meet
from kvflow.wire import codec
from kvflow.wire import messages as m

from .sides import Memory, identity

HERE = "127.0.0.1"
WAIT_S = 30.0
HELLO = identity(Memory(seed=1), "engine").hello("engine/agent", b"metadata")  # type: ignore[arg-type]
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
        while self.server._connections:
            await asyncio.sleep(0.001)


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


async def say(address: Address, data: bytes, *, end: bool = True) -> bytes:
    """Write `data`, end the stream if `end`, and read whatever comes until the server ends it."""
    reader, writer = await asyncio.open_connection(*address)
    answer = b""
    with contextlib.suppress(OSError):
        writer.write(data)
        if end:
            writer.write_eof()
        answer = await reader.read()
    writer.close()
    with contextlib.suppress(OSError):
        await writer.wait_closed()
    return answer


def framed(payload: bytes) -> bytes:
    return len(payload).to_bytes(4, "big") + payload


def test_whoever_asks_is_answered_with_every_rank() -> None:
    async def check() -> None:
        async with serving() as served:
            reply = await served.meet()
            assert reply == m.MeetReply(engine_id="engine", incarnation="first", ranks=(HELLO,))
            assert served.refused == []

    run(check())


def test_many_may_ask_at_once() -> None:
    async def check() -> None:
        async with serving() as served:
            replies = await asyncio.gather(*(served.meet() for _ in range(50)))
            assert {reply.engine_id for reply in replies} == {"engine"}

    run(check())


# -- hostile clients -----------------------------------------------------------------------------

HOSTILE = {
    "nothing": b"",
    "one_byte": b"\x00",
    "no_body": framed(REQUEST)[:4],
    "cut": framed(REQUEST)[:-1],
    "zero_length": bytes(4),
    "huge_length": b"\xff\xff\xff\xff" + b"x" * 100,
    "just_too_long": (4097).to_bytes(4, "big") + bytes(4097),
    "wrong_version": framed(b"\x02" + REQUEST[1:]),
    "another_message": framed(codec.encode(HELLO)),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "pickle": framed(b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00\x8c\x01a\x94."),
    "deep": framed(b"\x01" + b"\x91" * 4000),
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_hostile_bytes_are_refused_and_the_next_request_is_answered(kind: str) -> None:
    async def check() -> None:
        async with serving() as served:
            answer = await say(served.address, HOSTILE[kind])
            if answer:
                with pytest.raises(RemoteProtocolError, match="refused"):
                    codec.decode_reply(answer[4:])
            await served.is_idle()
            assert len(served.refused) == 1
            assert (await served.meet()).engine_id == "engine"

    run(check())


@settings(max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=200),
            st.binary(max_size=200).map(framed),
            st.binary(max_size=200).map(lambda data: framed(b"\x01" + data)),
            st.integers(0, len(framed(REQUEST)) - 1).map(lambda at: framed(REQUEST)[:at]),
        ),
        max_size=8,
    ),
    st.booleans(),
)
def test_no_bytes_stop_the_server(payloads: list[bytes], together: bool) -> None:
    async def check() -> None:
        async with serving() as served:
            talks = [say(served.address, payload) for payload in payloads]
            if together:
                await asyncio.gather(*talks)
            else:
                for talk in talks:
                    await talk
            assert (await served.meet()).engine_id == "engine"
            await served.is_idle()

    run(check())


def test_one_that_sends_a_byte_now_and_then_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(side_channel, "_REQUEST_TIMEOUT_S", 0.1)

    async def check() -> None:
        async with serving(connections_max=1) as served:
            reader, writer = await asyncio.open_connection(*served.address)
            for byte in framed(REQUEST)[:8]:
                writer.write(bytes([byte]))
                await asyncio.sleep(0.02)
            with contextlib.suppress(OSError):
                assert await reader.read() == b""
            writer.close()
            await served.is_idle()
            assert served.refused[0][0] == "connection"
            assert "TimeoutError" in served.refused[0][1]
            assert (await served.meet()).engine_id == "engine"

    run(check())


def test_one_that_never_reads_its_reply_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply too large for the sockets' buffers, to a client that does not read."""
    monkeypatch.setattr(side_channel, "_REQUEST_TIMEOUT_S", 0.2)
    fields = {name: getattr(HELLO, name) for name in HELLO.__struct_fields__}
    big = m.Hello(**{**fields, "metadata": bytes(7 * 2**20)})

    async def check() -> None:
        async with serving(connections_max=1, ranks=(big, big)) as served:
            reader, writer = await asyncio.open_connection(*served.address, limit=1024)
            writer.write(framed(REQUEST))
            while not served.refused:
                await asyncio.sleep(0.01)
            await served.is_idle()
            tasks = asyncio.all_tasks() - {asyncio.current_task()}
            assert not any("_serve" in repr(task) for task in tasks)
            with pytest.raises((asyncio.IncompleteReadError, OSError)):
                await reader.readexactly(14 * 2**20)
            writer.close()

    run(check())


def test_more_connections_than_the_limit_are_closed_and_the_others_served() -> None:
    async def check() -> None:
        async with serving(connections_max=3) as served:
            idle = [await asyncio.open_connection(*served.address) for _ in range(3)]
            while served.server._connections < 3:
                await asyncio.sleep(0.001)
            with pytest.raises(TransportError):
                await served.meet()
            assert served.refused == [("connection", "more than 3 at once")]
            for _, writer in idle:
                writer.close()
            await served.is_idle()
            assert (await served.meet()).engine_id == "engine"

    run(check())


def test_a_bug_in_the_reply_costs_one_connection() -> None:
    """It is the loop's exception handler that hears of it."""
    replies: list[m.MeetReply] = []
    heard: list[object] = []

    async def check() -> None:
        server = SideChannelServer(
            reply=lambda: replies[0], refused=lambda *_: None, connections_max=1
        )
        address = await server.start(Address(HERE, 0))
        asyncio.get_running_loop().set_exception_handler(lambda _, what: heard.append(what))
        with pytest.raises(TransportError):
            await meet(address, "asker", WAIT_S)
        replies.append(m.MeetReply(engine_id="engine", incarnation="first", ranks=()))
        assert (await meet(address, "asker", WAIT_S)).engine_id == "engine"
        await server.close()

    run(check())
    assert heard


# -- cancellation --------------------------------------------------------------------------------


def at_drain(patch: pytest.MonkeyPatch, wait: Callable[[], Awaitable[None]]) -> None:
    async def drain(_: asyncio.StreamWriter) -> None:
        await wait()

    patch.setattr(asyncio.StreamWriter, "drain", drain)


@pytest.mark.parametrize("place", ["read_length", "read_body", "drain", "close"])
def test_serving_cancelled_anywhere_frees_its_place_and_closes_its_socket(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check() -> None:
        reached = asyncio.Event()

        async def wait(*_: object) -> None:
            reached.set()
            await asyncio.Event().wait()

        async with serving(connections_max=1) as served:
            with monkeypatch.context() as patch:
                reader, writer = await asyncio.open_connection(*served.address)
                if place == "drain":
                    at_drain(patch, wait)
                elif place == "close":
                    patch.setattr(asyncio.StreamWriter, "wait_closed", wait)
                sent = {"read_length": b"", "read_body": framed(REQUEST)[:6]}
                writer.write(sent.get(place, framed(REQUEST)))
                while not served.server._connections:
                    await asyncio.sleep(0.001)
                if place in ("drain", "close"):
                    await reached.wait()
                else:
                    await asyncio.sleep(0.02)
                (task,) = [t for t in asyncio.all_tasks() if "_serve" in repr(t)]
                task.cancel()
                await asyncio.wait([task])
            assert served.server._connections == 0
            with contextlib.suppress(OSError):
                await reader.read()
            writer.close()
            assert (await served.meet()).engine_id == "engine"

    run(check())


# -- the client ----------------------------------------------------------------------------------


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


ANSWERS: dict[str, tuple[bytes, type[KVFlowError]]] = {
    "end": (b"", TransportError),
    "cut": (framed(codec.encode(HELLO))[:-3], TransportError),
    "huge": (b"\xff\xff\xff\xff", RemoteProtocolError),
    "version": (framed(b"\x07rubbish"), RemoteProtocolError),
    "empty": (bytes(4), RemoteProtocolError),
    "noise": (framed(b"\x01\xc1\xc1"), RemoteProtocolError),
    "another": (framed(REQUEST), RemoteProtocolError),
    "refusal": (framed(codec.encode(m.Refusal(detail="not you"))), RemoteProtocolError),
    "notice": (
        framed(
            codec.encode_frame(
                [Failed(transfer_id=TransferId("t"), attempt=1, reason=Reason.STALE)], None
            )
        ),
        RemoteProtocolError,
    ),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_bad_answer_is_an_error_of_ours_to_handle(kind: str) -> None:
    data, error = ANSWERS[kind]

    async def check() -> None:
        async with answering(data, end=True) as address:
            with pytest.raises(error):
                await meet(address, "asker", WAIT_S)

    run(check())


@pytest.mark.parametrize("data", [b"", bytes(3), framed(b"x" * 50)[:20]])
def test_one_that_does_not_answer_in_time_is_a_transport_error(data: bytes) -> None:
    async def check() -> None:
        async with answering(data, end=False) as address:
            with pytest.raises(TransportError, match=f"{address.port} did not answer"):
                await meet(address, "asker", 0.05)

    run(check())


@pytest.mark.parametrize(
    "host", ["", "a..b", ".", "x" * 64, "ä" * 100, "a\0b", "a b", "127.0.0.1:5", "%", "*"]
)
def test_a_host_that_cannot_be_one_is_a_transport_error(host: str) -> None:
    async def check() -> None:
        with pytest.raises(TransportError):
            await meet(Address(host, 1), "asker", WAIT_S)

    run(check())


def test_a_taken_port_is_a_transport_error_that_names_the_address() -> None:
    async def check() -> None:
        async with serving() as served:
            other = SideChannelServer(
                reply=lambda: None,  # type: ignore[arg-type, return-value]
                refused=lambda *_: None,
                connections_max=1,
            )
            with pytest.raises(TransportError, match=str(served.address.port)):
                await other.start(served.address)
            await other.close()

    run(check())


# -- on a thread of its own ----------------------------------------------------------------------


def side_channel_of(hello: m.Hello) -> SideChannel:
    channel = SideChannel(engine_id="engine", refused=lambda *_: None, connections_max=4)
    channel.introduce({Rank(0, 0): codec.encode(hello)})
    return channel


def test_a_side_channel_serves_what_it_was_last_told_and_closes_twice() -> None:
    channel = side_channel_of(HELLO)
    address = channel.listen(Address(HERE, 0))
    first = uvloop.run(meet(address, "asker", WAIT_S))
    fields = {name: getattr(HELLO, name) for name in HELLO.__struct_fields__}
    channel.introduce({Rank(0, 0): codec.encode(m.Hello(**{**fields, "incarnation": "second"}))})
    second = uvloop.run(meet(address, "asker", WAIT_S))
    assert [hello.incarnation for hello in second.ranks] == ["second"]
    assert first.incarnation != second.incarnation
    channel.close()
    channel.close()
    with pytest.raises(TransportError):
        uvloop.run(meet(address, "asker", WAIT_S))
    again = side_channel_of(HELLO)
    assert again.listen(address) == address
    again.close()


def test_a_side_channel_that_cannot_listen_leaves_no_thread() -> None:
    one, other = side_channel_of(HELLO), side_channel_of(HELLO)
    address = one.listen(Address(HERE, 0))
    with pytest.raises(TransportError):
        other.listen(address)
    other.close()
    one.close()


def test_coordinates_that_cannot_be_read_are_refused_at_once() -> None:
    channel = SideChannel(engine_id="engine", refused=lambda *_: None, connections_max=4)
    with pytest.raises(RemoteProtocolError):
        channel.introduce({Rank(0, 0): b"scribble"})
