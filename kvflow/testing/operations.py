"""What the seeded simulator may do next, how often, and with which numbers.

Rules: an operation is a name and a seed; everything random in it, and in what the network and the
transfer library make of it until the next operation, comes from that seed. So operations can be
left out of a script, and those that stay mean what they meant.
"""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

from kvflow.core import Timings
from kvflow.testing.chaos import CHANCES, MOMENTS_S, PAUSES_S, WHILES_S, Chaos
from kvflow.testing.faults import SWARM
from kvflow.testing.machines import TIMINGS

PHASE = "begin_phase"
END = "end_phase"
PICKS = 36
OLD_ODDS = 0.1
RARELY = (0.0, 0.0, 0.0, 0.0, 0.1, 0.3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One thing that is done to a world."""

    name: str
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """What a world looks like.

    blocks  in each engine, per cache group: few, so that requests must queue.
    registers
            the first consumer registers again after a preemption, the next one does not, ...; or
            the other way round.
    swarm   each phase turns a random half of the faults off.
    prompt_tokens_max
            of the producers; a prompt has 32 to 128 tokens.
    """

    seed: int
    ranks: int
    producers: int
    consumers: int
    blocks: int
    registers: bool = True
    swarm: bool = False
    timings: Timings = TIMINGS
    prompt_tokens_max: int | None = None

    def build(self) -> Chaos:
        return Chaos(
            self.seed,
            self.ranks,
            self.timings,
            producers=self.producers,
            consumers=self.consumers,
            blocks=self.blocks,
            prompt_tokens_max=self.prompt_tokens_max,
            registers=self.registers,
        )


def _pick(rng: Random) -> int:
    return rng.randrange(PICKS)


def _yes(rng: Random) -> bool:
    return rng.random() < 0.5


def _old(chaos: Chaos, rng: Random) -> bool:
    return rng.random() < OLD_ODDS and "id_reuse" not in chaos.off


def _allocate(chaos: Chaos, rng: Random) -> None:
    surplus = int(rng.random() < 0.1 and "mismatch" not in chaos.off)
    old = _old(chaos, rng)
    who, where, pick, skip = _pick(rng), _pick(rng), _pick(rng), rng.randrange(3)
    chaos.allocate(who, where, pick, old, skip, surplus, _yes(rng), _yes(rng))


def _dispatch(chaos: Chaos, rng: Random) -> None:
    steps = rng.choice((0, 0, 1, 3))
    where, old, first, then_s = _pick(rng), _old(chaos, rng), _yes(rng), rng.choice(MOMENTS_S)
    chaos.dispatch_both_legs(where, old, first, then_s, steps, _yes(rng))


def _change_faults(chaos: Chaos, rng: Random) -> None:
    chaos.change_faults(
        rng.choice((0.0, 0.1, 0.3, 0.9)),
        rng.choice(RARELY),
        rng.choice(CHANCES),
        post_fails=rng.choice(RARELY),
        poll_fails=rng.choice(RARELY),
        refuses=rng.choice((0.0, 0.0, 0.0, 0.02, 0.2)),
        meeting_fails=rng.choice(RARELY),
        incompatible=rng.choice(RARELY),
        rejects=rng.choice((0.0, 0.5, 1.0)),
    )


def _a_while(chaos: Chaos, rng: Random) -> None:
    chaos.pass_time(rng.choice(WHILES_S[: rng.choice((3, 3, 7))]))


def begin_phase(chaos: Chaos, rng: Random, swarm: bool) -> None:
    """In a swarm, every fault that can be turned off is off with probability one half."""
    off = [name for name in SWARM if _yes(rng)] if swarm else []
    chaos.off = frozenset(off)
    chaos.world.say(f"a phase begins without {', '.join(off)}" if off else "a phase begins")


Do = Callable[[Chaos, Random], None]
OPERATIONS: dict[str, tuple[float, Do]] = {
    "a_moment": (20.0, lambda c, r: c.pass_time(r.choice(MOMENTS_S))),
    "a_while": (3.0, _a_while),
    "begin_prefill": (4.0, lambda c, r: c.begin_prefill(_pick(r), _pick(r), _old(c, r))),
    "finish_prefill": (6.0, lambda c, r: c.finish_prefill(_pick(r))),
    "advance_prefill": (8.0, lambda c, r: c.advance_prefill(_pick(r), r.choice((8, 16, 40, 200)))),
    "allocate_prefill_again": (1.0, lambda c, r: c.allocate_prefill_again(_pick(r))),
    "preempt_prefill": (2.0, lambda c, r: c.preempt_prefill(_pick(r))),
    "resume_prefill": (2.0, lambda c, r: c.resume_prefill(_pick(r))),
    "abort_prefill": (1.5, lambda c, r: c.abort_prefill(_pick(r))),
    "allocate": (6.0, _allocate),
    "stale_engine_id": (0.5, lambda c, r: c.allocate_by_old_name(_pick(r), _pick(r))),
    "refuse_load": (0.3, lambda c, r: c.refuse_load(_pick(r), _pick(r))),
    "dispatch_both_legs": (9.0, _dispatch),
    "abort_load": (1.5, lambda c, r: c.abort_load(_pick(r))),
    "finish_decode": (3.0, lambda c, r: c.finish_decode(_pick(r))),
    "finish_recomputed": (0.3, lambda c, r: c.finish_recomputed(_pick(r))),
    "preempt_load": (
        3.0,
        lambda c, r: c.preempt_load(_pick(r), r.randrange(3), _old(c, r), _yes(r)),
    ),
    "load_again": (2.0, lambda c, r: c.load_again(_pick(r), _pick(r), _yes(r), _yes(r))),
    "release": (1.0, lambda c, r: c.release(_pick(r), _pick(r), _old(c, r), _yes(r))),
    "release_by_router": (0.7, lambda c, r: c.release_by_router(_pick(r), _pick(r))),
    "change_weather": (1.0, lambda c, r: c.change_weather(*r.choices(CHANCES, k=3))),
    "change_faults": (2.0, _change_faults),
    "heal": (1.5, lambda c, r: c.heal()),
    "partition": (0.7, lambda c, r: c.partition(_pick(r), _pick(r), _yes(r))),
    "partition_one_way": (0.7, lambda c, r: c.partition_one_way(_pick(r), _pick(r), _yes(r))),
    "pause": (0.7, lambda c, r: c.pause(_pick(r), r.choice(PAUSES_S))),
    "crash": (0.3, lambda c, r: c.crash_engine(_pick(r))),
    "restart": (3.0, lambda c, r: c.restart()),
    "close": (0.2, lambda c, r: c.close_worker(_pick(r))),
    "shut_down": (0.2, lambda c, r: c.shut_down(_pick(r), r.choice(WHILES_S[:4]))),
}
"""Name -> how often, relative to the others, and what it does."""


def next_operation(chaos: Chaos, rng: Random) -> Operation:
    """Any that this phase has not turned off."""
    names = [name for name in OPERATIONS if name not in chaos.off]
    name = rng.choices(names, [OPERATIONS[name][0] for name in names])[0]
    return Operation(name=name, seed=rng.getrandbits(32))


def do(chaos: Chaos, operation: Operation, swarm: bool) -> None:
    """One operation, and what was queued before it."""
    rng = Random(operation.seed)
    chaos.world.rng.seed(operation.seed + 1)
    chaos.retry_queued()
    if operation.name == PHASE:
        begin_phase(chaos, rng, swarm)
    elif operation.name == END:
        chaos.end()
    else:
        OPERATIONS[operation.name][1](chaos, rng)
