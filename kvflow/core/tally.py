"""What has happened in one worker, counted: never reset, so a reader takes differences.

Rules: counts only grow; nothing here decides anything.

The idea: whatever happens to a transfer is a row that was taken, so counting rows, starts, ends and
registrations in the one place that fires them misses nothing. Every start has one end, and every
registration that a producer receives one fate.

Invariants, of each machine: started = ended + live. Of a producer's registrations: received =
those with a fate + those of live records that have none yet.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from kvflow.core.reasons import Reason
from kvflow.core.table import Table

if TYPE_CHECKING:
    from kvflow.core.producer import ProducerRecord, Registration
    from kvflow.core.turn import Record

MATCHED = "matched"
"""The fate of a registration whose KV has begun to move."""
REFUSED = "refused"
"""The fate of one that was answered with a refusal at once."""
SUPERSEDED = str(Reason.SUPERSEDED)
FATES = (MATCHED, REFUSED, *Reason)

REGISTRATIONS = tuple(
    f"registered{which}" for which in ("", "_anew", "_rival", "_beyond", "_late", "_stale")
)
"""The triggers that stand for a registration which was not received before."""
_MOVES = frozenset({"streaming", "transferring", "lent"})


@dataclass(slots=True)
class Tally:
    """Cumulative counts of one worker, over all its engines.

    rows           (machine, trigger, from, to) -> rows taken.
    started        machine -> records that became live.
    ended          (machine, to, reason) -> records that ceased to be.
    registrations  fate -> registrations of a producer.
    received       registrations of a producer, repetitions left out.
    sent, resent   registrations of a consumer, one for each rank that owes a part.
    misses         renewals that a producer rank has not answered in time.
    """

    rows: Counter[tuple[str, str, str, str]] = field(default_factory=Counter)
    started: Counter[str] = field(default_factory=Counter)
    ended: Counter[tuple[str, str, Reason | None]] = field(default_factory=Counter)
    registrations: Counter[str] = field(default_factory=Counter)
    received: int = 0
    sent: int = 0
    resent: int = 0
    misses: int = 0

    def took(self, table: Table, record: "Record", trigger: str, source: str) -> None:
        """A record took a row."""
        name, dest = table.name, record.state
        self.rows[name, trigger, source, dest] += 1
        if dest == source or dest == "forgotten":
            return
        if source in table.terminal or source == table.initial:
            self.started[name] += 1
        if dest in table.terminal:
            self.ended[name, dest, record.reason] += 1

    def registered(
        self, record: "ProducerRecord", trigger: str, before: "Registration | None", *, over: bool
    ) -> None:
        """A producer's record took a row; `before` is the registration that it had."""
        now = record.registration
        if trigger in REGISTRATIONS:
            self.received += 1
            if now is before:
                self.registrations[REFUSED] += 1
        if before is not None and not _is_same(before, now):
            if not record.is_counted:
                fate = SUPERSEDED if now is not None else str(record.reason or Reason.FORGOTTEN)
                self.registrations[fate] += 1
            record.is_counted = False
        if now is None or record.is_counted:
            return
        if record.state in _MOVES:
            self.registrations[MATCHED] += 1
            record.is_counted = True
        elif over:
            self.registrations[str(record.reason or Reason.FORGOTTEN)] += 1
            record.is_counted = True


def _is_same(one: "Registration", other: "Registration | None") -> bool:
    return other is not None and (one.peer, one.attempt) == (other.peer, other.attempt)
