"""When vLLM has no blocks left for prompts that consumers wait for.

Finished prefills hold blocks until a consumer registers, and that consumer may itself be out of
blocks, full of loads that wait for the prompts that cannot be computed here: two full pools, each
waiting for the other. So while vLLM is stalled, whatever has been idle for longer than a consumer
has waited gives way (specs/decisions/0009).
"""

from kvflow.core.events import PrefillsResumed, PrefillsStalled
from kvflow.core.producer import AWAITED
from kvflow.core.records import Records
from kvflow.core.turn import Turn

STALL = ("stall", "")
"""The deadline that runs while vLLM's prefills are stalled."""
_IDLE = frozenset({"prefilled", "kept"})


def watch(event: PrefillsStalled | PrefillsResumed, turn: Turn) -> None:
    """vLLM says that its prefills are stalled, or not any more."""
    if isinstance(event, PrefillsStalled):
        turn.arm(STALL, turn.timings.lease_contended_s)
    else:
        turn.deadlines.cancel(STALL)


def give_way(records: Records, turn: Turn) -> None:
    """They have been stalled for so long: what is idle goes, if anybody waits for another."""
    patience_s = turn.timings.lease_contended_s
    producers = list(records.producers.values())
    waits = [r.registration.since for r in producers if r.registration and r.state in AWAITED]
    longest = min(waits, default=turn.now)
    if longest + patience_s <= turn.now:
        for record in producers:
            if record.state in _IDLE and record.since + patience_s <= turn.now:
                records.fire_producer(record, "contended", None, turn)
        longest = turn.now
    turn.deadlines.arm(STALL, longest + patience_s)
