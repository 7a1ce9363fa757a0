"""Hypothesis over two producers with several ranks, two consumers, and everything that goes wrong.

Safety (S1 to S7) is checked by the world after each thing that happens; liveness (L1) at the end.
That exactly one guard holds is checked at each firing.
"""

from dataclasses import replace
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from kvflow.testing.chaos import (
    CHANCES,
    MOMENTS_S,
    PAUSES_S,
    WHILES_S,
    Chaos,
)
from kvflow.testing.machines import PICKS, TIMINGS
from kvflow.testing.rows import RowWatch
from kvflow.testing.simulate import KEEPS_S

PICK = st.integers(0, PICKS - 1)
OLD = st.integers(0, 3).map(lambda number: number == 0)
CHANCE = st.sampled_from(CHANCES)
MOMENTS = st.sampled_from(MOMENTS_S)


class TwoEnginesAndMore(RuleBasedStateMachine):
    """What vLLMs, networks and operators may do, in any order."""

    @initialize(
        seed=st.integers(0, 2**32 - 1),
        ranks=st.integers(1, 2),
        keep_sent_s=st.sampled_from(KEEPS_S),
        registers=st.booleans(),
    )
    def build(self, seed: int, ranks: int, keep_sent_s: float, registers: bool) -> None:
        self.watch = RowWatch().__enter__()
        timings = replace(TIMINGS, keep_sent_s=keep_sent_s)
        self.chaos = Chaos(seed, ranks, timings, registers=registers)

    @rule(where=PICK, pick=PICK, old=OLD)
    def begin_prefill(self, where: int, pick: int, old: bool) -> None:
        self.chaos.begin_prefill(where, pick, old)

    @precondition(lambda self: self.chaos.prefills("running"))
    @rule(pick=PICK)
    def finish_prefill(self, pick: int) -> None:
        self.chaos.finish_prefill(pick)

    @precondition(lambda self: self.chaos.prefills("running"))
    @rule(pick=PICK, tokens=st.sampled_from([8, 16, 40, 200]))
    def advance_prefill(self, pick: int, tokens: int) -> None:
        self.chaos.advance_prefill(pick, tokens)

    @precondition(lambda self: self.chaos.prefills("running"))
    @rule(pick=PICK, repeat=st.booleans())
    def preempt_prefill(self, pick: int, repeat: bool) -> None:
        if repeat:
            self.chaos.allocate_prefill_again(pick)
        else:
            self.chaos.preempt_prefill(pick)

    @precondition(lambda self: self.chaos.prefills("preempted"))
    @rule(pick=PICK)
    def resume_prefill(self, pick: int) -> None:
        self.chaos.resume_prefill(pick)

    @precondition(lambda self: self.chaos.prefills("running", "preempted"))
    @rule(pick=PICK)
    def abort_prefill(self, pick: int) -> None:
        self.chaos.abort_prefill(pick)

    @rule(
        who=PICK,
        where=PICK,
        pick=PICK,
        old=OLD,
        skip=st.integers(0, 2),
        surplus=st.sampled_from([0, 0, 0, 0, 1]),
        named=st.booleans(),
        reads=st.booleans(),
    )
    def allocate(self, **how: Any) -> None:
        self.chaos.allocate(**how)

    @rule(
        where=PICK,
        old=OLD,
        first=st.booleans(),
        then_s=MOMENTS,
        steps=st.integers(0, 2),
        reads=st.booleans(),
    )
    def dispatch_both_legs(self, **how: Any) -> None:
        self.chaos.dispatch_both_legs(**how)

    @precondition(lambda self: self.chaos.loads("loading", "received"))
    @rule(pick=PICK)
    def abort_load(self, pick: int) -> None:
        self.chaos.abort_load(pick)

    @precondition(lambda self: self.chaos.loads("received"))
    @rule(pick=PICK)
    def finish_decode(self, pick: int) -> None:
        self.chaos.finish_decode(pick)

    @precondition(lambda self: self.chaos.loads("received"))
    @rule(pick=PICK, skip=st.integers(0, 2), reused=OLD, reads=st.booleans())
    def preempt_load(self, pick: int, skip: int, reused: bool, reads: bool) -> None:
        self.chaos.preempt_load(pick, skip, reused, reads)

    @precondition(lambda self: self.chaos.loads("failed"))
    @rule(pick=PICK)
    def finish_recomputed(self, pick: int) -> None:
        self.chaos.finish_recomputed(pick)

    @precondition(lambda self: self.chaos.loads("received", "failed", "over"))
    @rule(where=PICK, pick=PICK, same=st.booleans(), reads=st.booleans())
    def load_again(self, where: int, pick: int, same: bool, reads: bool) -> None:
        self.chaos.load_again(where, pick, same, reads)

    @rule(where=PICK, pick=PICK, old=OLD, again=st.booleans())
    def release(self, where: int, pick: int, old: bool, again: bool) -> None:
        self.chaos.release(where, pick, old, again)

    @rule(loss=CHANCE, double=CHANCE, straggle=CHANCE)
    def change_weather(self, loss: float, double: float, straggle: float) -> None:
        self.chaos.change_weather(loss, double, straggle)

    @rule(slow=CHANCE, fails=st.sampled_from([0.0, 0.0, 0.2]), meeting_slow=CHANCE)
    def change_faults(self, slow: float, fails: float, meeting_slow: float) -> None:
        self.chaos.change_faults(slow, fails, meeting_slow)

    @rule()
    def heal(self) -> None:
        self.chaos.heal()

    @rule(one=PICK, other=PICK, data=st.booleans())
    def partition(self, one: int, other: int, data: bool) -> None:
        self.chaos.partition(one, other, data)

    @rule(pick=PICK, seconds=st.sampled_from(PAUSES_S))
    def pause(self, pick: int, seconds: float) -> None:
        self.chaos.pause(pick, seconds)

    @rule(pick=PICK)
    def crash(self, pick: int) -> None:
        self.chaos.crash(pick)

    @rule()
    def restart(self) -> None:
        self.chaos.restart()

    @rule(pick=PICK)
    def close(self, pick: int) -> None:
        self.chaos.close(pick)

    @rule(seconds=st.sampled_from(WHILES_S))
    def let_time_pass(self, seconds: float) -> None:
        self.chaos.pass_time(seconds)

    @rule(seconds=MOMENTS)
    def let_a_moment_pass(self, seconds: float) -> None:
        self.chaos.pass_time(seconds)

    @rule(seconds=MOMENTS)
    def let_another_moment_pass(self, seconds: float) -> None:
        self.chaos.pass_time(seconds)

    def teardown(self) -> None:
        try:
            if hasattr(self, "chaos"):
                self.chaos.world.everything_ends()
        finally:
            if hasattr(self, "watch"):
                self.watch.__exit__(None, None, None)


TestTwoEnginesAndMore = TwoEnginesAndMore.TestCase
TestTwoEnginesAndMore.settings = settings(max_examples=150, stateful_step_count=40)
