"""The critical path of requests for which not all went well, or whose lines are not all there."""

from kvflow.testing.traces import Tape, decode_after_prefill, followed, parts_of
from kvflow.tracing.waterfall import Outcome


def test_a_load_that_failed_is_computed_by_the_consumer() -> None:
    tape = Tape()
    tape.vllm(0, "consumer", "arrived")
    tape.prefill(0, "prefill_started", "unknown", "allocated")
    tape.meet(2, 3, 5, 6)
    tape.load(90, "peer_lost", "registered", "fencing")
    tape.load(100, "expired", "fencing", "failed", reason="peer_lost")
    tape.vllm(140, "consumer", "first_token")
    [fall] = followed(tape.parsed())
    assert (fall.outcome, fall.reason) == (Outcome.RECOMPUTED, "peer_lost")
    assert parts_of(tape) == [("prefill", 90.0), ("giving_up", 10.0), ("local", 40.0)]


def test_a_producer_that_cannot_be_met_is_all_registration() -> None:
    tape = Tape(version=1)
    tape.load(0, "blocks_allocated", "new", "allocated")
    tape.load(5000, "expired", "allocated", "failed", reason="unreachable")
    [fall] = followed(tape.parsed())
    assert (fall.outcome, fall.reason) == (Outcome.FAILED, "unreachable")
    assert parts_of(tape) == [("registration", 5000.0)]


def test_a_write_that_failed_and_the_registration_after_it_are_on_the_path() -> None:
    tape = Tape()
    decode_after_prefill(tape)
    for lines in tape.lines.values():
        lines[:] = [x for x in lines if x["to"] not in ("sent", "received", "first_token")]
    tape.prefill(50, "write_failed", "transferring", "prefilled")
    tape.load(51, "rank_failed", "transferring", "registering", attempt=17)
    tape.prefill(53, "registered", "prefilled", "transferring", attempt=17)
    tape.prefill(60, "write_done", "transferring", "sent", attempt=17)
    tape.load(61, "done", "registering", "received", attempt=17)
    assert parts_of(tape)[4:] == [
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
    decode_after_prefill(tape)
    for lines in tape.lines.values():
        lines[:] = [x for x in lines if x["to"] not in ("sent", "received", "first_token")]
    tape.prefill(41, "registered", "prefilled", "transferring", rank="pp0.tp1")
    tape.prefill(70, "write_done", "transferring", "sent", rank="pp0.tp1")
    tape.prefill(50, "write_failed", "transferring", "prefilled")
    tape.load(51, "rank_failed", "transferring", "registering", attempt=17)
    tape.prefill(53, "registered", "prefilled", "transferring", attempt=17)
    tape.prefill(60, "write_done", "transferring", "sent", attempt=17)
    tape.load(71, "done", "registering", "received", attempt=17)
    assert parts_of(tape)[4:] == [("registration", 3.0), ("wire", 29.0), ("notice", 1.0)]


def test_a_request_that_is_preempted_before_its_first_token_is_queued_again() -> None:
    tape = Tape()
    decode_after_prefill(tape)
    for lines in tape.lines.values():
        lines[:] = [x for x in lines if x["to"] != "first_token"]
    tape.attempt = 32
    tape.load(70, "allocated_again", "received", "allocated")
    tape.load(70.5, "peer_met", "allocated", "registering")
    tape.prefill(72, "registered_anew", "kept", "transferring")
    tape.prefill(80, "write_done", "transferring", "kept")
    tape.load(81, "done", "registering", "received")
    tape.vllm(85, "consumer", "first_token")
    assert parts_of(tape)[5:] == [
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
    assert parts_of(tape) == [("queue", 3.0), ("local", 30.0)]


def test_a_load_that_is_refused_at_once_before_the_first_token_is_computed_here() -> None:
    tape = Tape()
    decode_after_prefill(tape)
    for lines in tape.lines.values():
        lines[:] = [x for x in lines if x["to"] != "first_token"]
    tape.load(70, "allocated_again", "received", "failed", attempt=32, reason="forgotten")
    tape.vllm(90, "consumer", "first_token")
    assert parts_of(tape)[6:] == [("notice", 1.0), ("queue", 19.0), ("local", 20.0)]
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
    tape.meet(2, 3, 5, 6)
    [fall] = followed(tape.parsed())
    assert (fall.outcome, fall.span_us) == (Outcome.UNFINISHED, 4000)


def test_a_producers_side_alone_has_its_parts_too() -> None:
    tape = Tape()
    decode_after_prefill(tape)
    del tape.lines["C"]
    [fall] = followed(tape.parsed())
    assert fall.outcome is Outcome.SENT
    assert parts_of(tape) == [("queue", 5.0), ("prefill", 25.0), ("match", 11.0), ("wire", 9.0)]


def test_a_prompt_that_is_still_computed_is_prefill() -> None:
    tape = Tape()
    tape.vllm(0, "producer", "arrived")
    tape.vllm(3, "producer", "scheduled")
    tape.prefill(4, "prefill_started", "unknown", "allocated")
    tape.line(9, "producer", "prefill_started", "unknown", "allocated", engine="P", id="t 1")
    [fall] = followed(tape.parsed())
    assert (fall.outcome, fall.request.consumer) == (Outcome.UNFINISHED, "")
    assert parts_of(tape) == [("queue", 3.0), ("prefill", 6.0)]


def test_a_leg_whose_first_line_is_missing_is_known_by_its_record() -> None:
    tape = Tape()
    decode_after_prefill(tape)
    for lines in tape.lines.values():
        lines[:] = [line for line in lines if line["trigger"] != "arrived"]
    [fall] = followed(tape.parsed())
    assert (fall.request.consumer, fall.request.producers) == ("C", ["P"])
    assert parts_of(tape)[:2] == [("prefill", 25.0), ("match", 8.0)]


def test_of_a_consumer_only_the_schedulers_lines_may_be_there() -> None:
    tape = Tape()
    decode_after_prefill(tape)
    tape.lines["C"] = [line for line in tape.lines["C"] if line["machine"] == "request"]
    [fall] = followed(tape.parsed())
    assert fall.outcome is Outcome.FIRST_TOKEN
    assert parts_of(tape)[-2:] == [("wire", 9.0), ("step", 5.0)]


def test_a_consumers_side_alone_has_its_parts_too() -> None:
    tape = Tape()
    decode_after_prefill(tape)
    del tape.lines["P"]
    assert parts_of(tape) == [
        ("queue", 3.0),
        ("registration", 3.4),
        ("wire", 9.6),
        ("step", 4.0),
    ]


def test_two_consumers_of_one_id_are_two_requests() -> None:
    tape = Tape()
    decode_after_prefill(tape)
    tape.load(39, "blocks_allocated", "new", "allocated", engine="C2", request="c2")
    tape.load(41, "rank_failed", "registering", "failed", engine="C2", request="c2")
    falls = followed(tape.parsed())
    assert [fall.request.consumer for fall in falls] == ["C", "C2"]
    assert [fall.outcome for fall in falls] == [Outcome.FIRST_TOKEN, Outcome.FAILED]
