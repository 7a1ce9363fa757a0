"""What an event means to a record: pure comparisons that name the trigger to fire.

The tables stay flat because the comparisons are here, once, and not in guards.
"""

from kvflow.core.events import (
    PrefillAborted,
    PrefillAdvanced,
    PrefillFinished,
    PrefillPreempted,
    PrefillStarted,
)
from kvflow.core.notices import Cancel, Register
from kvflow.core.producer import ProducerRecord
from kvflow.core.reasons import Standing
from kvflow.ids import ATTEMPT_STRIDE, AgentName

PrefillEvent = (
    PrefillStarted | PrefillPreempted | PrefillAdvanced | PrefillFinished | PrefillAborted
)

_OWN = {
    PrefillStarted: "prefill_started",
    PrefillAdvanced: "prefill_advanced",
    PrefillPreempted: "prefill_preempted",
    PrefillFinished: "prefill_finished",
    PrefillAborted: "prefill_aborted",
}
_RIVAL = {
    PrefillStarted: "rival_started",
    PrefillAdvanced: "rival_advanced",
    PrefillPreempted: "rival_ended",
    PrefillFinished: "rival_finished",
    PrefillAborted: "rival_ended",
}

STANDINGS = {
    "held": Standing.WAITING,
    "registered": Standing.WAITING,
    "streaming": Standing.TRANSFERRING,
    "recalled": Standing.WAITING,
    "transferring": Standing.TRANSFERRING,
    "lent": Standing.READABLE,
    "draining": Standing.STOPPING,
    "kept": Standing.DONE,
    "sent": Standing.DONE,
    "failed": Standing.FAILED,
}
"""Where a registration stands, by the state of the record that has it."""


def prefill(record: ProducerRecord, event: PrefillEvent) -> str:
    """This record's own prefill, or another one that claims the same transfer id."""
    if record.request_id in (None, event.request_id):
        return _OWN[type(event)]
    return _RIVAL[type(event)]


def registration(record: ProducerRecord, peer: AgentName, register: Register, floor: int) -> str:
    """First, the same again, newer, outdated, a rival's, or too late for what it wants once more.

    `floor` is the highest attempt of this consumer that has been forgotten. The same attempt again
    is recognised before anything else: while its write drains it must not be called settled. A
    retry is numbered like its load, which may be older than one that was forgotten meanwhile.
    """
    known = record.registration
    if known and (known.peer, known.attempt) == (peer, register.attempt):
        return "registered_again"
    settled = record.settled.get(peer, 0)
    if not _is_retry(record, peer, register.attempt):
        settled = max(settled, floor)
    if register.attempt <= settled:
        return "registered_stale"
    if register.prefill and not _has_written(record, peer, register.prefill):
        return "registered_late"
    if known is None:
        return "registered"
    if known.peer != peer:
        return "registered_rival"
    return "registered_anew" if register.attempt > known.attempt else "registered_stale"


def _has_written(record: ProducerRecord, peer: AgentName, prefill: str) -> bool:
    """Whether this is the prefill, and that the consumer, of which a `Done` spoke."""
    known = record.registration
    return known is not None and known.peer == peer and record.prefill == prefill


def _is_retry(record: ProducerRecord, peer: AgentName, attempt: int) -> bool:
    """Whether this is the load whose WRITE failed here last, trying once more."""
    if record.retry_of is None:
        return False
    of, failed = record.retry_of
    return of == peer and failed < attempt and failed // ATTEMPT_STRIDE == attempt // ATTEMPT_STRIDE


def cancellation(record: ProducerRecord, peer: AgentName, cancel: Cancel, floor: int) -> str:
    """Of the attempt on record (or of a prefill that nobody has claimed), or of another one."""
    known = record.registration
    failed = record.retry_of == (peer, cancel.attempt)
    gives_up_retry = failed or _is_retry(record, peer, cancel.attempt)
    settled = max(floor, record.settled.get(peer, -1))
    if known is None and cancel.attempt <= settled and not gives_up_retry:
        return "cancel_stale"
    if known is None or (known.peer == peer and cancel.attempt >= known.attempt):
        return "cancel_asked"
    return "cancel_stale"


def is_registered_by(record: ProducerRecord | None, peer: AgentName, attempt: int) -> bool:
    """Whether this record has this very registration."""
    known = record.registration if record else None
    return known is not None and (known.peer, known.attempt) == (peer, attempt)
