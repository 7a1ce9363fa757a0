"""Every duration and limit that the machines use, with its unit in its name."""

from dataclasses import dataclass, fields

from kvflow.errors import ConfigurationError
from kvflow.ids import ATTEMPT_STRIDE

MAY_BE_ZERO = frozenset({"retries_max", "keep_sent_s"})
"""Those that 0 switches off."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """How long what may last. All in seconds, except counts.

    The promise that blocks are not reused while a lost but living producer may write them (S2)
    rests on `fence_s >= write_lease_s + slice_max_s`. A violated inequality is refused.

    lease_s            an unclaimed prefill is kept, and a registration is good, so long without
                       a renewal.
    lease_contended_s  an unclaimed prefill is kept so long while vLLM computes nothing though
                       prompts wait (for blocks), and a consumer has waited so long for another.
    write_lease_s      slices may be posted so long after the consumer last sent a registration or
                       renewal; then the write pauses until the next one comes.
    slice_max_s        assumed bound on the time from asking `may_write` to the slice's last byte.
    hold_max_s         a registration without a prefill ends then, however often renewed.
    prefill_max_s      a prefill that vLLM neither finished nor aborted by then is given up.
    load_deadline_s    bound on a whole load, from allocation to the last byte.
    meet_deadline_s    bound on meeting the producer of a load.
    register_resend_s  an unanswered registration is sent again after this.
    cancel_resend_s    an unanswered cancel is sent again after this.
    cancel_deadline_s  a cancel unanswered for so long makes the silent peer a lost one.
    stop_deadline_s    so does a write that the producer has been stopping for so long.
    fence_s            after a peer's process is known to be gone, blocks it might have been writing
                       are kept so long.
    fence_silent_s     the same after a peer that is only silent: it may be stopped amid a
                       slice, and finish it when it goes on.
    renew_interval_s   time between two renewals to one peer.
    renew_misses_max   a rank silent for so many intervals, while something is awaited, is lost.
    probe_silent_s     a consumer with live transfers that was silent for so long is sent something,
                       now and each time that it passes again: that shows a process that is gone.
    retries_max        a load whose WRITE failed is registered again, or reads again if it reads, so
                       often (0 to 15).
    retry_hold_s       after a failed WRITE the blocks are kept so long for another attempt.
    keep_sent_s        after a complete WRITE the blocks are kept so long, counted from the first,
                       for a consumer that may be preempted and asks for it (`after_preemption`); 0
                       for not at all.
    held_max           registrations kept for transfer ids of which no prefill is known yet.
    peers_max          consumer workers known at a time.
    floors_max         consumer workers of which the highest settled attempt is remembered.
    tombstones_max     ended transfers remembered at a time; the oldest are forgotten first.
    verify_after_s     an unused producer not heard for so long is asked who it is before it is
                       used again.
    backoff_first_s, backoff_max_s
                       wait before a failed meeting is tried again; doubles from first to max.
    drain_s            at shutdown, writes under way may go on so long.
    write_drain_s      a write or read that must stop and does not is torn down after this.
    tombstone_s        ended transfers are remembered so long, to answer late messages.
    peer_idle_s        a consumer that asked for nothing is forgotten after this.
    """

    lease_s: float = 30.0
    lease_contended_s: float = 5.0
    write_lease_s: float = 1.0
    slice_max_s: float = 0.4
    hold_max_s: float = 30.0
    prefill_max_s: float = 600.0
    load_deadline_s: float = 300.0
    meet_deadline_s: float = 5.0
    register_resend_s: float = 0.25
    cancel_resend_s: float = 0.25
    cancel_deadline_s: float = 3.0
    stop_deadline_s: float = 15.0
    fence_s: float = 1.5
    fence_silent_s: float = 10.0
    renew_interval_s: float = 0.25
    renew_misses_max: int = 12
    probe_silent_s: float = 1.0
    retries_max: int = 1
    retry_hold_s: float = 5.0
    keep_sent_s: float = 0.0
    held_max: int = 4096
    peers_max: int = 1024
    floors_max: int = 65_536
    tombstones_max: int = 50_000
    verify_after_s: float = 5.0
    backoff_first_s: float = 0.2
    backoff_max_s: float = 5.0
    drain_s: float = 5.0
    write_drain_s: float = 5.0
    tombstone_s: float = 60.0
    peer_idle_s: float = 600.0

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name in MAY_BE_ZERO:
                if not value >= 0:
                    raise ConfigurationError(each.name, value, "at least 0")
            elif not value > 0:
                raise ConfigurationError(each.name, value, "more than 0")
        if not 0 <= self.retries_max < ATTEMPT_STRIDE:
            raise ConfigurationError("retries_max", self.retries_max, f"0 to {ATTEMPT_STRIDE - 1}")
        quiet_s = self.write_lease_s + self.slice_max_s
        self._at_least("fence_s", quiet_s, "write_lease_s + slice_max_s")
        self._at_least("fence_silent_s", self.fence_s, "fence_s")
        self._at_least("write_lease_s", 2 * self.renew_interval_s, "2 * renew_interval_s")
        self._at_least("probe_silent_s", 2 * self.renew_interval_s, "2 * renew_interval_s")
        self._at_least("lease_s", self.write_lease_s, "write_lease_s")
        self._at_least("tombstone_s", 2 * self.fence_s, "2 * fence_s")
        self._at_least("stop_deadline_s", self.cancel_deadline_s, "cancel_deadline_s")
        self._at_least("backoff_max_s", self.backoff_first_s, "backoff_first_s")

    @property
    def loss_report_s(self) -> float:
        """At most so long after a producer fell silent its loads are reported failed."""
        return (self.renew_misses_max + 1) * self.renew_interval_s + self.fence_silent_s

    def _at_least(self, key: str, least: float, named: str) -> None:
        if getattr(self, key) < least:
            raise ConfigurationError(key, getattr(self, key), f"at least {named} = {least:g}")
