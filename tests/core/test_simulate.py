"""The seeded simulator: the core survives it, broken cores do not, and its words can be read."""

import dataclasses
import json
import secrets
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from typer.testing import CliRunner

from kvflow.cli import app
from kvflow.core import (
    Engine,
    classify,
    consumer,
    consumer_actions,
    consumer_reads,
    consumer_table,
    peer,
    producer_endings,
    producer_steps,
    producer_table,
)
from kvflow.core.consumer import ConsumerRecord, Outcome
from kvflow.core.effects import ReportReceived, ReportSent
from kvflow.core.ledger import Ledger
from kvflow.core.producer import ProducerRecord
from kvflow.core.turn import Turn
from kvflow.errors import LocalProtocolError
from kvflow.ids import Rank
from kvflow.testing.faults import SWARM, Fault, Faults
from kvflow.testing.invariants import InvariantBrokenError
from kvflow.testing.operations import OPERATIONS, PHASE, Operation, Setting, next_operation
from kvflow.testing.rows import every_row
from kvflow.testing.simulate import Report, Run, invariant_of, simulate

STEPS = 25_000
MUTANT_STEPS = 60_000
SEEDS_FOR_MUTANTS = ((1, False), (2, True), (3, True), (4, False))
FRESH = secrets.randbelow(2**32)


def survived(report: Report) -> None:
    violation = report.violation
    assert violation is None, f"seed {report.seed}: {violation.said}\n{violation.transcript}"


@pytest.mark.parametrize(
    ("seed", "swarm"),
    [
        (1, False),
        pytest.param(2, False, marks=pytest.mark.slow),
        pytest.param(3, True, marks=pytest.mark.slow),
        pytest.param(FRESH, True, id="fresh"),
    ],
)
def test_whatever_happens_nothing_is_corrupted_and_everything_ends_s1_to_s7_l1(
    seed: int, swarm: bool
) -> None:
    """A quarter of 100,000 steps each; the fresh seed is printed when it fails."""
    print(f"kvflow simulate --seed {seed} --steps {STEPS}{' --swarm' if swarm else ''}")
    report = simulate(seed, STEPS, swarm=swarm)
    survived(report)
    assert report.steps >= STEPS
    assert report.outcomes["consumer", "received", ""] > 0
    assert report.rows.keys() <= every_row()
    assert len(report.faults) >= 20


def test_the_same_seed_is_the_same_run() -> None:
    one, other = (simulate(5, 3000, swarm=True) for _ in range(2))
    assert (one.faults, one.outcomes, one.rows) == (other.faults, other.outcomes, other.rows)
    assert simulate(6, 3000, swarm=True).faults != one.faults


@pytest.mark.parametrize("engines", [2, 3, 7])
def test_there_may_be_any_number_of_engines(engines: int) -> None:
    survived(simulate(7, 3000, engines=engines))


def test_every_name_that_a_swarm_turns_off_means_something() -> None:
    fields = {field.name for field in dataclasses.fields(Faults)}
    weather = {"loss", "double", "straggle"}
    assert set(SWARM) <= {*OPERATIONS, *fields, *weather, "id_reuse", "mismatch"}


@pytest.mark.parametrize("seed", range(4))
def test_what_a_swarm_phase_turned_off_does_not_strike(seed: int) -> None:
    run = Run(Setting(seed=seed, ranks=2, producers=2, consumers=2, blocks=16, swarm=True))
    assert run.do(Operation(name=PHASE, seed=seed))
    rng = Random(seed)
    for _ in range(150):
        assert run.do(next_operation(run.chaos, rng)), run.error
    off = run.chaos.off
    assert 0 < len(off) < len(SWARM)
    struck = {name for name, fault in STRIKES.items() if run.world.struck[fault]}
    assert not struck & off


STRIKES = {
    "loss": Fault.NOTICE_LOST,
    "double": Fault.NOTICE_DOUBLED,
    "straggle": Fault.NOTICE_DELAYED,
    "partition": Fault.PARTITION,
    "partition_one_way": Fault.PARTITION_ONE_WAY,
    "pause": Fault.PAUSED,
    "shut_down": Fault.SHUT_DOWN,
    "write_fails": Fault.SLICE_FAILED,
    "refuses": Fault.NOTICE_REFUSED,
    "meeting_slow": Fault.MEETING_SLOW,
    "preempt_prefill": Fault.PREFILL_PREEMPTED,
    "id_reuse": Fault.ID_REUSED,
    "mismatch": Fault.MISMATCH,
    "stale_engine_id": Fault.ENGINE_ID_STALE,
}

# -- broken rules, which the simulator must find ---------------------------------------------------


def writes_whatever_the_lease(patch: pytest.MonkeyPatch) -> None:
    """`may_write` without the time until which the consumer allows it."""

    def may_write(self: Engine, part: Any, attempt: int, now: float) -> bool:
        record = self.records.producers.get(part)
        return (
            record is not None
            and record.state in ("streaming", "transferring")
            and self.ledger.is_open(part, attempt)
        )

    patch.setattr(Engine, "may_write", may_write)


def counts_dones(patch: pytest.MonkeyPatch) -> None:
    """A second DONE of one rank stands in for another rank's."""
    settle = consumer_actions.settle

    def count(record: ConsumerRecord, rank: Rank, outcome: Outcome) -> None:
        if rank in record.outcomes and outcome is Outcome.DONE and record.unsettled:
            rank = min(record.unsettled)
        settle(record, rank, outcome)

    patch.setattr(consumer_actions, "settle", count)


def gives_back_while_draining(patch: pytest.MonkeyPatch) -> None:
    """vLLM gets the blocks back when a load is given up, not when nothing can land any more."""
    give_up, end = consumer_actions._give_up, consumer_actions.end

    def give_up_at_once(record: ConsumerRecord, turn: Turn, reason: Any) -> None:
        give_up(record, turn, reason)
        if turn.ledger.holds(record.request_id):
            turn.ledger.give_back(record.request_id, frozenset())
            turn.effects.append(ReportReceived(request_id=record.request_id, reason=reason))
            record.blocks = ()

    def end_once(record: ConsumerRecord, turn: Turn, *rest: Any, **more: Any) -> None:
        if turn.ledger.holds(record.request_id):
            end(record, turn, *rest, **more)
        else:
            consumer_actions._bury(record, turn)

    patch.setattr(consumer_actions, "_give_up", give_up_at_once)
    patch.setattr(consumer_actions, "end", end_once)


def replace_action(
    patch: pytest.MonkeyPatch, holder: Any, old: Callable[..., None], new: Callable[..., None]
) -> None:
    """A machine's table with one action replaced; `holder` is the table's module."""
    table = holder.TABLE
    rows = tuple(
        dataclasses.replace(row, action=new if row.action is old else row.action)
        for row in table.rows
    )
    assert rows != table.rows
    patch.setattr(holder, "TABLE", dataclasses.replace(table, rows=rows))


def fences_for_no_time(patch: pytest.MonkeyPatch) -> None:
    """A lost producer is trusted to have stopped at once."""

    def lose_at_once(record: ConsumerRecord, event: Any, turn: Turn) -> None:
        consumer_actions.lose_and_fence(record, event, turn)
        turn.arm((consumer_actions.NAME, record.request_id), 1e-3)

    replace_action(patch, consumer_table, consumer_actions.lose_and_fence, lose_at_once)


def releases_while_draining(patch: pytest.MonkeyPatch) -> None:
    """vLLM gets a prefill's blocks back when its write is told to stop, not when it has ended."""
    stop, unpin = producer_steps.stop, Ledger.unpin

    def stop_and_release(record: ProducerRecord, turn: Turn, reason: Any) -> None:
        stop(record, turn, reason)
        assert record.request_id is not None
        turn.effects.append(ReportSent(request_id=record.request_id))

    def close(record: ProducerRecord, turn: Turn) -> None:
        turn.ledger.close_write(record.part)
        if record.state == "draining":
            assert record.request_id is not None
            unpin(turn.ledger, record.request_id, record.part)
        else:
            producer_steps.release(record, record.request_id, turn)

    patch.setattr(producer_steps, "stop", stop_and_release)
    patch.setattr(producer_steps, "close", close)


def waits_for_ever_for_a_cancelled_rank(patch: pytest.MonkeyPatch) -> None:
    """Silence means nothing: whoever does not answer a cancel is asked again and again."""

    def ask_on(record: ConsumerRecord, event: Any, turn: Turn) -> None:
        turn.arm((consumer_actions.NAME, record.request_id), turn.timings.cancel_deadline_s)

    patch.setattr(peer, "_silent", lambda record, event, turn: [])
    replace_action(patch, consumer_table, consumer_actions.lose_silent, ask_on)


def lets_go_of_what_is_kept(patch: pytest.MonkeyPatch) -> None:
    """vLLM gets the blocks back when they are written, though they may be written once more."""

    def keep_in_name(record: ProducerRecord, event: Any, turn: Turn) -> None:
        producer_endings.finish_and_keep(record, event, turn)
        assert record.request_id is not None
        turn.effects.append(ReportSent(request_id=record.request_id))

    replace_action(patch, producer_table, producer_endings.finish_and_keep, keep_in_name)


def takes_any_prefill_for_the_one_that_was_lost(patch: pytest.MonkeyPatch) -> None:
    """Whatever prefill the id names now is written into a load that was preempted."""
    patch.setattr(classify, "_has_written", lambda record, peer, prefill: True)


def trusts_transfer_ids(patch: pytest.MonkeyPatch) -> None:
    """Whatever was computed under the id counts, also if its prompt was another one."""
    patch.setattr(consumer, "is_of_our_prompt", lambda record, event: True)


def believes_routers(patch: pytest.MonkeyPatch) -> None:
    """What a router told of counts, whatever prefill the producer has under that id."""

    def take_offer(record: ConsumerRecord, event: Any, turn: Turn) -> None:
        assert record.reads is not None
        event = dataclasses.replace(event, offer=record.reads.offer or event.offer)
        consumer_reads.take_offer(record, event, turn)

    def confirms(record: ConsumerRecord, event: Any) -> bool:
        return record.reads is not None and event.rank in record.reads.fetched

    patch.setattr(consumer_reads, "confirms", confirms)
    replace_action(patch, consumer_table, consumer_reads.take_offer, take_offer)


MUTANTS: list[tuple[Callable[[pytest.MonkeyPatch], None], set[str]]] = [
    (writes_whatever_the_lease, {"S2", "S7"}),
    (counts_dones, {"S2", "S6", "L1"}),
    (gives_back_while_draining, {"S1", "S2", "S7", "T1"}),
    (fences_for_no_time, {"S1", "S2", "S7"}),
    (releases_while_draining, {"S3"}),
    (waits_for_ever_for_a_cancelled_rank, {"L1"}),
    (lets_go_of_what_is_kept, {"S3"}),
    (takes_any_prefill_for_the_one_that_was_lost, {"S6"}),
    (trusts_transfer_ids, {"S6"}),
    (believes_routers, {"S6"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("mutant", "broken"), MUTANTS, ids=lambda m: getattr(m, "__name__", ""))
def test_a_broken_rule_is_found_and_its_transcript_is_short(
    mutant: Callable[[pytest.MonkeyPatch], None], broken: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    for seed, swarm in SEEDS_FOR_MUTANTS:
        violation = simulate(seed, MUTANT_STEPS, swarm=swarm).violation
        if violation is not None:
            assert violation.invariant in broken, violation.said
            assert len(violation.operations) <= min(violation.found_in, 100)
            again = Run(violation.setting).do_all(violation.operations)
            assert str(again.error) == violation.said
            assert "* " in violation.transcript
            return
    pytest.fail("nothing was found")


# -- shrinking and the command ---------------------------------------------------------------------


def test_an_exception_is_named_by_its_invariant() -> None:
    assert invariant_of(InvariantBrokenError("S2: given back")) == "S2"
    assert invariant_of(LocalProtocolError("S5: c1 given back twice")) == "S5"
    assert invariant_of(LocalProtocolError("peer: expired in met: no guard held")) == "T2"
    said = "peer: heard in unmet: it has no agents, so nothing can come from it or be lost with it"
    assert invariant_of(LocalProtocolError(said)) == "T1"
    assert invariant_of(KeyError("x")) == "KeyError"


def test_the_command_tells_what_happened_and_ends_with_0() -> None:
    ran = CliRunner().invoke(app, ["simulate", "--seed", "1", "--steps", "3000"])
    assert ran.exit_code == 0
    assert "seed 1: 3," in ran.stdout
    assert "no invariant was broken" in ran.stdout
    assert "rows taken" in ran.stdout
    assert all(fault.value[:20] in ran.stdout for fault in Fault)
    assert "of 3,000 steps" in ran.stderr


def test_the_command_tells_the_seed_and_a_transcript_and_ends_with_1(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    gives_back_while_draining(monkeypatch)
    ran = CliRunner().invoke(app, ["simulate", "--seed", "1", "--steps", "60000"])
    assert ran.exit_code == 1
    assert "is broken, seed 1" in ran.stdout
    assert "C0: consumer" in ran.stdout
    ran = CliRunner().invoke(app, ["simulate", "--seed", "1", "--steps", "60000", "--json"])
    assert ran.exit_code == 1
    told = json.loads(ran.stdout)
    assert (told["seed"], told["violation"]["invariant"]) == (1, "T1")
    assert told["violation"]["transcript"]


def test_a_seed_that_nobody_named_is_told() -> None:
    ran = CliRunner().invoke(app, ["simulate", "--steps", "200", "--swarm", "--json"])
    assert ran.exit_code == 0
    told = json.loads(ran.stdout)
    assert told["violation"] is None
    assert sum(each["count"] for each in told["outcomes"]) > 0
    assert len(told["faults"]) == len(Fault) >= 20
    assert f"seed {told['seed']}:" in ran.stderr
