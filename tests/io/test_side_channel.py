"""The side channel's server against whoever connects."""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.errors import RemoteProtocolError, TransportError
from kvflow.ids import Address
from kvflow.io import framing
from kvflow.io.side_channel import SideChannelServer, meet
from kvflow.wire import codec
from kvflow.wire import messages as m

from .serving import HELLO, HERE, REQUEST, WAIT_S, framed, run, serving, until


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

VERSION = bytes([m.PROTOCOL_VERSION])
HOSTILE = {
    "nothing": b"",
    "one_byte": b"\x00",
    "no_body": framed(REQUEST)[:4],
    "cut": framed(REQUEST)[:-1],
    "zero_length": bytes(4),
    "huge_length": b"\xff\xff\xff\xff" + b"x" * 100,
    "just_too_long": (4097).to_bytes(4, "big") + bytes(4097),
    "wrong_version": framed(bytes([m.PROTOCOL_VERSION + 1]) + REQUEST[1:]),
    "another_message": framed(codec.encode(HELLO)),
    "release_of_nothing": framed(VERSION + msgspec.msgpack.encode({"type": "release"})),
    "release_with_spaces": framed(codec.encode(m.ReleaseRequest(transfer_id="a b"))),
    "release_too_long": framed(codec.encode(m.ReleaseRequest(transfer_id="x" * 257))),
    "released": framed(codec.encode(m.Released(transfer_id="t"))),
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "pickle": framed(b"\x80\x04\x95\x05\x00\x00\x00\x00\x00\x00\x00\x8c\x01a\x94."),
    "deep": framed(VERSION + b"\x91" * 4000),
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
            assert served.released == []
            assert (await served.meet()).engine_id == "engine"

    run(check())


@settings(max_examples=60)
@given(
    st.lists(
        st.one_of(
            st.binary(max_size=200),
            st.binary(max_size=200).map(framed),
            st.binary(max_size=200).map(lambda data: framed(VERSION + data)),
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
    monkeypatch.setattr(framing, "_REQUEST_TIMEOUT_S", 0.1)

    async def check() -> None:
        async with serving(connections_max=1) as served:
            reader, writer = await asyncio.open_connection(*served.address)
            for byte in framed(REQUEST)[:8]:
                with contextlib.suppress(RuntimeError):  # uvloop's word for "closed"
                    writer.write(bytes([byte]))
                await asyncio.sleep(0.02)
            with contextlib.suppress(OSError):
                assert await reader.read() == b""
            writer.close()
            await served.is_idle()
            assert served.refused[0][0] == "connection"
            assert "TimeoutError" in served.refused[0][1]
            monkeypatch.undo()
            assert (await served.meet()).engine_id == "engine"

    run(check())


def test_one_that_never_reads_its_reply_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reply too large for the sockets' buffers, to a client that does not read."""
    monkeypatch.setattr(framing, "_REQUEST_TIMEOUT_S", 0.2)
    fields = {name: getattr(HELLO, name) for name in HELLO.__struct_fields__}
    big = m.Hello(**{**fields, "metadata": bytes(7 * 2**20)})

    async def check() -> None:
        async with serving(connections_max=1, ranks=(big, big)) as served:
            reader, writer = await asyncio.open_connection(*served.address, limit=1024)
            writer.write(framed(REQUEST))
            await until(lambda: served.refused)
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
            await until(lambda: served.server._connections == 3)
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
                await until(lambda: served.server._connections)
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


def test_a_client_that_resets_before_the_reply_is_survived(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    decode = codec.decode_request

    async def check() -> None:
        async with serving() as served:

            def reset_then_decode(payload: bytes) -> m.MeetRequest:
                for transport in transports:
                    transport.abort()
                return decode(payload)

            transports = []
            served_as = SideChannelServer._answer

            async def answer(
                server: SideChannelServer,
                reader: asyncio.StreamReader,
                writer: asyncio.StreamWriter,
            ) -> None:
                transports.append(writer.transport)
                await served_as(server, reader, writer)

            with monkeypatch.context() as patch:
                patch.setattr(SideChannelServer, "_answer", answer)
                patch.setattr(codec, "decode_request", reset_then_decode)
                with pytest.raises(TransportError):
                    await served.meet()
            await served.is_idle()
            assert (await served.meet()).engine_id == "engine"

    run(check())
