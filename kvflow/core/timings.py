"""Every duration and limit that the machines use, with its unit in its name."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Timings:
    """How long what may last. All in seconds, except counts.

    lease_s            an unclaimed prefill is kept, and a registration is good, so long without
                       a renewal.
    hold_max_s         a registration without a prefill ends then, however often renewed.
    prefill_max_s      a prefill that vLLM neither finished nor aborted by then is given up.
    load_deadline_s    bound on a whole load, from allocation to the last byte.
    meet_deadline_s    bound on meeting the producer of a load.
    register_resend_s  an unanswered registration is sent again after this.
    cancel_resend_s    an unanswered cancel is sent again after this.
    cancel_deadline_s  a cancel unanswered for so long makes the silent peer a lost one.
    fence_s            after a peer was torn down, blocks it might write are kept so long.
    renew_interval_s   time between two renewals to one peer.
    renew_misses_max   a peer silent for so many intervals, while something is awaited, is lost.
    backoff_first_s, backoff_max_s
                       wait before a failed meeting is tried again; doubles from first to max.
    drain_s            at shutdown, writes under way may go on so long.
    write_drain_s      a write that must stop and does not is torn down after this.
    tombstone_s        ended transfers are remembered so long, to answer late messages.
    peer_idle_s        a consumer that asked for nothing is forgotten after this.
    """

    lease_s: float = 30.0
    hold_max_s: float = 120.0
    prefill_max_s: float = 600.0
    load_deadline_s: float = 300.0
    meet_deadline_s: float = 5.0
    register_resend_s: float = 0.25
    cancel_resend_s: float = 0.25
    cancel_deadline_s: float = 3.0
    fence_s: float = 1.0
    renew_interval_s: float = 1.0
    renew_misses_max: int = 4
    backoff_first_s: float = 0.2
    backoff_max_s: float = 5.0
    drain_s: float = 5.0
    write_drain_s: float = 5.0
    tombstone_s: float = 60.0
    peer_idle_s: float = 600.0
