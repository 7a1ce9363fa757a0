"""The kinds of fault that a modelled world knows, by name, and how likely some of them are.

Every kind is counted each time that it strikes (`World.struck`). `SWARM` says what a phase of
swarm testing can turn off: a world in which everything goes wrong at once hides what only a few
faults together can do.
"""

import enum
from dataclasses import dataclass, fields
from typing import Self


class Fault(enum.StrEnum):
    """Everything that goes wrong, or that vLLM and routers may do to make it hard."""

    NOTICE_LOST = "notice lost"
    NOTICE_DOUBLED = "notice doubled"
    NOTICE_DELAYED = "notice delayed for seconds"
    NOTICE_REORDERED = "notice overtaken by a later one"
    NOTICE_CUT_OFF = "notice lost to a partition"
    NOTICE_TO_DEAD_REJECTED = "notice to a dead agent rejected"
    NOTICE_TO_DEAD_LOST = "notice to a dead agent lost without a word"
    NOTICE_REFUSED = "notice refused by the transfer library"
    PARTITION = "partition, notices only"
    PARTITION_WITH_DATA = "partition, notices and writes"
    PARTITION_ONE_WAY = "partition, one way"
    MEETING_SLOW = "meeting slower than its deadline"
    MEETING_FAILED = "meeting failed"
    MEETING_INCOMPATIBLE = "meeting refused: incompatible"
    METADATA_STALE = "meeting answered with the metadata of a dead process"
    POST_FAILED = "post refused by the transfer library"
    POLL_FAILED = "poll failed while the slice goes on"
    SLICE_FAILED = "slice failed"
    SLICE_SLOW = "slice slow"
    SLICE_TO_DEAD = "slice to a dead or cut off agent"
    PRODUCER_CRASHED = "producer crashed"
    CONSUMER_CRASHED = "consumer crashed"
    RESTARTED = "engine restarted at the same address"
    PAUSED = "process stopped and resumed (SIGSTOP)"
    CLOSING = "worker told to close"
    SHUT_DOWN = "engine shut down: closing, then gone"
    CLOCK_SKEWED = "clock that shows another time"
    CLOCK_DRIFTS = "clock that drifts"
    PREFILL_PREEMPTED = "prefill preempted"
    PREFILL_ABORTED = "prefill aborted"
    PREFILL_TOLD_TWICE = "prefill allocated more than once"
    LOAD_ABORTED = "load aborted"
    LOAD_PREEMPTED = "request preempted after its KV had landed"
    LOAD_AGAIN = "request loads again after a preemption or failure"
    LOAD_REFUSED = "load with bad parameters"
    PRODUCER_OUT_OF_BLOCKS = "producer out of blocks: prefill queued"
    CONSUMER_OUT_OF_BLOCKS = "consumer out of blocks: load queued"
    ID_REUSED = "transfer id used again"
    PREFILL_RIVAL = "second prefill with a live transfer id"
    LOAD_RIVAL = "second load with a live transfer id"
    RELEASE_ONLY = "release without a load"
    RELEASED_BY_ROUTER = "released by a router, at the producer"
    PROMPT_TOO_LONG = "prompt refused by the producer's API server: too long"
    MISMATCH = "load asks for more blocks than a prefill has"
    OFFER_STALE = "router tells of a prefill that is gone"
    ENGINE_ID_STALE = "router names the engine id of an earlier start"


@dataclass(slots=True, kw_only=True)
class Faults:
    """What goes wrong besides the network: probabilities.

    slow_slices     slices take up to `slice_max_s` instead of a millisecond.
    write_fails     a slice fails.
    post_fails      a slice cannot be posted.
    poll_fails      asking about a slice fails once, while it goes on.
    rejects         a notice to a dead agent is rejected at once, instead of vanishing.
    refuses         a notice to a living agent is rejected at once.
    meeting_slow    a meeting takes longer than its deadline.
    meeting_fails   a meeting fails.
    incompatible    a meeting says that trying again cannot help.
    """

    slow_slices: float = 0.0
    write_fails: float = 0.0
    post_fails: float = 0.0
    poll_fails: float = 0.0
    rejects: float = 0.5
    refuses: float = 0.0
    meeting_slow: float = 0.0
    meeting_fails: float = 0.0
    incompatible: float = 0.0

    def without(self, off: frozenset[str]) -> Self:
        """The same, with those that are named in `off` at zero."""
        kept = {each.name: getattr(self, each.name) for each in fields(self)}
        return type(self)(**{name: 0.0 if name in off else p for name, p in kept.items()})


SWARM: tuple[str, ...] = (
    # the network
    "loss", "double", "straggle", "partition", "partition_one_way",
    # processes and clocks
    "crash", "pause", "close", "shut_down",
    # the transfer library and the side channel
    "slow_slices", "write_fails", "post_fails", "poll_fails", "refuses",
    "meeting_slow", "meeting_fails", "incompatible",
    # vLLM and routers
    "preempt_prefill", "abort_prefill", "allocate_prefill_again", "abort_load", "load_again",
    "preempt_load",
    "release", "release_by_router", "refuse_load", "id_reuse", "mismatch", "stale_engine_id",
)  # fmt: skip
"""What a phase can turn off: operations, weather, probabilities, and habits of routers."""
