"""Ways and events of the producer's machine; `kvflow.testing.ways` explains them."""

import hashlib
from collections.abc import Callable
from dataclasses import replace

from kvflow.core import events as ev
from kvflow.core.notices import Notice
from kvflow.ids import AgentName, TransferId
from kvflow.testing import bench as b
from kvflow.testing.bench import C1, C2, PART, Bench, T

Script = Callable[[Bench], object]


def until_due(bench: Bench) -> None:
    """Exactly the next deadline."""
    at = bench.engine.next_deadline()
    assert at is not None
    bench.wait(at - bench.now)


def until_over(bench: Bench) -> None:
    """Long enough for each deadline of a transfer, one after the other."""
    bench.wait(700.0)


def takes(*events: ev.Event) -> Script:
    return lambda bench: bench.take(*events)


def hears(sender: AgentName, *notices: Notice) -> Script:
    return lambda bench: bench.hear(sender, *notices)


def write_failed(attempt: int) -> ev.WriteFailed:
    return ev.WriteFailed(part=PART, attempt=attempt, detail="EIO")


def p_unknown(bench: Bench) -> None:
    bench.introduce()


def p_allocated(bench: Bench) -> None:
    p_unknown(bench)
    bench.take(b.started())


def p_held(bench: Bench) -> None:
    p_unknown(bench)
    bench.hear(C1, b.register())


def p_registered(bench: Bench) -> None:
    p_held(bench)
    bench.take(b.started())


def p_preempted(bench: Bench) -> None:
    p_allocated(bench)
    bench.take(b.preempted())


def p_allocated_in_part(bench: Bench) -> None:
    """Some of the prompt is computed, and nobody has registered."""
    p_allocated(bench)
    bench.take(b.advanced())


def p_streaming(bench: Bench) -> None:
    p_registered(bench)
    bench.take(b.advanced())


def p_streaming_with_more(bench: Bench) -> None:
    """A stretch is being written, and the next one is complete, though not all."""
    p_registered(bench)
    bench.take(b.advanced(tokens=1), b.advanced())


def p_streaming_to_the_end(bench: Bench) -> None:
    """The last stretch is being written, and vLLM has not ended the request."""
    p_registered(bench)
    bench.take(b.advanced(tokens=b.TOKENS))


def p_streaming_again(bench: Bench) -> None:
    """The first stretch failed, and the consumer has registered once more."""
    p_streaming(bench)
    bench.take(write_failed(5))
    bench.hear(C1, b.register(6))


def p_streamed(bench: Bench) -> None:
    """All that was complete has been written, as one stretch."""
    p_streaming(bench)
    bench.take(b.written())


def p_recalled(bench: Bench) -> None:
    p_streaming(bench)
    bench.take(b.preempted())


def p_streaming_recalled(bench: Bench) -> None:
    """Preempted amid a stretch, and begun again before its write has ended."""
    p_recalled(bench)
    bench.take(b.started())


def p_transferring_recalled(bench: Bench) -> None:
    """The same, and computed to the end."""
    p_streaming_recalled(bench)
    bench.take(b.finished())


def p_transferring_the_rest(bench: Bench) -> None:
    """The prompt was complete while a stretch of it was being written."""
    p_streaming(bench)
    bench.take(b.finished())


def p_prefilled(bench: Bench) -> None:
    p_allocated(bench)
    bench.take(b.finished())


def p_transferring(bench: Bench) -> None:
    p_prefilled(bench)
    bench.hear(C1, b.register())


def p_transferring_again(bench: Bench) -> None:
    """The first WRITE failed, and the consumer has registered once more."""
    p_transferring(bench)
    bench.take(write_failed(5))
    bench.hear(C1, b.register(6))


KEEP_S = 20.0
NAME = hashlib.sha256(b"r").hexdigest()[:16]
"""How the prefill `r` is named to consumers."""


def p_transferring_to_keep(bench: Bench) -> None:
    """The consumer wants to have it kept, and this producer does so."""
    bench.engine.timings = replace(bench.engine.timings, keep_sent_s=KEEP_S)
    p_prefilled(bench)
    bench.hear(C1, b.register(keep=True))


def p_kept(bench: Bench) -> None:
    p_transferring_to_keep(bench)
    bench.take(b.written())


def p_lent(bench: Bench) -> None:
    p_prefilled(bench)
    bench.hear(C1, b.register(reads=True))


def p_lent_to_keep(bench: Bench) -> None:
    bench.engine.timings = replace(bench.engine.timings, keep_sent_s=KEEP_S)
    p_prefilled(bench)
    bench.hear(C1, b.register(reads=True, keep=True))


def p_held_by_a_reader(bench: Bench) -> None:
    p_unknown(bench)
    bench.hear(C1, b.register(reads=True))


def p_registered_by_a_reader(bench: Bench) -> None:
    p_held_by_a_reader(bench)
    bench.take(b.started())


def p_draining(bench: Bench) -> None:
    p_transferring(bench)
    bench.hear(C1, b.cancel())


def p_draining_stretch(bench: Bench) -> None:
    """vLLM still computes the prompt."""
    p_streaming(bench)
    bench.hear(C1, b.cancel())


def p_sent_early(bench: Bench) -> None:
    """vLLM has not ended the request."""
    p_streaming_to_the_end(bench)
    bench.take(b.written())


def p_sent(bench: Bench) -> None:
    p_transferring(bench)
    bench.take(b.written())


def p_failed(bench: Bench) -> None:
    p_allocated(bench)
    bench.take(b.aborted())


def p_failed_registered(bench: Bench) -> None:
    p_registered(bench)
    bench.take(b.aborted())


def p_failed_too_long(bench: Bench) -> None:
    p_unknown(bench)
    bench.hear(C1, b.register(tokens=b.TOKENS + 1))


def p_failed_ambiguous(bench: Bench) -> None:
    p_allocated(bench)
    bench.take(b.started("rival"))


def p_reused(bench: Bench) -> None:
    """The id is used again: by the prefill `r`, after another's transfer was cancelled."""
    p_unknown(bench)
    bench.take(b.started("before"))
    bench.hear(C1, b.register(), b.cancel())
    bench.take(b.started())


def p_reused_preempted(bench: Bench) -> None:
    p_reused(bench)
    bench.take(b.preempted())


def p_reused_prefilled(bench: Bench) -> None:
    p_reused(bench)
    bench.take(b.finished())


def p_floor(bench: Bench) -> None:
    """An attempt 5 of another transfer was settled here, and forgotten."""
    p_unknown(bench)
    bench.hear(C1, b.register(of=TransferId("before")), b.cancel(of=TransferId("before")))
    bench.wait(bench.engine.timings.tombstone_s + 1)


PRODUCER_WAYS: dict[str, list[Script]] = {
    "unknown": [p_unknown, p_floor],
    "allocated": [p_allocated, p_allocated_in_part, p_reused],
    "held": [p_held, p_held_by_a_reader],
    "registered": [p_registered, p_registered_by_a_reader, p_streamed],
    "streaming": [
        p_streaming,
        p_streaming_with_more,
        p_streaming_to_the_end,
        p_streaming_again,
        p_streaming_recalled,
    ],
    "recalled": [p_recalled],
    "preempted": [p_preempted, p_reused_preempted],
    "prefilled": [p_prefilled, p_reused_prefilled],
    "transferring": [
        p_transferring,
        p_transferring_again,
        p_transferring_to_keep,
        p_transferring_the_rest,
        p_transferring_recalled,
    ],
    "lent": [p_lent, p_lent_to_keep],
    "draining": [p_draining, p_draining_stretch],
    "kept": [p_kept],
    "sent": [p_sent, p_sent_early],
    "failed": [p_failed, p_failed_registered, p_failed_too_long, p_failed_ambiguous],
}


def lose_consumer(bench: Bench) -> None:
    bench.take(ev.NoticeFailed(agent=C1, detail="no such agent"))


def register_beyond(bench: Bench) -> None:
    """One registration for an unknown id may be kept, and is; then comes this one."""
    bench.engine.timings = replace(bench.engine.timings, held_max=1)
    bench.hear(C2, b.register(of=TransferId("another")))
    bench.hear(C1, b.register(6))


def stay_stalled(bench: Bench) -> None:
    """vLLM is out of blocks, and a consumer waits for another prefill than this one."""
    bench.take(ev.PrefillsStalled())
    bench.hear(C2, b.register(of=TransferId("another")))
    bench.wait(bench.engine.timings.lease_contended_s)
    bench.take(ev.PrefillsResumed())


PRODUCER_EVENTS: dict[str, list[Script]] = {
    "prefill_started": [takes(b.started())],
    "prefill_finished": [takes(b.finished()), takes(b.finished(tokens=b.TOKENS - 1))],
    "prefill_aborted": [takes(b.aborted())],
    "prefill_preempted": [takes(b.preempted())],
    "prefill_advanced": [takes(b.advanced()), takes(b.advanced(tokens=0))],
    "rival_advanced": [takes(b.advanced("rival"))],
    "rival_started": [takes(b.started("rival"))],
    "rival_finished": [takes(b.finished("rival"))],
    "rival_ended": [takes(b.aborted("rival")), takes(b.preempted("rival"))],
    "registered": [
        hears(C1, b.register(6)),
        hears(C1, b.register(6, reads=True)),
        hears(C1, b.register(6, tokens=b.TOKENS + 1)),
    ],
    "registered_again": [hears(C1, b.register())],
    "registered_anew": [
        hears(C1, b.register(6)),
        hears(C1, b.register(6, reads=True)),
        hears(C1, b.register(6, tokens=b.TOKENS + 1)),
        hears(C1, b.register(6, prefill=NAME)),
        hears(C1, b.register(6, prefill=NAME, reads=True)),
    ],
    "registered_late": [hears(C1, b.register(6, prefill="another"))],
    "registered_stale": [hears(C1, b.register(4)), hears(C1, b.register(0))],
    "registered_rival": [hears(C2, b.register())],
    "cancel_asked": [hears(C1, b.cancel(6))],
    "cancel_stale": [hears(C1, b.cancel(4))],
    "release_asked": [takes(ev.ReleaseAsked(transfer_id=T))],
    "registered_beyond": [register_beyond],
    "fetched": [hears(C1, b.fetched())],
    "renewed": [hears(C1, b.renew())],
    "write_done": [takes(b.written())],
    "write_failed": [takes(write_failed(5)), takes(write_failed(6))],
    "write_stopped": [takes(ev.WriteStopped(part=PART, attempt=5))],
    "peer_lost": [lose_consumer],
    "contended": [stay_stalled],
    "expired": [until_over],
    "closing": [takes(ev.Closing())],
}
