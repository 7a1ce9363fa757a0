"""Why a transfer ended without its KV, and where a registration stands: closed vocabularies.

Both travel on the wire by value; an unknown value from a peer is a `RemoteProtocolError`.
"""

import enum


class Reason(enum.StrEnum):
    """Why a transfer failed."""

    ABORTED = "aborted"
    AMBIGUOUS = "ambiguous"
    CANCELLED = "cancelled"
    CAPACITY = "capacity"
    DEADLINE = "deadline"
    EXPIRED = "expired"
    FORGOTTEN = "forgotten"
    INCOMPATIBLE = "incompatible"
    MISMATCH = "mismatch"
    PARAMETERS = "parameters"
    PEER_LOST = "peer_lost"
    READ_FAILED = "read_failed"
    RELEASED = "released"
    SHUTDOWN = "shutdown"
    STALE = "stale"
    SUPERSEDED = "superseded"
    TOO_LONG = "too_long"
    UNREACHABLE = "unreachable"
    WRITE_FAILED = "write_failed"


REASONS: dict[Reason, str] = {
    Reason.ABORTED: "the request was aborted in its own engine",
    Reason.AMBIGUOUS: "two requests claim the same transfer id, and neither can be preferred",
    Reason.CANCELLED: "the consumer, or a router on its behalf, gave the transfer up",
    Reason.CAPACITY: "the producer keeps as many registrations for unknown ids as it may",
    Reason.DEADLINE: "the consumer's deadline for the whole load passed",
    Reason.EXPIRED: "a lease ended: nobody claimed the prefill, or nobody renewed the registration",
    Reason.FORGOTTEN: "the producer knows nothing (any more) of a registration it once accepted",
    Reason.INCOMPATIBLE: "the two engines cannot exchange KV; the log names the field",
    Reason.MISMATCH: "the registration asks for blocks that this prefill does not have",
    Reason.PARAMETERS: "kv_transfer_params lack a key or have a bad one; the log names it",
    Reason.PEER_LOST: "the peer stopped answering",
    Reason.READ_FAILED: "the transfer library reported an error for a READ",
    Reason.RELEASED: "nothing had to be moved; the producer was told so",
    Reason.SHUTDOWN: "the engine is shutting down",
    Reason.STALE: "the registration is older than one that was already settled",
    Reason.SUPERSEDED: "a newer attempt of the same transfer arrived while this one was writing",
    Reason.TOO_LONG: "the prompt is longer than the producer's engine takes",
    Reason.UNREACHABLE: "the producer's side channel could not be reached in time",
    Reason.WRITE_FAILED: "the transfer library reported an error for a WRITE",
}


class Standing(enum.StrEnum):
    """Where the producer says a registration stands."""

    WAITING = "waiting"
    TRANSFERRING = "transferring"
    READABLE = "readable"
    STOPPING = "stopping"
    DONE = "done"
    FAILED = "failed"
    UNKNOWN = "unknown"
