"""Asking a side channel against whoever answers, and a side channel on a thread of its own."""

import pytest
import uvloop

from kvflow.core import Reason
from kvflow.core.notices import Failed
from kvflow.errors import KVFlowError, RemoteProtocolError, TransportError
from kvflow.ids import Address, Rank, TransferId
from kvflow.io.side_channel import SideChannel, SideChannelServer, meet
from kvflow.wire import codec
from kvflow.wire import messages as m

from .serving import HELLO, HERE, RELEASE, REQUEST, WAIT_S, answering, framed, run, serving

ANSWERS: dict[str, tuple[bytes, type[KVFlowError]]] = {
    "end": (b"", TransportError),
    "cut": (framed(codec.encode(HELLO))[:-3], TransportError),
    "huge": (b"\xff\xff\xff\xff", RemoteProtocolError),
    "version": (framed(b"\x07rubbish"), RemoteProtocolError),
    "empty": (bytes(4), RemoteProtocolError),
    "noise": (framed(b"\x01\xc1\xc1"), RemoteProtocolError),
    "another": (framed(REQUEST), RemoteProtocolError),
    "released": (framed(codec.encode(m.Released(transfer_id="t"))), RemoteProtocolError),
    "release": (framed(RELEASE), RemoteProtocolError),
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
                reply=lambda: None,
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
