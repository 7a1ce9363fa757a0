"""The seeded simulator: the core survives it, broken cores do not, and what it tells is readable."""

import json
import os
import secrets
from collections.abc import Callable
from typing import Any

import pytest
from typer.testing import CliRunner

from kvflow import cli
from kvflow.core import Engine, classify, consumer_actions, engine, peer
from kvflow.core.consumer import ConsumerRecord, Outcome
from kvflow.core.effects import ReportReceived
from kvflow.core.turn import Turn
from kvflow.ids import Rank
from kvflow.testing.faults import SWARM, Fault
from kvflow.testing.operations import OPERATIONS, Setting
from kvflow.testing.rows import every_row
from kvflow.testing.simulate import Report, Run, shrink, simulate

STEPS = 25_000
MUTANT_STEPS = 60_000
FRESH = secrets.randbelow(2**32)


def survived(report: Report) -> None:
    violation = report.violation
    assert violation is None, f"seed {report.seed}: {violation.said}\n{violation.transcript}"


@pytest.mark.parametrize(
    ("seed", "swarm"), [(1, False), (2, False), (3, True), pytest.param(FRESH, True, id="fresh")]
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


def test_a_swarm_phase_turns_faults_off_and_every_name_means_something() -> None:
    known = set(OPERATIONS) | set(FIELDS) | {"id_reuse", "mismatch"}
    assert set(SWARM) <= known
    report = simulate(8, 3000, swarm=True)
    survived(report)


FIELDS = {
    "loss": Fault.NOTICE_LOST,
    "double": Fault.NOTICE_DOUBLED,
    "straggle": Fault.NOTICE_DELAYED,
    "slow_slices": Fault.SLICE_SLOW,
    "write_fails": Fault.SLICE_FAILED,
    "post_fails": Fault.POST_FAILED,
    "poll_fails": Fault.POLL_FAILED,
    "refuses": Fault.NOTICE_REFUSED,
    "meeting_slow": Fault.MEETING_SLOW,
    "meeting_fails": Fault.MEETING_FAILED,
    "incompatible": Fault.MEETING_INCOMPATIBLE,
}

# -- broken rules, which the simulator must find ---------------------------------------------------


def writes_whatever_the_lease(patch: pytest.MonkeyPatch) -> None:
    """`may_write` without the time until which the consumer allows it."""

    def may_write(self: Engine, transfer_id: Any, attempt: int, now: float) -> bool:
        record = self.records.producers.get(transfer_id)
        return (
            record is not None
            and record.state == "transferring"
            and self.ledger.is_open(transfer_id, attempt)
        )

    patch.setattr(Engine, "may_write", may_write)


def counts_dones(patch: pytest.MonkeyPatch) -> None:
    """A second DONE of one rank stands in for another rank's."""
    settle = consumer_actions._settle

    def count(record: ConsumerRecord, rank: Rank, outcome: Outcome) -> None:
        if rank in record.outcomes and outcome is Outcome.DONE and record.unsettled:
            rank = min(record.unsettled)
        settle(record, rank, outcome)

    patch.setattr(consumer_actions, "_settle", count)


def gives_back_while_draining(patch: pytest.MonkeyPatch) -> None:
    """vLLM gets the blocks back when a load is given up, not when nothing can land any more."""
    give_up, end = consumer_actions._give_up, consumer_actions._end

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
    patch.setattr(consumer_actions, "_end", end_once)


def fences_for_no_time(patch: pytest.MonkeyPatch) -> None:
    """A lost producer is trusted to have stopped at once."""
    lose = consumer_actions.lose_and_fence

    def lose_at_once(record: ConsumerRecord, event: Any, turn: Turn) -> None:
        lose(record, event, turn)
        turn.arm((consumer_actions.NAME, record.request_id), 1e-3)

    fence = next(r for r in engine.consumer_table.ROWS if r.action is lose)
    monkeyed = engine.consumer_table.TABLE
    rows = tuple(
        type(fence)(
            trigger=r.trigger,
            sources=r.sources,
            dest=r.dest,
            action=lose_at_once if r.action is lose else r.action,
            guard=r.guard,
            why=r.why,
        )
        for r in monkeyed.rows
    )
    table = type(monkeyed)(
        name=monkeyed.name,
        initial=monkeyed.initial,
        states=monkeyed.states,
        terminal=monkeyed.terminal,
        rows=rows,
        impossible=monkeyed.impossible,
    )
    patch.setattr(engine.consumer_table, "TABLE", table)


def accepts_stale_registrations(patch: pytest.MonkeyPatch) -> None:
    """What was settled is forgotten: a late duplicate is as good as a new registration."""
    name = classify.registration

    def anything_goes(record: Any, sender: Any, register: Any, floor: int) -> str:
        said = name(record, sender, register, floor)
        known = record.registration
        return "registered" if said == "registered_stale" and known is None else said

    patch.setattr(classify, "registration", anything_goes)


def never_loses_anybody(patch: pytest.MonkeyPatch) -> None:
    """Silence means nothing; a cancel that is not answered is sent for ever."""
    patch.setattr(peer, "_silent", lambda record, event, turn: [])
    lose = consumer_actions.lose_silent

    def wait_on(record: ConsumerRecord, event: Any, turn: Turn) -> None:
        turn.arm((consumer_actions.NAME, record.request_id), turn.timings.cancel_deadline_s)

    assert lose
    patch.setattr(consumer_actions, "lose_silent", wait_on)


MUTANTS: list[tuple[Callable[[pytest.MonkeyPatch], None], set[str]]] = [
    (writes_whatever_the_lease, {"S2", "S7"}),
    (counts_dones, {"S6", "S2"}),
    (gives_back_while_draining, {"S1", "S2", "S7"}),
    (fences_for_no_time, {"S1", "S2", "S7"}),
    (accepts_stale_registrations, {"S1", "S2", "S7"}),
]


@pytest.mark.parametrize(("mutant", "broken"), MUTANTS, ids=lambda m: getattr(m, "__name__", ""))
def test_a_broken_rule_is_found(
    mutant: Callable[[pytest.MonkeyPatch], None], broken: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    for seed, swarm in ((1, False), (2, True), (3, True), (4, False)):
        report = simulate(seed, MUTANT_STEPS, swarm=swarm)
        if report.violation is not None:
            print(seed, report.steps, report.violation.invariant, report.violation.said)
            print(len(report.violation.operations), report.violation.found_in, report.violation.runs)
            print(report.violation.transcript)
            assert report.violation.invariant in broken
            return
    pytest.fail("nothing was found")
