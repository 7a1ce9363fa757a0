"""The critical path of one request: what is on it, and that its parts add up, whatever happened."""

from pathlib import Path

from kvflow.testing.traces import Tape, followed
from kvflow.tracing.figures import analyse
from kvflow.tracing.waterfall import Outcome

Parts = list[tuple[str, float]]


def parts(tape: Tape) -> Parts:
    [fall] = followed(tape.parsed())
    return [(segment.part.value, segment.us / 1000) for segment in fall.segments]


def met(tape: Tape, allocated: float, asked: float, recorded: float, answered: float) -> None:
    """The consumer meets, registers and is answered; the producer computes the prompt."""
    tape.load(allocated, "blocks_allocated", "new", "allocated")
    tape.load(asked, "peer_met", "allocated", "registering")
    tape.prefill(recorded, "registered", "allocated", "registered")
    tape.load(answered, "accepted", "registering", "registered")


# -- both legs at once -----------------------------------------------------------------------------


def concurrent(tape: Tape) -> None:
    """The registration is on record at 6.5, the KV complete at 40, received at 52."""
    tape.vllm(0, "producer", "arrived")
    tape.vllm(1, "consumer", "arrived")
    tape.vllm(5, "producer", "scheduled")
    tape.prefill(6, "prefill_started", "unknown", "allocated")
    met(tape, 3, 4, 6.5, 7)
    tape.prefill(40, "prefill_finished", "registered", "transferring")
    tape.order(40.5, 50, "write", ms={"plan": 1, "post": 3})
    tape.prefill(50.2, "write_done", "transferring", "sent")
    tape.load(52, "done", "registered", "received")
    tape.vllm(60, "consumer", "first_token")


def test_with_the_registration_first_the_prefill_is_the_path_and_the_registration_is_not() -> None:
    tape = Tape()
    concurrent(tape)
    assert parts(tape) == [
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
    assert parts(tape) == [
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
    assert parts(tape) == [
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
    assert parts(tape)[1:] == [("prefill", 36.0), ("wire", 10.5), ("notice", 0.5), ("step", 8.0)]


# -- one leg after the other -----------------------------------------------------------------------


def sequential(tape: Tape) -> None:
    """The prefill is over at 30; the consumer's leg arrives at 35."""
    tape.vllm(0, "producer", "arrived")
    tape.vllm(5, "producer", "scheduled")
    tape.prefill(5, "prefill_started", "unknown", "allocated")
    tape.prefill(30, "prefill_finished", "allocated", "prefilled")
    tape.vllm(35, "consumer", "arrived")
    tape.load(38, "blocks_allocated", "new", "allocated")
    tape.load(38.5, "peer_met", "allocated", "registering")
    tape.prefill(41, "registered", "prefilled", "transferring")
    tape.load(41.4, "accepted", "registering", "transferring")
    tape.prefill(50, "write_done", "transferring", "sent")
    tape.load(51, "done", "transferring", "received")
    tape.vllm(55, "consumer", "first_token")


def test_one_leg_after_the_other_has_both_queues_and_the_router_between() -> None:
    tape = Tape()
    sequential(tape)
    assert parts(tape) == [
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
    sequential(tape)
    for lines in tape.lines.values():
        lines[:] = [line for line in lines if line["machine"] != "request"]
    assert parts(tape) == [
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
    met(tape, 0.5, 1, 2, 3)
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
    assert parts(tape) == [
        ("prefill", 40.0),
        ("planning", 0.5),
        ("posting", 2.5 + 1.0),
        ("wire", 4.0),
        ("notice", 1.0),
    ]


def test_a_last_stretch_that_is_written_before_vllm_ends_the_request_ends_the_prefill() -> None:
    tape = Tape()
    tape.prefill(0, "prefill_started", "unknown", "allocated")
    met(tape, 0.5, 1, 2, 3)
    tape.prefill(20, "prefill_advanced", "registered", "streaming")
    tape.order(20, 24, "write")
    tape.order(24, 30, "write")  # what was computed meanwhile
    tape.prefill(30, "write_done", "streaming", "sent")
    tape.load(31, "done", "registered", "received")
    assert parts(tape) == [("prefill", 24.0), ("wire", 6.0), ("notice", 1.0)]


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
    assert parts(tape) == [
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
    assert parts(tape) == [
        ("prefill", 20.0),
        ("match", 5.0),
        ("registration", 2.0),
        ("wire", 8.0),
        ("notice", 1.0),
    ]


# -- what does not go well -------------------------------------------------------------------------


def test_a_load_that_failed_is_computed_by_the_consumer() -> None:
    tape = Tape()
    tape.vllm(0, "consumer", "arrived")
    tape.prefill(0, "prefill_started", "unknown", "allocated")
    met(tape, 2, 3, 5, 6)
    tape.load(90, "peer_lost", "registered", "fencing")
    tape.load(100, "expired", "fencing", "failed", reason="peer_lost")
    tape.vllm(140, "consumer", "first_token")
    [fall] = followed(tape.parsed())
    assert (fall.outcome, fall.reason) == (Outcome.RECOMPUTED, "peer_lost")
    assert parts(tape) == [("prefill", 90.0), ("giving_up", 10.0), ("local", 40.0)]


def test_a_producer_that_cannot_be_met_is_all_registration() -> None:
    tape = Tape(version=1)
    tape.load(0, "blocks_allocated", "new", "allocated")
    tape.load(5000, "expired", "allocated", "failed", reason="unreachable")
    [fall] = followed(tape.parsed())
    assert (fall.outcome, fall.reason) == (Outcome.FAILED, "unreachable")
    assert parts(tape) == [("registration", 5000.0)]


def test_a_write_that_failed_and_the_registration_after_it_are_on_the_path() -> None:
    tape = Tape()
    sequential(tape)
    for lines in tape.lines.values():
        lines[:] = [x for x in lines if x["to"] not in ("sent", "received", "first_token")]
    tape.prefill(50, "write_failed", "transferring", "prefilled")
    tape.load(51, "rank_failed", "transferring", "registering", attempt=17)
    tape.prefill(53, "registered", "prefilled", "transferring", attempt=17)
    tape.prefill(60, "write_done", "transferring", "sent", attempt=17)
    tape.load(61, "done", "registering", "received", attempt=17)
    assert parts(tape)[4:] == [
        ("registration", 3.0),
        ("wire", 9.0),
        ("notice", 1.0),
        ("registration", 2.0),
        ("wire", 7.0),
        ("notice", 1.0),
    ]
    assert followed(tape.parsed())[0].request.attempts == 2


def test_after_a_retry_of_one_rank_the_other_may_still_be_the_last() -> None:
    tape = Tape()
    sequential(tape)
    for lines in tape.lines.values():
        lines[:] = [x for x in lines if x["to"] not in ("sent", "received", "first_token")]
    tape.prefill(41, "registered", "prefilled", "transferring", rank="pp0.tp1")
    tape.prefill(70, "write_done", "transferring", "sent", rank="pp0.tp1")
    tape.prefill(50, "write_failed", "transferring", "prefilled")
    tape.load(51, "rank_failed", "transferring", "registering", attempt=17)
    tape.prefill(53, "registered", "prefilled", "transferring", attempt=17)
    tape.prefill(60, "write_done", "transferring", "sent", attempt=17)
    tape.load(71, "done", "registering", "received", attempt=17)
    assert parts(tape)[4:] == [("registration", 3.0), ("wire", 29.0), ("notice", 1.0)]


def test_a_request_that_is_preempted_before_its_first_token_is_queued_again() -> None:
    tape = Tape()
    sequential(tape)
    for lines in tape.lines.values():
        lines[:] = [x for x in lines if x["to"] != "first_token"]
    tape.attempt = 32
    tape.load(70, "allocated_again", "received", "allocated")
    tape.load(70.5, "peer_met", "allocated", "registering")
    tape.prefill(72, "registered_anew", "kept", "transferring")
    tape.prefill(80, "write_done", "transferring", "kept")
    tape.load(81, "done", "registering", "received")
    tape.vllm(85, "consumer", "first_token")
    assert parts(tape)[5:] == [
        ("wire", 9.0),
        ("notice", 1.0),
        ("queue", 19.0),
        ("registration", 2.0),
        ("wire", 8.0),
        ("notice", 1.0),
        ("step", 4.0),
    ]


def test_a_request_that_loads_nothing_is_computed_where_it_is() -> None:
    tape = Tape(of="")
    tape.vllm(0, "consumer", "arrived")
    tape.vllm(3, "consumer", "scheduled")
    tape.vllm(33, "consumer", "first_token")
    tape.vllm(90, "consumer", "finished", reason="length")
    [fall] = followed(tape.parsed())
    assert (fall.outcome, fall.request.id) == (Outcome.LOCAL, "c1")
    assert parts(tape) == [("queue", 3.0), ("local", 30.0)]


def test_a_load_that_is_refused_at_once_before_the_first_token_is_computed_here() -> None:
    tape = Tape()
    sequential(tape)
    for lines in tape.lines.values():
        lines[:] = [x for x in lines if x["to"] != "first_token"]
    tape.load(70, "allocated_again", "received", "failed", attempt=32, reason="forgotten")
    tape.vllm(90, "consumer", "first_token")
    assert parts(tape)[6:] == [("notice", 1.0), ("queue", 19.0), ("local", 20.0)]
    assert followed(tape.parsed())[0].reason == "forgotten"


def test_a_load_whose_parameters_name_no_transfer_is_its_requests_own() -> None:
    tape = Tape(of="")
    tape.vllm(0, "consumer", "arrived")
    tape.load(2, "load_refused", "new", "failed", reason="parameters")
    tape.vllm(5, "consumer", "arrived", request="c2")
    tape.vllm(9, "consumer", "first_token")
    falls = followed(tape.parsed())
    assert [(fall.request.id, fall.outcome, fall.reason) for fall in falls] == [
        ("c1", Outcome.RECOMPUTED, "parameters"),
        ("c2", Outcome.UNFINISHED, ""),
    ]
    assert [(s.part, s.us) for s in falls[0].segments] == [("queue", 2000), ("local", 7000)]


def test_what_is_not_over_ends_with_its_last_line() -> None:
    tape = Tape()
    met(tape, 2, 3, 5, 6)
    [fall] = followed(tape.parsed())
    assert (fall.outcome, fall.span_us) == (Outcome.UNFINISHED, 4000)


def test_a_producers_side_alone_has_its_parts_too() -> None:
    tape = Tape()
    sequential(tape)
    del tape.lines["C"]
    [fall] = followed(tape.parsed())
    assert fall.outcome is Outcome.SENT
    assert parts(tape) == [("queue", 5.0), ("prefill", 25.0), ("match", 11.0), ("wire", 9.0)]


def test_a_prompt_that_is_still_computed_is_prefill() -> None:
    tape = Tape()
    tape.vllm(0, "producer", "arrived")
    tape.vllm(3, "producer", "scheduled")
    tape.prefill(4, "prefill_started", "unknown", "allocated")
    tape.line(9, "producer", "prefill_started", "unknown", "allocated", engine="P", id="t 1")
    [fall] = followed(tape.parsed())
    assert (fall.outcome, fall.request.consumer) == (Outcome.UNFINISHED, "")
    assert parts(tape) == [("queue", 3.0), ("prefill", 6.0)]


def test_a_leg_whose_first_line_is_missing_is_known_by_its_record() -> None:
    tape = Tape()
    sequential(tape)
    for lines in tape.lines.values():
        lines[:] = [line for line in lines if line["trigger"] != "arrived"]
    [fall] = followed(tape.parsed())
    assert (fall.request.consumer, fall.request.producers) == ("C", ["P"])
    assert parts(tape)[:2] == [("prefill", 25.0), ("match", 8.0)]


def test_of_a_consumer_only_the_schedulers_lines_may_be_there() -> None:
    tape = Tape()
    sequential(tape)
    tape.lines["C"] = [line for line in tape.lines["C"] if line["machine"] == "request"]
    [fall] = followed(tape.parsed())
    assert fall.outcome is Outcome.FIRST_TOKEN
    assert parts(tape)[-2:] == [("wire", 9.0), ("step", 5.0)]


def test_a_consumers_side_alone_has_its_parts_too() -> None:
    tape = Tape()
    sequential(tape)
    del tape.lines["P"]
    assert parts(tape) == [
        ("queue", 3.0),
        ("registration", 3.4),
        ("wire", 9.6),
        ("step", 4.0),
    ]


def test_two_consumers_of_one_id_are_two_requests() -> None:
    tape = Tape()
    sequential(tape)
    tape.load(39, "blocks_allocated", "new", "allocated", engine="C2", request="c2")
    tape.load(41, "rank_failed", "registering", "failed", engine="C2", request="c2")
    falls = followed(tape.parsed())
    assert [fall.request.consumer for fall in falls] == ["C", "C2"]
    assert [fall.outcome for fall in falls] == [Outcome.FIRST_TOKEN, Outcome.FAILED]
