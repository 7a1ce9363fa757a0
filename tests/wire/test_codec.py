"""The codec: what is sent arrives, and whatever else arrives is a `RemoteProtocolError`."""

import ast
import dataclasses
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvflow.wire
from kvflow.core import Reason, Standing
from kvflow.core import notices as n
from kvflow.errors import RemoteProtocolError
from kvflow.wire import codec
from kvflow.wire import messages as m

from .samples import HELLO, NOT_TEXT, with_fields

NOTICES = n.Notice.__args__
VERSION = bytes([m.PROTOCOL_VERSION])
TWINS = {message.core: message for message in m.NOTICES}

TRANSFER_IDS = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=1, max_size=256)
ATTEMPTS = st.integers(1, 2**53 - 1)
COUNTS = st.integers(0, 2**31 - 1)
CLOCKS = st.floats(0, 1e12)
REASONS = st.sampled_from(Reason)
STANDINGS = st.sampled_from(Standing)
BY_FIELD: dict[str, st.SearchStrategy[Any]] = {
    "transfer_id": TRANSFER_IDS,
    "attempt": ATTEMPTS,
    "blocks": st.lists(st.lists(COUNTS).map(tuple), max_size=5).map(tuple),
    "starts": st.lists(COUNTS, max_size=5).map(tuple),
    "tokens": COUNTS,
    "lease_s": st.floats(0, 86_400, exclude_min=True),
    "write_until_s": st.none() | CLOCKS,
    "clock_s": CLOCKS,
    "standing": STANDINGS,
    "reason": REASONS,
    "prefill": st.text(max_size=50),
    "prompt": st.binary(max_size=64),
    "keep": st.booleans(),
    "reads": st.booleans(),
    "kept_s": st.floats(0, 86_400),
    "wanted": st.lists(st.tuples(TRANSFER_IDS, ATTEMPTS)).map(tuple),
    "standings": st.lists(st.tuples(TRANSFER_IDS, ATTEMPTS, STANDINGS, st.none() | REASONS)).map(
        tuple
    ),
}


def notices_of(kind: type) -> st.SearchStrategy[n.Notice]:
    names = [field.name for field in dataclasses.fields(kind)]
    return st.builds(kind, **{name: BY_FIELD[name] for name in names})


ANY_NOTICE = st.one_of([notices_of(kind) for kind in NOTICES])

REPLY = m.MeetReply(engine_id="engine", incarnation="incarnation", ranks=(HELLO, HELLO))
REGISTER = n.Register(
    transfer_id="t",
    attempt=1,
    blocks=((1, 2, 3), ()),
    starts=(0, 1),
    tokens=48,
    lease_s=30.0,
    write_until_s=None,
)


# -- round trips ---------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", NOTICES)
def test_every_notice_arrives_as_it_was_sent(kind: type) -> None:
    @given(notices_of(kind))
    @settings(max_examples=50)
    def check(notice: n.Notice) -> None:
        assert codec.decode_frame(codec.encode_frame([notice], None)) == ([notice], None)

    check()


@given(st.lists(ANY_NOTICE, max_size=20), st.sampled_from([None, HELLO]))
@settings(max_examples=50)
def test_notices_of_a_frame_arrive_in_order(notices: list[n.Notice], hello: m.Hello | None) -> None:
    assert codec.decode_frame(codec.encode_frame(notices, hello)) == (notices, hello)


def test_the_side_channels_messages_arrive_as_they_were_sent() -> None:
    request = m.MeetRequest(engine_id="engine")
    release, released = m.ReleaseRequest(transfer_id="t"), m.Released(transfer_id="t")
    for asked in (request, release):
        assert codec.decode_request(codec.encode(asked)) == asked
    assert codec.decode_reply(codec.encode(released)) == released
    assert codec.decode_reply(codec.encode(REPLY)) == REPLY
    assert codec.decode_hello(codec.encode(HELLO)) == HELLO
    with pytest.raises(RemoteProtocolError, match="refused: because"):
        codec.decode_reply(codec.encode(m.Refusal(detail="because")))


@pytest.mark.parametrize("kind", NOTICES)
def test_a_twin_has_exactly_the_fields_and_defaults_of_its_notice(kind: type) -> None:
    core = {field.name: field.default for field in dataclasses.fields(kind)}
    twin = {
        field.name: dataclasses.MISSING if field.default is msgspec.NODEFAULT else field.default
        for field in msgspec.structs.fields(TWINS[kind])
    }
    assert twin == core


def test_every_notice_has_one_twin_and_every_twin_a_tag_of_its_own() -> None:
    assert set(TWINS) == set(NOTICES)
    assert set(m.NOTICES) == set(m.AnyNotice.__args__)
    assert len({twin.__struct_config__.tag for twin in m.NOTICES}) == len(m.NOTICES)


# -- limits --------------------------------------------------------------------------------------

TWIN = codec._to_wire(REGISTER)
RENEW = m.Renew(wanted=(("t", 1),), write_until_s=1.0)
ALIVE = m.Alive(standings=(("t", 1, Standing.DONE, None),), clock_s=1.0)
DONE = m.Done(transfer_id="t", attempt=1)
ACCEPTED = m.Accepted(transfer_id="t", attempt=1, standing=Standing.WAITING, clock_s=1.0)
FAILED = m.Failed(transfer_id="t", attempt=1, reason=Reason.STALE)
NOT_IDS = ["", "t" * 257, "a b", "t\n", "\nt", "t\0", "ä", *NOT_TEXT]
NOT_COUNTS = [-1, 2**31, 2**63, 1.5, "1", None, True]
NOT_CLOCKS = [-0.001, 1.1e12, math.nan, math.inf, -math.inf, "1"]

BAD: list[tuple[msgspec.Struct, str, list[Any]]] = [
    (TWIN, "transfer_id", NOT_IDS),
    (TWIN, "attempt", [0, -1, 2**53, 1.5, "1", None, True]),
    (TWIN, "blocks", [((-1,),), ((2**31,),), (("1",),), (1,), None, ((),) * 65, ((None,),)]),
    (TWIN, "starts", [(-1,), (2**31,), ("1",), 1, None, (0,) * 65]),
    (TWIN, "tokens", NOT_COUNTS),
    (TWIN, "lease_s", [0, -1.0, 86_400.1, math.nan, math.inf, None, "1"]),
    (TWIN, "write_until_s", NOT_CLOCKS),
    (TWIN, "keep", [1, 0, "true", None]),
    (TWIN, "prefill", ["p" * 513, *NOT_TEXT]),
    (DONE, "prompt", [bytes(65), "text", 1, None]),
    (DONE, "kept_s", [-0.001, 86_400.1, math.nan, math.inf, None, "1"]),
    (ACCEPTED, "standing", ["", "perhaps", "WAITING", 1, None]),
    (ACCEPTED, "clock_s", [*NOT_CLOCKS, None]),
    (FAILED, "reason", ["", "bored", "STALE", 1, None]),
    (RENEW, "wanted", [((),), (("t",),), (("t", 1, 2),), (("", 1),), (("t", 0),), 1, None]),
    (RENEW, "write_until_s", NOT_CLOCKS),
    (
        ALIVE,
        "standings",
        [(("t", 1, "done"),), (("t", 1, "no", None),), (("t", 1, "done", "no"),), (("t", 1),), 1],
    ),
    (ALIVE, "clock_s", [*NOT_CLOCKS, None]),
]


@pytest.mark.parametrize(("twin", "field", "values"), BAD, ids=lambda v: getattr(v, "tag", None))
def test_a_value_past_its_limit_is_refused(
    twin: msgspec.Struct, field: str, values: list[Any]
) -> None:
    good = codec.encode(m.Frame(notices=(twin,)))
    codec.decode_frame(good)
    for value in values:
        bad = codec.encode(m.Frame(notices=(with_fields(twin, **{field: value}),)))
        with pytest.raises(RemoteProtocolError):
            codec.decode_frame(bad)


@pytest.mark.parametrize("given", NOT_IDS)
def test_a_release_names_a_transfer_id(given: object) -> None:
    with pytest.raises(RemoteProtocolError):
        codec.decode_request(codec.encode(m.ReleaseRequest(transfer_id=given)))
    with pytest.raises(RemoteProtocolError):
        codec.decode_reply(codec.encode(m.Released(transfer_id=given)))


def test_a_question_is_no_answer_and_an_answer_no_question() -> None:
    for question in (m.MeetRequest(engine_id="e"), m.ReleaseRequest(transfer_id="t")):
        with pytest.raises(RemoteProtocolError):
            codec.decode_reply(codec.encode(question))
    for answer in (REPLY, m.Released(transfer_id="t"), m.Refusal(detail="no")):
        with pytest.raises(RemoteProtocolError):
            codec.decode_request(codec.encode(answer))


def test_metadata_may_be_large_but_not_larger(monkeypatch: pytest.MonkeyPatch) -> None:
    most = m.AGENT_METADATA_BYTES_MAX
    codec.decode_hello(codec.encode(with_fields(HELLO, metadata=bytes(most))))
    with pytest.raises(RemoteProtocolError):
        codec.decode_hello(codec.encode(with_fields(HELLO, metadata=bytes(most + 1))))


def test_counted_things_may_be_many_but_not_more() -> None:
    done = n.Done(transfer_id="t", attempt=1)
    many = m.NOTICES_PER_FRAME_MAX
    assert len(codec.decode_frame(codec.encode_frame([done] * many, None))[0]) == many
    with pytest.raises(RemoteProtocolError):
        codec.decode_frame(codec.encode_frame([done] * (many + 1), None))
    with pytest.raises(RemoteProtocolError):
        codec.decode_reply(codec.encode(with_fields(REPLY, ranks=(HELLO,) * (m.RANKS_MAX + 1))))
    wanted = (("t", 1),) * (m.RENEWALS_PER_NOTICE_MAX + 1)
    with pytest.raises(RemoteProtocolError):
        codec.decode_frame(codec.encode(m.Frame(notices=(with_fields(RENEW, wanted=wanted),))))


def test_what_a_frame_may_hold_is_what_the_sender_keeps_to() -> None:
    assert codec.is_sendable(m.NOTICES_PER_FRAME_MAX, m.FRAME_BYTES_MAX)
    assert not codec.is_sendable(m.NOTICES_PER_FRAME_MAX + 1, 1)
    assert not codec.is_sendable(1, m.FRAME_BYTES_MAX + 1)


DECODERS: dict[str, tuple[Callable[[bytes], object], bytes]] = {
    "frame": (codec.decode_frame, codec.encode_frame([REGISTER], HELLO)),
    "hello": (codec.decode_hello, codec.encode(HELLO)),
    "request": (codec.decode_request, codec.encode(m.MeetRequest(engine_id="engine"))),
    "reply": (codec.decode_reply, codec.encode(REPLY)),
    "release": (codec.decode_request, codec.encode(m.ReleaseRequest(transfer_id="t"))),
    "released": (codec.decode_reply, codec.encode(m.Released(transfer_id="t"))),
}


@pytest.mark.parametrize("name", DECODERS)
def test_another_version_is_refused_with_both_versions(name: str) -> None:
    decode, good = DECODERS[name]
    for version in {*range(256)} - {m.PROTOCOL_VERSION}:
        with pytest.raises(
            RemoteProtocolError, match=f"version {version}, ours is {m.PROTOCOL_VERSION}"
        ):
            decode(bytes([version]) + good[1:])
    with pytest.raises(RemoteProtocolError, match="version None"):
        decode(b"")


@pytest.mark.parametrize("name", DECODERS)
def test_an_oversize_message_is_refused_unread(name: str) -> None:
    decode, good = DECODERS[name]
    with pytest.raises(RemoteProtocolError, match="over the limit"):
        decode(good + bytes(m.FRAME_BYTES_MAX))


@pytest.mark.parametrize("name", DECODERS)
def test_unknown_missing_and_trailing_things_are_refused(name: str) -> None:
    decode, good = DECODERS[name]
    content = msgspec.msgpack.decode(good[1:])
    changes = [{**content, "unknown": 1}, {}, [content], list(content.values()), None, 1, "text"]
    changes += [{key: value for key, value in content.items() if key != gone} for gone in content]
    if name == "frame":
        changes.remove({"notices": content["notices"]})  # the coordinates may be left out
    for changed in changes:
        with pytest.raises(RemoteProtocolError):
            decode(good[:1] + msgspec.msgpack.encode(changed))
    with pytest.raises(RemoteProtocolError):
        decode(good + b"\xc0")


def test_a_notice_of_an_unknown_kind_is_refused() -> None:
    for kind in ("", "Register", "hello", None, 1):
        frame = {"notices": [{"type": kind, "transfer_id": "t", "attempt": 1}]}
        with pytest.raises(RemoteProtocolError):
            codec.decode_frame(VERSION + msgspec.msgpack.encode(frame))


def test_deep_nesting_is_refused() -> None:
    for depth in (10, 1_000, 100_000):
        with pytest.raises(RemoteProtocolError):
            codec.decode_frame(VERSION + b"\x91" * depth)


# -- fuzz ----------------------------------------------------------------------------------------


def refused_or_decoded(decode: Callable[[bytes], object], payload: bytes) -> bool:
    """Whether it was decoded; any other exception than ours fails the test."""
    try:
        decode(payload)
    except RemoteProtocolError:
        return False
    return True


@given(st.binary(max_size=300), st.booleans())
@settings(max_examples=500)
def test_noise_is_refused(noise: bytes, versioned: bool) -> None:
    for decode, _ in DECODERS.values():
        refused_or_decoded(decode, VERSION * versioned + noise)


@pytest.mark.parametrize("name", DECODERS)
def test_mutated_messages_are_refused_or_still_within_every_limit(name: str) -> None:
    """Whatever is decoded can be encoded and decoded again."""
    decode, good = DECODERS[name]
    rng = random.Random(20)
    decoded = 0
    for _ in range(4_000):
        payload = mutated(good, rng)
        if refused_or_decoded(decode, payload):
            decoded += 1
            if name == "frame":
                notices, hello = codec.decode_frame(payload)
                assert codec.decode_frame(codec.encode_frame(notices, hello)) == (notices, hello)
    assert decoded


def mutated(payload: bytes, rng: random.Random) -> bytes:
    """A few bytes changed, cut out, doubled or put in."""
    data = bytearray(payload)
    for _ in range(rng.randint(1, 3)):
        at = rng.randrange(1, len(data))
        match rng.randrange(4):
            case 0:
                data[at] = rng.randrange(256)
            case 1:
                del data[at : at + rng.randint(1, 4)]
            case 2:
                data[at:at] = data[at : at + rng.randint(1, 8)]
            case 3:
                data[at:at] = rng.randbytes(rng.randint(1, 4))
        if len(data) < 2:
            break
    return bytes(data)


@pytest.mark.parametrize("name", DECODERS)
def test_a_message_cut_anywhere_is_refused(name: str) -> None:
    decode, good = DECODERS[name]
    for length in range(len(good)):
        assert not refused_or_decoded(decode, good[:length])


def test_nothing_on_the_wire_can_run_code() -> None:
    """No pickle, no eval, no import of what a peer names."""
    forbidden = {"pickle", "cloudpickle", "marshal", "shelve", "importlib", "yaml"}
    (package,) = kvflow.wire.__path__
    for path in Path(package).glob("*.py"):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        for node in ast.walk(tree):
            if isinstance(node, ast.Import):
                assert not {alias.name.split(".")[0] for alias in node.names} & forbidden
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in forbidden
            elif isinstance(node, ast.Call):
                assert ast.unparse(node.func) not in {"eval", "exec", "__import__"}
