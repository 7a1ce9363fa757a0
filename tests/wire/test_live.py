"""What travels of live transfers: it arrives as it was sent, within limits, or it is refused."""

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvflow.core import Reason
from kvflow.core.waiting import Whom
from kvflow.errors import RemoteProtocolError
from kvflow.wire import codec, live
from kvflow.wire import messages as m

from .samples import NOT_TEXT, with_fields
from .test_codec import mutated, refused_or_decoded

VERSION = bytes([m.PROTOCOL_VERSION])
WINDOW = live.Window(pp_rank=0, tp_rank=1, host="10.0.0.1", port=4711)
WINDOWS = live.Windows(engine_id="engine", role="kv_consumer", windows=(WINDOW,))
ROW = live.TransferRow(
    machine="consumer",
    transfer_id="t",
    part=0,
    request_id="cmpl-1",
    state="registered",
    in_state_ms=1.5,
    total_ms=2.5,
    attempt=16,
    peer="10.0.0.2:5600",
    bytes=0,
    reason=Reason.CANCELLED,
    waits_on=Whom.PRODUCER,
    waits_for="DONE from p0",
)
PEER = live.PeerRow(
    key="10.0.0.2:5600",
    engine_id="other",
    state="met",
    in_state_ms=1.0,
    silent_ms=None,
    using=1,
    waiting=0,
    waits_for="nothing",
    detail="",
)
COUNT = live.Population(machine="peer", state="met", count=1)
LIVE = live.Live(
    pp_rank=0,
    tp_rank=0,
    population=(COUNT,),
    live=1,
    transfers=(ROW,),
    peers_known=1,
    peers=(PEER,),
)
DEADLINE = live.Deadline(what="end", in_ms=-1.0, dest="draining", why="late")
RANK = live.RankRow(pp_rank=0, tp_rank=0, agent="p0", awaits="DONE", outcome="", misses=3)
MOVE = live.Move(ago_ms=1.0, attempt=16, trigger="t", source="a", dest="b", reason=None, detail="")
RECORD = live.Record(
    row=ROW,
    spent_ms=(("allocated", 1.0),),
    deadlines=(DEADLINE,),
    ranks=(RANK,),
    facts=(("blocks", "3"),),
    history=(MOVE,),
    peer=PEER,
    detail="",
)
INSPECTED = live.Inspected(
    pp_rank=0, tp_rank=0, exact=True, matched=1, transfers=("t",), records=(RECORD,)
)
SHOW_LIVE = live.LiveRequest(limit=1000)
INSPECT = live.InspectRequest(name="t")
QUESTIONS = {"windows": live.WindowsRequest(), "live": SHOW_LIVE, "inspect": INSPECT}
ANSWERS = {"windows": WINDOWS, "live": LIVE, "inspected": INSPECTED}
MESSAGES = [
    *((f"ask-{name}", codec.decode_request, message) for name, message in QUESTIONS.items()),
    *((f"tell-{name}", codec.decode_reply, message) for name, message in ANSWERS.items()),
]
EACH = pytest.mark.parametrize(("decode", "message"), [m[1:] for m in MESSAGES], ids=[
    m[0] for m in MESSAGES
])  # fmt: skip


@EACH
def test_a_message_arrives_as_it_was_sent(decode, message) -> None:
    assert decode(codec.encode(message)) == message


def test_a_question_is_no_answer_and_an_answer_no_question() -> None:
    for question in QUESTIONS.values():
        with pytest.raises(RemoteProtocolError):
            codec.decode_reply(codec.encode(question))
    for answer in ANSWERS.values():
        with pytest.raises(RemoteProtocolError):
            codec.decode_request(codec.encode(answer))


NOT_RANKS = [-1, 1024, 0.5, None]
NOT_SHOWN = ["s" * 513, *NOT_TEXT]
NOT_NAMES = ["", *NOT_SHOWN]
NOT_MS = [-0.001, 1.1e15, float("nan"), float("inf"), "1", None]
NOT_COUNTS = [-1, 2**31, 0.5, "1", None, True]

BAD: list[tuple[msgspec.Struct, str, list[Any]]] = [
    (SHOW_LIVE, "limit", [-1, 1001, 2**40, 0.5, "1", None, True]),
    (INSPECT, "name", ["", "n" * 513, *NOT_TEXT]),
    (WINDOWS, "engine_id", NOT_NAMES),
    (WINDOWS, "role", ["", "producer", "kv_producer\n", None]),
    (WINDOWS, "windows", [(WINDOW,) * 1025, None, (1,)]),
    *((WINDOWS, "windows", [(with_fields(WINDOW, **{field: value}),) for value in values])
      for field, values in {
          "pp_rank": NOT_RANKS, "tp_rank": NOT_RANKS, "host": NOT_NAMES,
          "port": [0, 65_536, -1, "80", None],
      }.items()),
    (LIVE, "transfers", [(ROW,) * 1001, None, ((),)]),
    (LIVE, "peers", [(PEER,) * 1001, None, ((),)]),
    (LIVE, "population", [(COUNT,) * 257, None, ((),)]),
    (LIVE, "live", NOT_COUNTS),
    *((LIVE, "population", [(with_fields(COUNT, **{field: value}),) for value in values])
      for field, values in {
          "machine": ["", "router", "peer\n", None], "state": NOT_NAMES, "count": NOT_COUNTS,
      }.items()),
    *((LIVE, "transfers", [(with_fields(ROW, **{field: value}),) for value in values])
      for field, values in {
          "machine": ["", "router", None], "transfer_id": NOT_SHOWN, "part": [-1, 1025, None],
          "request_id": NOT_SHOWN, "state": NOT_NAMES, "in_state_ms": NOT_MS,
          "total_ms": NOT_MS, "attempt": [-1, 2**53, None], "peer": NOT_SHOWN,
          "bytes": [-1, 2**62, None], "reason": ["", "bored"], "waits_on": ["", "me", None],
          "waits_for": ["w" * 4097, None],
      }.items()),
    *((LIVE, "peers", [(with_fields(PEER, **{field: value}),) for value in values])
      for field, values in {
          "key": NOT_SHOWN, "state": NOT_NAMES, "in_state_ms": NOT_MS, "silent_ms": NOT_MS[:-1],
          "using": NOT_COUNTS, "waiting": NOT_COUNTS, "detail": ["d" * 4097, None],
      }.items()),
    (INSPECTED, "transfers", [("t",) * 17, ("t" * 513,), None]),
    (INSPECTED, "records", [(RECORD,) * 65, None, ((),)]),
    (INSPECTED, "exact", [1, None, "true"]),
    *((INSPECTED, "records", [(with_fields(RECORD, **{field: value}),) for value in values])
      for field, values in {
          "row": [None, ()], "spent_ms": [(("s", 1.0),) * 257, (("s", -1.0),), (("s",),)],
          "deadlines": [(DEADLINE,) * 257, (with_fields(DEADLINE, in_ms=float("nan")),)],
          "ranks": [(RANK,) * 1025, (with_fields(RANK, misses=-1),)],
          "facts": [(("a", "b"),) * 65, (("a",),), (("", "b"),)],
          "history": [(MOVE,) * 33, (with_fields(MOVE, ago_ms=-1.0),)],
          "peer": [(), 1], "detail": ["d" * 4097, None],
      }.items()),
]  # fmt: skip


@pytest.mark.parametrize(("message", "field", "values"), BAD)
def test_a_value_past_its_limit_is_refused(
    message: msgspec.Struct, field: str, values: list[Any]
) -> None:
    asks = isinstance(message, live.LiveRequest | live.InspectRequest)
    decode = codec.decode_request if asks else codec.decode_reply
    decode(codec.encode(message))
    for value in values:
        with pytest.raises(RemoteProtocolError):
            decode(codec.encode(with_fields(message, **{field: value})))


def test_the_largest_reply_fits_into_a_frame() -> None:
    longest = with_fields(
        ROW,
        transfer_id="t" * 512,
        request_id="r" * 512,
        peer="p" * 512,
        waits_for="w" * 2000,
    )
    peer = with_fields(PEER, key="k" * 512, engine_id="e" * 512, detail="d" * 1000)
    full = with_fields(LIVE, transfers=(longest,) * 1000, peers=(peer,) * 1000)
    assert len(codec.encode(full)) < m.FRAME_BYTES_MAX
    assert codec.decode_reply(codec.encode(full)) == full


@EACH
def test_another_version_is_refused(decode, message) -> None:
    good = codec.encode(message)
    for version in {*range(256)} - {m.PROTOCOL_VERSION}:
        with pytest.raises(RemoteProtocolError, match=f"version {version}"):
            decode(bytes([version]) + good[1:])


@EACH
def test_unknown_missing_and_trailing_things_are_refused(decode, message) -> None:
    good = codec.encode(message)
    content = msgspec.msgpack.decode(good[1:])
    changes = [{**content, "unknown": 1}, {}, [content], list(content.values()), None, 1]
    changes += [{key: value for key, value in content.items() if key != gone} for gone in content]
    for changed in changes:
        with pytest.raises(RemoteProtocolError):
            decode(good[:1] + msgspec.msgpack.encode(changed))
    with pytest.raises(RemoteProtocolError):
        decode(good + b"\xc0")


@pytest.mark.parametrize("row", [WINDOW, COUNT, ROW, PEER, DEADLINE, RANK, MOVE])
def test_a_row_has_exactly_its_fields(row: msgspec.Struct) -> None:
    fields = list(msgspec.to_builtins(row))
    assert msgspec.convert(fields, type(row)) == row
    for wrong in ([*fields, 1], fields[:-1]):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(wrong, type(row))


@EACH
def test_a_message_cut_anywhere_is_refused(decode, message) -> None:
    good = codec.encode(message)
    for length in range(len(good)):
        assert not refused_or_decoded(decode, good[:length])


@EACH
def test_mutated_messages_are_refused_or_still_within_every_limit(decode, message) -> None:
    """Whatever is decoded can be encoded and decoded again."""
    good, rng = codec.encode(message), random.Random(31)
    for _ in range(2_000):
        payload = mutated(good, rng)
        if refused_or_decoded(decode, payload):
            decoded = decode(payload)
            assert decode(codec.encode(decoded)) == decoded


@given(st.binary(max_size=300), st.booleans())
@settings(max_examples=300)
def test_noise_is_refused(noise: bytes, versioned: bool) -> None:
    for decode in (codec.decode_request, codec.decode_reply):
        refused_or_decoded(decode, VERSION * versioned + noise)
