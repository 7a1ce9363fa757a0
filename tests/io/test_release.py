"""A router says that nobody will fetch a transfer: by the side channel, by `kvflow release`."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from kvflow.cli import app
from kvflow.errors import KVFlowError, RemoteProtocolError, TransportError
from kvflow.ids import Address, Rank, TransferId
from kvflow.io.seal import KEY_BYTES_MIN, Seal, from_file
from kvflow.io.side_channel import SideChannel, release
from kvflow.wire import codec
from kvflow.wire import messages as m

from .serving import HELLO, HERE, REQUEST, WAIT_S, answering, framed, run, serving

T = TransferId("t")
KEY = b"k" * KEY_BYTES_MIN
ONE, SAME, OTHER, NONE = Seal(KEY), Seal(KEY), Seal(b"o" * KEY_BYTES_MIN), Seal()

# -- the side channel ----------------------------------------------------------------------------


@pytest.mark.parametrize("transfer", ["t", "x" * 256, "!~\"'\\"])
@pytest.mark.parametrize("seals", [(NONE, NONE), (ONE, SAME)], ids=["plain", "sealed"])
def test_a_release_is_answered_and_told_once(transfer: str, seals: tuple[Seal, Seal]) -> None:
    async def check() -> None:
        async with serving(seal=seals[0]) as served:
            await release(served.address, TransferId(transfer), WAIT_S, seals[1])
            assert served.released == [transfer]
            assert served.refused == []

    run(check())


@pytest.mark.parametrize("seals", [(ONE, OTHER), (ONE, NONE), (NONE, ONE)])
def test_a_release_without_the_key_is_refused_and_not_told(seals: tuple[Seal, Seal]) -> None:
    async def check() -> None:
        async with serving(seal=seals[0]) as served:
            with pytest.raises(RemoteProtocolError, match="key"):
                await release(served.address, T, WAIT_S, seals[1])
            await served.is_idle()
            assert served.released == []
            assert [kind for kind, _ in served.refused] == ["request"]
            await release(served.address, T, WAIT_S, seals[0])
            assert served.released == [T]

    run(check())


ANSWERS: dict[str, tuple[bytes, type[KVFlowError], str]] = {
    "end": (b"", TransportError, HERE),
    "met": (
        framed(codec.encode(m.MeetReply(engine_id="e", incarnation="i", ranks=()))),
        RemoteProtocolError,
        "answers another question",
    ),
    "refusal": (
        framed(codec.encode(m.Refusal(detail="not you"))),
        RemoteProtocolError,
        "refused: not you",
    ),
    "question": (framed(REQUEST), RemoteProtocolError, "malformed"),
}


@pytest.mark.parametrize("kind", ANSWERS)
def test_a_bad_answer_to_a_release_is_an_error_of_ours_to_handle(kind: str) -> None:
    data, error, sentence = ANSWERS[kind]

    async def check() -> None:
        async with answering(data, end=True) as address:
            with pytest.raises(error, match=sentence):
                await release(address, T, WAIT_S)

    run(check())


def test_a_release_that_is_not_answered_in_time_is_a_transport_error() -> None:
    async def check() -> None:
        async with answering(b"", end=False) as address:
            with pytest.raises(TransportError, match="did not answer"):
                await release(address, T, 0.05)

    run(check())


# -- the command ---------------------------------------------------------------------------------


class Producer:
    """A side channel on loopback, and what it was told."""

    def __init__(self, seal: Seal = NONE) -> None:
        self.released: list[TransferId] = []
        self.refused: list[str] = []
        self.channel = SideChannel(
            engine_id="engine",
            refused=lambda kind, _: self.refused.append(kind),
            connections_max=4,
            release=self.released.append,
            seal=seal,
        )
        self.channel.introduce({Rank(0, 0): codec.encode(HELLO)})
        self.address = self.channel.listen(Address(HERE, 0))


@pytest.fixture
def producer() -> Iterator[Producer]:
    producer = Producer()
    yield producer
    producer.channel.close()


@pytest.fixture
def sealed() -> Iterator[Producer]:
    producer = Producer(ONE)
    yield producer
    producer.channel.close()


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "key"
    path.write_bytes(KEY + b"\n")
    return str(path)


def command(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["release", *arguments])


def test_the_command_releases_and_says_so(producer: Producer) -> None:
    result = command(str(producer.address), "t")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout == f"{producer.address} lets t go\n"
    assert producer.released == [T]


def test_the_command_releases_with_the_shared_key(sealed: Producer, key_file: str) -> None:
    result = command(str(sealed.address), "t", "--shared-key-file", key_file)
    assert result.exit_code == 0, result.output
    assert sealed.released == [T]
    assert from_file(key_file).open(ONE.close(REQUEST, "a"), "a") == REQUEST


def test_the_command_without_the_key_is_refused_with_a_sentence(
    sealed: Producer, producer: Producer, key_file: str
) -> None:
    for result in (
        command(str(sealed.address), "t"),
        command(str(producer.address), "t", "--shared-key-file", key_file),
    ):
        assert result.exit_code == 1
        assert "key" in result.stderr
        assert len(result.stderr.splitlines()) == 1
        assert result.stdout == ""
    assert sealed.released == producer.released == []
    assert sealed.refused == producer.refused == ["request"]


def test_the_command_says_when_nobody_is_there() -> None:
    with socket.socket() as unused:
        unused.bind((HERE, 0))
        port = unused.getsockname()[1]
        result = command(f"{HERE}:{port}", "t")
    assert result.exit_code == 1
    assert f"{HERE}:{port}" in result.stderr


def test_the_command_says_when_nobody_answers() -> None:
    with socket.create_server((HERE, 0)) as silent:
        port = silent.getsockname()[1]
        result = command(f"{HERE}:{port}", "t", "--timeout-s", "0.05")
    assert result.exit_code == 1
    assert "did not answer in 0.05 s" in result.stderr


@pytest.mark.parametrize("content", [None, b"short"])
def test_the_command_names_a_bad_key_file(
    producer: Producer, tmp_path: Path, content: bytes | None
) -> None:
    path = tmp_path / "bad"
    if content is not None:
        path.write_bytes(content)
    result = command(str(producer.address), "t", "--shared-key-file", str(path))
    assert result.exit_code == 1
    assert str(path) in result.stderr
    assert producer.released == []


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ((), "PRODUCER"),
        (("host:1",), "TRANSFER_ID"),
        (("host", "t"), "PRODUCER"),
        (("host:", "t"), "PRODUCER"),
        ((":5600", "t"), "PRODUCER"),
        (("host:port", "t"), "PRODUCER"),
        (("host:-1", "t"), "PRODUCER"),
        (("host:0", "t"), "PRODUCER"),
        (("host:65536", "t"), "PRODUCER"),
        (("host:1", ""), "TRANSFER_ID"),
        (("host:1", "a b"), "TRANSFER_ID"),
        (("host:1", "ä"), "TRANSFER_ID"),
        (("host:1", "x" * 257), "TRANSFER_ID"),
        (("host:1", "t", "--timeout-s", "soon"), "--TIMEOUT-S"),
    ],
)
def test_the_command_names_a_bad_argument(arguments: tuple[str, ...], named: str) -> None:
    result = command(*arguments)
    assert result.exit_code == 2
    assert named in result.stderr.upper()
