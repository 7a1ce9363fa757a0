"""The seal: what it lets pass, what it refuses, and two workers that do or do not share a key."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflow.core import Reason
from kvflow.errors import ConfigurationError, RemoteProtocolError
from kvflow.ids import AgentName
from kvflow.io.seal import KEY_BYTES_MIN, SIDE_CHANNEL, Seal, from_file
from kvflow.testing.port import MemoryNetwork
from kvflow.wire.messages import PROTOCOL_VERSION

from .loops import Worker
from .sides import DESTINATION, PAIRS, SOURCE, Clock, Pair, Side, load_of, prefill_first

KEY = b"k" * KEY_BYTES_MIN
ONE, SAME, OTHER, NONE = Seal(KEY), Seal(KEY), Seal(b"o" * KEY_BYTES_MIN), Seal()
MESSAGE = bytes([PROTOCOL_VERSION]) + b"a message"
MESSAGES = st.binary(max_size=200).map(lambda body: bytes([PROTOCOL_VERSION]) + body)
MakeSide = Callable[..., Side]

# -- one message ---------------------------------------------------------------------------------


@given(MESSAGES, st.text(max_size=30))
def test_what_was_sealed_opens_with_the_same_key_only(message: bytes, sender: str) -> None:
    sealed = ONE.close(message, sender)
    assert SAME.open(sealed, sender) == message
    for other in (OTHER, NONE):
        with pytest.raises(RemoteProtocolError):
            other.open(sealed, sender)


def test_without_a_key_plain_passes_and_sealed_is_refused_with_a_sentence() -> None:
    assert NONE.close(MESSAGE, "a") == MESSAGE
    assert NONE.open(MESSAGE, "a") == MESSAGE
    with pytest.raises(RemoteProtocolError, match="no shared_key_file is set here"):
        NONE.open(ONE.close(MESSAGE, "a"), "a")


@pytest.mark.parametrize("message", [MESSAGE, b"", b"\x00", bytes(100)])
def test_with_a_key_plain_is_refused_with_a_sentence(message: bytes) -> None:
    with pytest.raises(RemoteProtocolError, match="shared_key_file is set here"):
        ONE.open(message, "a")


def test_a_sealed_message_changed_anywhere_is_refused() -> None:
    sealed = ONE.close(MESSAGE, "a")
    changed = [
        sealed[:at] + bytes([sealed[at] ^ 1 << bit]) + sealed[at + 1 :]
        for at in range(len(sealed))
        for bit in range(8)
    ]
    changed += [sealed[:length] for length in range(len(sealed))] + [sealed + b"\0"]
    for each in changed:
        with pytest.raises(RemoteProtocolError):
            ONE.open(each, "a")


@pytest.mark.parametrize("sender", ["", "b", "aa", "a ", SIDE_CHANNEL])
def test_a_message_is_good_for_its_sender_only(sender: str) -> None:
    with pytest.raises(RemoteProtocolError, match="not made with our key"):
        ONE.open(ONE.close(MESSAGE, "a"), sender)


def test_a_name_cannot_take_over_a_part_of_the_message() -> None:
    sealed = ONE.close(bytes([PROTOCOL_VERSION]) + b"bc", "a")
    head, body = sealed[:-2], sealed[-2:]
    with pytest.raises(RemoteProtocolError):
        ONE.open(head + body[1:], "ab")


def test_the_seal_hides_nothing_but_the_key() -> None:
    sealed = ONE.close(MESSAGE, "a")
    assert KEY not in sealed
    assert sealed.endswith(MESSAGE[1:])


# -- the key file --------------------------------------------------------------------------------


@pytest.mark.parametrize("text", [KEY, KEY + b"\n", b"  \t" + KEY + b"\r\n\n"])
def test_a_key_is_what_the_file_holds_between_white_space(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "key"
    path.write_bytes(text)
    assert from_file(str(path)).open(ONE.close(MESSAGE, "a"), "a") == MESSAGE


def test_no_file_means_no_key() -> None:
    assert from_file("").close(MESSAGE, "a") == MESSAGE


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (None, "No such file"),
        (b"", "it has 0"),
        (KEY[1:], f"it has {KEY_BYTES_MIN - 1}"),
        (KEY[1:] + b" \n", f"it has {KEY_BYTES_MIN - 1}"),
    ],
)
def test_a_missing_or_short_key_is_named(tmp_path: Path, content: bytes | None, why: str) -> None:
    path = tmp_path / "key"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ConfigurationError, match="shared_key_file") as raised:
        from_file(str(path))
    assert raised.value.value == str(path)
    assert why in raised.value.allowed
    assert f"at least {KEY_BYTES_MIN} bytes" in raised.value.allowed


def test_a_directory_is_no_key(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=str(tmp_path)):
        from_file(str(tmp_path))


# -- two drivers ---------------------------------------------------------------------------------


def test_two_drivers_with_one_key_transfer(make_side: MakeSide, clock: Clock) -> None:
    pair = Pair(make_side("producer", seal=ONE), make_side("consumer", seal=SAME), clock)
    expected = pair.consumer.memory.with_blocks(pair.producer.memory, PAIRS)
    prefill_first(pair, "t")
    pair.turn_until_quiet()
    assert pair.consumer.reports.received_ids == [(load_of("t"), None)]
    assert np.array_equal(pair.consumer.memory.array, expected)
    assert not any(side.notes.refusals for side in pair.sides)


@pytest.mark.parametrize(
    ("ours", "theirs", "sentence"),
    [
        (ONE, OTHER, "not made with our key"),
        (ONE, NONE, "without a seal"),
        (NONE, ONE, "no shared_key_file is set here"),
    ],
)
def test_two_drivers_without_a_common_key_refuse_each_other_and_nobody_else(
    make_side: MakeSide, clock: Clock, ours: Seal, theirs: Seal, sentence: str
) -> None:
    pair = Pair(make_side("producer", seal=ours), make_side("consumer", seal=theirs), clock)
    before = pair.consumer.memory.array.copy()
    prefill_first(pair, "t")
    pair.turn_until_quiet()
    assert pair.consumer.reports.received_ids == [(load_of("t"), Reason.PEER_LOST)]
    assert np.array_equal(pair.consumer.memory.array, before)
    refusals = pair.producer.notes.refusals
    assert {kind for kind, _ in refusals} == {"frame"}
    assert all(sentence in detail and pair.consumer.agent in detail for _, detail in refusals)
    assert not pair.producer.port.peers
    friend = Pair(pair.producer, make_side("friend", seal=ours), clock)
    friend.moves_another()


def test_a_frame_of_one_worker_is_not_taken_from_another(make_side: MakeSide, clock: Clock) -> None:
    """Also not one that the other has only copied, and with the key in use."""
    pair = Pair(make_side("producer", seal=ONE), make_side("consumer", seal=SAME), clock)
    frames: list[bytes] = []
    send = pair.consumer.port.send

    def copied(name: AgentName, payload: bytes) -> None:
        frames.append(payload)
        send(name, payload)

    pair.consumer.port.send = copied
    prefill_first(pair, "t")
    pair.turn_until_quiet()
    assert frames
    for frame in frames:
        pair.producer.port.deliver(AgentName("thief"), frame)
    pair.producer.driver.look()
    assert len(pair.producer.notes.refusals) == len(frames)
    assert list(pair.producer.driver.engine.records.workers) == [pair.consumer.agent]


# -- two loops, with their side channels ---------------------------------------------------------


@contextlib.contextmanager
def workers(network: MemoryNetwork, *seals: Seal) -> Iterator[list[Worker]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(Worker(f"worker-{number}", network, seed=number, seal=seal))
            for number, seal in enumerate(seals)
        ]


def test_two_loops_with_one_key_transfer(network: MemoryNetwork) -> None:
    with workers(network, ONE, SAME) as (producer, consumer):
        producer.transferred("t", consumer, PAIRS)
        assert not producer.notes.refusals
        assert not consumer.notes.refusals


@pytest.mark.slow
@pytest.mark.parametrize(("ours", "theirs"), [(ONE, OTHER), (ONE, NONE), (NONE, ONE)])
def test_two_loops_without_a_common_key_do_not_meet_and_nothing_else_is_harmed(
    network: MemoryNetwork, ours: Seal, theirs: Seal
) -> None:
    with workers(network, ours, theirs, ours) as (producer, stranger, friend):
        producer.finish_prefill("t", SOURCE)
        stranger.load("t", producer.address, DESTINATION)
        assert stranger.outcome("t") is Reason.UNREACHABLE
        assert {kind for kind, _ in producer.notes.refusals} == {"request"}
        assert not producer.port.peers
        (moved, *_) = [each for each in stranger.notes.moves if each.dest == "backing_off"]
        assert "key" in moved.detail
        friend.load("t", producer.address, DESTINATION)
        assert friend.outcome("t") is None
        assert producer.is_sent("t")
        assert not any(worker.notes.failures for worker in (producer, stranger, friend))
