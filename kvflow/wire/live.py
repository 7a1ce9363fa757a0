"""What a side channel and its workers' windows say of live transfers, with its limits.

The same encoding, framing and seal as the side channel's other messages. Names that came from
outside are shown as they are, cut to `NAME_CHARS_MAX`; who prints them makes them printable.
"""

from typing import Annotated

import msgspec

from kvflow.core.reasons import Reason
from kvflow.core.waiting import Whom
from kvflow.wire.messages import NAME_CHARS_MAX, RANKS_MAX, Count, Message, Name, Text

ROWS_MAX = 1000
"""Transfers, and peers, in one reply."""
MATCHES_MAX = 16
RECORDS_MAX = 64
HISTORY_MAX = 32
FACTS_MAX = 64
STATES_MAX = 256

Shown = Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]
"""Whatever vLLM, a router or a peer has given as a name."""
RankIndex = Annotated[int, msgspec.Meta(ge=0, lt=RANKS_MAX)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65_535)]
Ms = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
SignedMs = Annotated[float, msgspec.Meta(ge=-1e15, le=1e15)]
Total = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
AttemptOrNone = Annotated[int, msgspec.Meta(ge=0, lt=2**53)]
Machine = Annotated[str, msgspec.Meta(pattern=r"\A(producer|consumer|peer)\Z")]
Role = Annotated[str, msgspec.Meta(pattern=r"\Akv_(producer|consumer|both)\Z")]


class Row(Message, frozen=True, kw_only=True, array_like=True):
    """Travels as an array, since it comes many times."""


class WindowsRequest(Message, frozen=True, tag="show_windows"):
    """Side channel: where do your workers show their live transfers?"""


class Window(Row, frozen=True, kw_only=True, array_like=True):
    """Where one worker does."""

    pp_rank: RankIndex
    tp_rank: RankIndex
    host: Name
    port: Port


class Windows(Message, frozen=True, tag="windows"):
    """Side channel: an engine, and the windows of all its workers."""

    engine_id: Name
    role: Role
    windows: Annotated[tuple[Window, ...], msgspec.Meta(max_length=RANKS_MAX)]


class LiveRequest(Message, frozen=True, tag="show_live"):
    """Window: what is live? At most `limit` transfers are told one by one."""

    limit: Annotated[int, msgspec.Meta(ge=0, le=ROWS_MAX)]


class Population(Row, frozen=True, kw_only=True, array_like=True):
    """How many records of a machine are in a state."""

    machine: Machine
    state: Name
    count: Count


class TransferRow(Row, frozen=True, kw_only=True, array_like=True):
    """One record of a transfer.

    part      which of a producer's parts it is.
    attempt   0 when there is no registration.
    peer      the consumer's worker, or the producer's side channel; "" when not known.
    bytes     moved so far by this worker, also by what has not ended.
    """

    machine: Machine
    transfer_id: Shown
    part: Annotated[int, msgspec.Meta(ge=0, le=RANKS_MAX)]
    request_id: Shown
    state: Name
    in_state_ms: Ms
    total_ms: Ms
    attempt: AttemptOrNone
    peer: Shown
    bytes: Total
    reason: Reason | None
    waits_on: Whom
    waits_for: Text


class PeerRow(Row, frozen=True, kw_only=True, array_like=True):
    """One peer. `using`: live transfers that depend on it."""

    key: Shown
    engine_id: Shown
    state: Name
    in_state_ms: Ms
    silent_ms: Ms | None
    using: Count
    waiting: Count
    waits_for: Text
    detail: Text


class Live(Message, frozen=True, tag="live"):
    """Window: counts of all records by state, and the longest in their state one by one."""

    pp_rank: RankIndex
    tp_rank: RankIndex
    population: Annotated[tuple[Population, ...], msgspec.Meta(max_length=STATES_MAX)]
    live: Count
    transfers: Annotated[tuple[TransferRow, ...], msgspec.Meta(max_length=ROWS_MAX)]
    peers_known: Count
    peers: Annotated[tuple[PeerRow, ...], msgspec.Meta(max_length=ROWS_MAX)]


class InspectRequest(Message, frozen=True, tag="inspect"):
    """Window: tell everything of one transfer, by its id, a request's id, or how one begins."""

    name: Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_CHARS_MAX)]


class Deadline(Row, frozen=True, kw_only=True, array_like=True):
    """What happens when. `dest`: the state that it leads to, "" for the same."""

    what: Name
    in_ms: SignedMs
    dest: Shown
    why: Text


class RankRow(Row, frozen=True, kw_only=True, array_like=True):
    """One producer rank of a load, and what is to come from it ("" for nothing)."""

    pp_rank: RankIndex
    tp_rank: RankIndex
    agent: Shown
    awaits: Text
    outcome: Shown
    misses: Count


class Move(Row, frozen=True, kw_only=True, array_like=True):
    """One row that the record took."""

    ago_ms: Ms
    attempt: AttemptOrNone
    trigger: Name
    source: Name
    dest: Name
    reason: Reason | None
    detail: Text


class Record(Message, frozen=True):
    """Everything of one record of a transfer."""

    row: TransferRow
    spent_ms: Annotated[tuple[tuple[Name, Ms], ...], msgspec.Meta(max_length=STATES_MAX)]
    deadlines: Annotated[tuple[Deadline, ...], msgspec.Meta(max_length=STATES_MAX)]
    ranks: Annotated[tuple[RankRow, ...], msgspec.Meta(max_length=RANKS_MAX)]
    facts: Annotated[tuple[tuple[Name, Text], ...], msgspec.Meta(max_length=FACTS_MAX)]
    history: Annotated[tuple[Move, ...], msgspec.Meta(max_length=HISTORY_MAX)]
    peer: PeerRow | None
    detail: Text


class Inspected(Message, frozen=True, tag="inspected"):
    """Window: the transfers that are so called, and the records of the only one.

    exact    the name is a transfer's or a request's whole id.
    matched  how many transfers are so called; `transfers` names some of them.
    """

    pp_rank: RankIndex
    tp_rank: RankIndex
    exact: bool
    matched: Count
    transfers: Annotated[tuple[Shown, ...], msgspec.Meta(max_length=MATCHES_MAX)]
    records: Annotated[tuple[Record, ...], msgspec.Meta(max_length=RECORDS_MAX)]
