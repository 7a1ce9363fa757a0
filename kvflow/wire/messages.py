"""Every message as it travels, with its limits. Twins of `kvflow.core.notices`, plus coordinates.

A frame is one version byte followed by msgpack. What does not fit a type or a limit here is a
`RemoteProtocolError` for the receiver, and changes nothing.
"""

from typing import Annotated, ClassVar

import msgspec

from kvflow.core import notices
from kvflow.core.reasons import Reason, Standing
from kvflow.ids import NO_DIGEST, TRANSFER_ID_CHARS_MAX, PromptDigest

PROTOCOL_VERSION = 4
FRAME_BYTES_MAX = 16 * 2**20
"""A registration of 1 M tokens in blocks of 16 is under 400 kB; so is a large region table."""
NOTICES_PER_FRAME_MAX = 4096
RENEWALS_PER_NOTICE_MAX = 65536
BLOCKS_PER_GROUP_MAX = 2**20
GROUPS_MAX = 64
REGIONS_MAX = 4096
PLANES_MAX = 8
RANKS_MAX = 1024
AGENT_METADATA_BYTES_MAX = 8 * 2**20
NAME_CHARS_MAX = 512
PROMPT_DIGEST_BYTES_MAX = 64

TransferIdText = Annotated[
    str,
    msgspec.Meta(min_length=1, max_length=TRANSFER_ID_CHARS_MAX, pattern=r"\A[!-~]+\Z"),
]
Attempt = Annotated[int, msgspec.Meta(ge=1, lt=2**53)]
BlockId = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Count = Annotated[int, msgspec.Meta(ge=0, lt=2**31)]
Seconds = Annotated[float, msgspec.Meta(gt=0, le=86_400)]
SecondsOrNone = Annotated[float, msgspec.Meta(ge=0, le=86_400)]
Clock = Annotated[float, msgspec.Meta(ge=0, le=1e12)]
"""A reading of a worker's monotonic clock, in seconds."""
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=NAME_CHARS_MAX)]
Text = Annotated[str, msgspec.Meta(max_length=4096)]
Bytes = Annotated[int, msgspec.Meta(gt=0, lt=2**62)]
Offset = Annotated[int, msgspec.Meta(ge=0, lt=2**62)]
Some = Annotated[int, msgspec.Meta(gt=0, lt=2**31)]
BlockIds = Annotated[tuple[BlockId, ...], msgspec.Meta(max_length=BLOCKS_PER_GROUP_MAX)]


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Unknown fields are refused: the version byte says what a peer may send."""


class Register(Message, frozen=True, tag="register"):
    core: ClassVar = notices.Register
    transfer_id: TransferIdText
    attempt: Attempt
    blocks: Annotated[tuple[BlockIds, ...], msgspec.Meta(max_length=GROUPS_MAX)]
    starts: Annotated[tuple[Count, ...], msgspec.Meta(max_length=GROUPS_MAX)]
    tokens: Count
    lease_s: Seconds
    write_until_s: Clock | None
    keep: bool = False
    prefill: Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)] = ""
    reads: bool = False


class Accepted(Message, frozen=True, tag="accepted"):
    core: ClassVar = notices.Accepted
    transfer_id: TransferIdText
    attempt: Attempt
    standing: Standing
    clock_s: Clock


class Readable(Message, frozen=True, tag="readable"):
    core: ClassVar = notices.Readable
    transfer_id: TransferIdText
    attempt: Attempt
    blocks: Annotated[tuple[BlockIds, ...], msgspec.Meta(max_length=GROUPS_MAX)]
    tokens: Count
    prefill: Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)]


class Fetched(Message, frozen=True, tag="fetched"):
    core: ClassVar = notices.Fetched
    transfer_id: TransferIdText
    attempt: Attempt


class Done(Message, frozen=True, tag="done"):
    core: ClassVar = notices.Done
    transfer_id: TransferIdText
    attempt: Attempt
    prefill: Annotated[str, msgspec.Meta(max_length=NAME_CHARS_MAX)] = ""
    prompt: Annotated[PromptDigest, msgspec.Meta(max_length=PROMPT_DIGEST_BYTES_MAX)] = NO_DIGEST
    kept_s: SecondsOrNone = 0.0


class Failed(Message, frozen=True, tag="failed"):
    core: ClassVar = notices.Failed
    transfer_id: TransferIdText
    attempt: Attempt
    reason: Reason


class Cancel(Message, frozen=True, tag="cancel"):
    core: ClassVar = notices.Cancel
    transfer_id: TransferIdText
    attempt: Attempt


class Renew(Message, frozen=True, tag="renew"):
    core: ClassVar = notices.Renew
    wanted: Annotated[
        tuple[tuple[TransferIdText, Attempt], ...],
        msgspec.Meta(max_length=RENEWALS_PER_NOTICE_MAX),
    ]
    write_until_s: Clock | None


class Alive(Message, frozen=True, tag="alive"):
    core: ClassVar = notices.Alive
    standings: Annotated[
        tuple[tuple[TransferIdText, Attempt, Standing, Reason | None], ...],
        msgspec.Meta(max_length=RENEWALS_PER_NOTICE_MAX),
    ]
    clock_s: Clock


class Probe(Message, frozen=True, tag="probe"):
    core: ClassVar = notices.Probe


NOTICES = (Register, Accepted, Readable, Fetched, Done, Failed, Cancel, Renew, Alive, Probe)
AnyNotice = (
    Register | Accepted | Readable | Fetched | Done | Failed | Cancel | Renew | Alive | Probe
)


class Plane(Message, frozen=True, kw_only=True, array_like=True):
    """`kvflow.layout.Plane` as it travels: an array, since it comes many times."""

    name: Name
    offset: Offset
    head_stride: Offset
    rows: Some
    row_stride: Offset
    token_stride: Offset
    cell_bytes: Bytes
    tile: Some = 1


class Region(Message, frozen=True, kw_only=True, array_like=True):
    """`kvflow.layout.Region` as it travels: an array, since it comes once per layer."""

    layer: Name
    group: Annotated[int, msgspec.Meta(ge=0, lt=GROUPS_MAX)]
    base: Bytes
    stride_bytes: Bytes
    block_bytes: Bytes
    blocks: Some
    tokens: Count
    subblocks: Some = 1
    heads: Some = 1
    head_first: Count = 0
    heads_total: Some = 1
    planes: Annotated[tuple[Plane, ...], msgspec.Meta(min_length=1, max_length=PLANES_MAX)]
    encoding: Name
    memory: Annotated[str, msgspec.Meta(pattern=r"\A(DRAM|VRAM)\Z")]
    device: Annotated[int, msgspec.Meta(ge=0, lt=2**15)]


class Facts(Message, frozen=True):
    """`kvflow.layout.Facts` as it travels."""

    model: Text
    kv_dtype: Name
    block_sizes: Annotated[tuple[Count, ...], msgspec.Meta(max_length=GROUPS_MAX)]
    group_kinds: Annotated[tuple[Name, ...], msgspec.Meta(max_length=GROUPS_MAX)]
    tp_size: Annotated[int, msgspec.Meta(ge=1, le=RANKS_MAX)]
    pp_size: Annotated[int, msgspec.Meta(ge=1, le=RANKS_MAX)]
    kv_layout: Text


class Hello(Message, frozen=True):
    """One worker's coordinates: what a peer needs to reach it and to plan for its memory."""

    agent: Name
    engine_id: Name
    incarnation: Name
    pp_rank: Annotated[int, msgspec.Meta(ge=0, lt=RANKS_MAX)]
    tp_rank: Annotated[int, msgspec.Meta(ge=0, lt=RANKS_MAX)]
    metadata: Annotated[bytes, msgspec.Meta(max_length=AGENT_METADATA_BYTES_MAX)]
    facts: Facts
    regions: Annotated[tuple[Region, ...], msgspec.Meta(max_length=REGIONS_MAX)]


class Frame(Message, frozen=True):
    """What one worker sends another in one notification."""

    notices: Annotated[tuple[AnyNotice, ...], msgspec.Meta(max_length=NOTICES_PER_FRAME_MAX)]
    hello: Hello | None = None


class MeetRequest(Message, frozen=True, tag="meet"):
    """Side channel, first and only request of a connection: who are you?"""

    engine_id: Name


class MeetReply(Message, frozen=True, tag="met"):
    """Side channel: an engine and all its worker ranks."""

    engine_id: Name
    incarnation: Name
    ranks: Annotated[tuple[Hello, ...], msgspec.Meta(max_length=RANKS_MAX)]


class ReleaseRequest(Message, frozen=True, tag="release"):
    """Side channel, of a router: nobody will fetch this transfer, let its blocks go."""

    transfer_id: TransferIdText


class Released(Message, frozen=True, tag="released"):
    """Side channel: the request was taken; the workers hear of it with their next step."""

    transfer_id: TransferIdText


class Refusal(Message, frozen=True, tag="refusal"):
    """Side channel: the request could not be answered, and why."""

    detail: Text
