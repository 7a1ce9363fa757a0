"""The critical path of one request: what is on it, and that its parts add up, whatever happened."""

from pathlib import Path

from kvflow.testing.traces import Tape, decode_after_prefill, followed, parts_of
from kvflow.tracing.figures import analyse
from kvflow.tracing.waterfall import Outcome

# -- both legs at once -----------------------------------------------------------------------------


def concurrent(tape: Tape) -> None:
    """The registration is on record at 6.5, the KV complete at 40, received at 52."""
    tape.vllm(0, "producer", "arrived")
    tape.vllm(1, "consumer", "arrived")
    tape.vllm(5, "producer", "scheduled")
    tape.prefill(6, "prefill_started", "unknown", "allocated")
    tape.meet(3, 4, 6.5, 7)
    tape.prefill(40, "prefill_finished", "registered", "transferring")
    tape.order(40.5, 50, "write", ms={"plan": 1, "post": 3})
    tape.prefill(50.2, "write_done", "transferring", "sent")
    tape.load(52, "done", "registered", "received")
    tape.vllm(60, "consumer", "first_token")


def test_with_the_registration_first_the_prefill_is_the_path_and_the_registration_is_not() -> None:
    tape = Tape()
    concurrent(tape)
    assert parts_of(tape) == [
        ("queue", 5.0),
        ("prefill", 35.0),
        ("match", 0.5),
        ("planning", 1.0),
        ("posting", 3.0),
        ("wire", 5.7),
        ("notice", 1.8),
        ("step", 8.0),
    ]
    [fall] = followed(tape.parsed())
    assert (fall.outcome, fall.span_us, fall.has_arrival) == (Outcome.FIRST_TOKEN, 60_000, True)


def test_clocks_that_are_apart_change_nothing_but_their_uncertainty() -> None:
    tape = Tape(ahead_s={"P": 3.2, "C": -40.0})
    concurrent(tape)
    here = Tape()
    concurrent(here)
    [fall], [expected] = followed(tape.parsed()), followed(here.parsed())
    assert [s.part for s in fall.segments] == [s.part for s in expected.segments]
    for one, other in zip(fall.segments, expected.segments, strict=True):
        assert abs(one.us - other.us) <= 2502


def test_with_a_slow_registration_that_and_the_consumers_queue_are_the_path() -> None:
    tape = Tape()
    tape.vllm(0, "producer", "arrived")
    tape.vllm(1, "consumer", "arrived")
    tape.vllm(2, "producer", "scheduled")
    tape.prefill(2, "prefill_started", "unknown", "allocated")
    tape.load(11, "blocks_allocated", "new", "allocated")
    tape.prefill(20, "prefill_finished", "allocated", "prefilled")
    tape.load(30, "peer_met", "allocated", "registering")
    tape.prefill(31, "registered", "prefilled", "transferring")
    tape.prefill(36, "write_done", "transferring", "sent")
    tape.load(37, "done", "registering", "received")
    tape.vllm(40, "consumer", "first_token")
    assert parts_of(tape) == [
        ("match", 1.0),
        ("queue", 10.0),
        ("registration", 20.0),
        ("wire", 5.0),
        ("notice", 1.0),
        ("step", 3.0),
    ]


def test_a_prefill_leg_that_comes_late_is_waited_for() -> None:
    tape = Tape()
    tape.vllm(0, "consumer", "arrived")
    tape.load(1, "blocks_allocated", "new", "allocated")
    tape.load(2, "peer_met", "allocated", "registering")
    tape.prefill(3, "registered", "unknown", "held")
    tape.load(4, "accepted", "registering", "registered")
    tape.vllm(20, "producer", "arrived")
    tape.prefill(25, "prefill_started", "held", "registered")
    tape.prefill(45, "prefill_finished", "registered", "transferring")
    tape.prefill(50, "write_done", "transferring", "sent")
    tape.load(51, "done", "registered", "received")
    assert parts_of(tape) == [
        ("match", 20.0),
        ("queue", 5.0),
        ("prefill", 20.0),
        ("wire", 5.0),
        ("notice", 1.0),
    ]


def test_of_several_ranks_the_last_one_is_followed() -> None:
    tape = Tape()
    concurrent(tape)
    for rank, part, sent in (("pp0.tp1", "t", 51.5), ("pp0.tp2", "t", 45.0)):
        more: dict[str, str] = {"rank": rank, "id": part}
        tape.prefill(6, "prefill_started", "unknown", "allocated", **more)
        tape.prefill(6.5, "registered", "allocated", "registered", **more)
        tape.prefill(41, "prefill_finished", "registered", "transferring", **more)
        tape.prefill(sent, "write_done", "transferring", "sent", **more)
    assert parts_of(tape)[1:] == [("prefill", 36.0), ("wire", 10.5), ("notice", 0.5), ("step", 8.0)]


# -- one leg after the other -----------------------------------------------------------------------


def test_one_leg_after_the_other_has_both_queues_and_the_router_between() -> None:
    tape = Tape()
    decode_after_prefill(tape)
    assert parts_of(tape) == [
        ("queue", 5.0),
        ("prefill", 25.0),
        ("match", 5.0),
        ("queue", 3.0),
        ("registration", 3.0),
        ("wire", 9.0),
        ("notice", 1.0),
        ("step", 4.0),
    ]


def test_version_1_goes_from_the_first_line_to_the_kvs_arrival_and_says_so(tmp_path: Path) -> None:
    tape = Tape(version=1)
    decode_after_prefill(tape)
    for lines in tape.lines.values():
        lines[:] = [line for line in lines if line["machine"] != "request"]
    assert parts_of(tape) == [
        ("prefill", 25.0),
        ("match", 8.0),
        ("registration", 3.0),
        ("wire", 9.0),
        ("notice", 1.0),
    ]
    analysis = analyse(tape.write(tmp_path))
    assert [fall.outcome for fall in analysis.waterfalls] == [Outcome.RECEIVED]
    assert "no line of a first token" in analysis.notes()[0]
    assert "no line of an arrival" in analysis.notes()[1]


# -- streamed push ---------------------------------------------------------------------------------


def test_of_a_streamed_push_only_what_comes_after_the_prefill_is_on_the_path() -> None:
    tape = Tape()
    tape.prefill(0, "prefill_started", "unknown", "allocated")
    tape.meet(0.5, 1, 2, 3)
    for began, ended in ((10, 15), (20, 25)):
        tape.prefill(began, "prefill_advanced", "registered", "streaming")
        tape.order(began, ended, "write", ms={"plan": 0.5, "post": 1})
        tape.prefill(ended, "write_done", "streaming", "registered")
    tape.prefill(36, "prefill_advanced", "registered", "streaming")
    tape.prefill(40, "prefill_finished", "streaming", "transferring")
    tape.order(36, 45, "write", ms={"plan": 1, "post": 4})
    tape.order(45, 48, "write", ms={"plan": 0.5, "post": 1})
    tape.prefill(48, "write_done", "transferring", "sent")
    tape.load(49, "done", "registered", "received")
    # The last order but one was planned by then, and 5 of 8 ms of its posts and wire were to come.
    assert parts_of(tape) == [
        ("prefill", 40.0),
        ("planning", 0.5),
        ("posting", 2.5 + 1.0),
        ("wire", 4.0),
        ("notice", 1.0),
    ]


def test_a_last_stretch_that_is_written_before_vllm_ends_the_request_ends_the_prefill() -> None:
    tape = Tape()
    tape.prefill(0, "prefill_started", "unknown", "allocated")
    tape.meet(0.5, 1, 2, 3)
    tape.prefill(20, "prefill_advanced", "registered", "streaming")
    tape.order(20, 24, "write")
    tape.order(24, 30, "write")  # what was computed meanwhile
    tape.prefill(30, "write_done", "streaming", "sent")
    tape.load(31, "done", "registered", "received")
    assert parts_of(tape) == [("prefill", 24.0), ("wire", 6.0), ("notice", 1.0)]


# -- reads -----------------------------------------------------------------------------------------


def test_a_read_begins_when_the_consumer_hears_that_it_can() -> None:
    tape = Tape()
    tape.vllm(0, "producer", "arrived")
    tape.prefill(2, "prefill_started", "unknown", "allocated")
    tape.load(1, "blocks_allocated", "new", "allocated")
    tape.load(3, "peer_met", "allocated", "expecting")
    tape.prefill(4, "registered", "allocated", "registered")
    tape.prefill(40, "prefill_finished", "registered", "lent")
    tape.load(41, "readable", "expecting", "reading")
    tape.order(41.5, 50, "read", ms={"plan": 0.5, "post": 2})
    tape.prefill(51, "fetched", "lent", "sent")
    tape.load(52, "done", "reading", "received")
    tape.vllm(53, "consumer", "first_token")
    assert parts_of(tape) == [
        ("queue", 2.0),
        ("prefill", 38.0),
        ("notice", 1.0),
        ("match", 0.5),
        ("planning", 0.5),
        ("posting", 2.0),
        ("wire", 6.0),
        ("notice", 2.0),
        ("step", 1.0),
    ]


def test_a_read_of_a_finished_prefill_begins_at_once() -> None:
    tape = Tape(version=1)
    tape.prefill(0, "prefill_started", "unknown", "allocated")
    tape.prefill(20, "prefill_finished", "allocated", "prefilled")
    tape.load(25, "blocks_allocated", "new", "allocated")
    tape.load(27, "peer_met", "allocated", "reading")
    tape.prefill(28, "registered", "prefilled", "lent")
    tape.prefill(35, "fetched", "lent", "sent")
    tape.load(36, "done", "reading", "received")
    assert parts_of(tape) == [
        ("prefill", 20.0),
        ("match", 5.0),
        ("registration", 2.0),
        ("wire", 8.0),
        ("notice", 1.0),
    ]
