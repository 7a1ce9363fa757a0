"""Who may touch which block: the safety argument, kept beside the machines and asserted twice.

Invariants (specs/invariants.md):

S1  a block is the destination of at most one live load.
S2  a destination block is not given back while a producer might still write it, or a READ of ours.
S3  a source block is not given back while one of our writes may still read it.
S4  a write is posted only from blocks that are pinned, or lent by a running request; one at a time.
S5  each request is reported at most once per direction.
S8  what was read counts only once its producer has said, after the READ had ended, that it held it.

A violation is a bug of ours and raises `LocalProtocolError`: better one failed request and a loud
log than another user's KV. The ledger decides nothing; it is told and it objects.
"""

from kvflow.core.notices import Blocks
from kvflow.errors import LocalProtocolError
from kvflow.ids import PartId, Rank, RequestId

Block = tuple[int, int]
"""(cache group, block id)."""


class Ledger:
    """One worker's books."""

    def __init__(self) -> None:
        self._owners: dict[int, dict[int, RequestId]] = {}
        self._reserved: dict[RequestId, Blocks] = {}
        self._lent: set[RequestId] = set()
        self._pinned: dict[RequestId, set[PartId]] = {}
        self._writes: dict[PartId, tuple[int, RequestId]] = {}
        self._reads: set[tuple[RequestId, Rank]] = set()

    @property
    def empty(self) -> bool:
        """Whether nothing is reserved, lent, pinned, being written or being read."""
        books = (self._reserved, self._reads, self._lent, self._pinned, self._writes)
        return not (any(self._owners.values()) or any(books))

    # -- consumer --------------------------------------------------------------------------------

    def reserve(self, request: RequestId, blocks: Blocks) -> None:
        """S1: the blocks of a load that starts."""
        if request in self._reserved:
            raise LocalProtocolError(f"S1: {request} has a load already")
        for group, ids in enumerate(blocks):
            owners = self._owners.setdefault(group, {})
            for block in ids:
                if block in owners:
                    owned = f"block {(group, block)} of {request} is {owners[block]}'s"
                    raise LocalProtocolError(f"S1: {owned}")
        for group, ids in enumerate(blocks):
            self._owners[group].update(dict.fromkeys(ids, request))
        self._reserved[request] = blocks

    def give_back(self, request: RequestId, writers: frozenset[object]) -> None:
        """S2, S5: the load ended; `writers` are the ranks that might still write: none."""
        if writers:
            raise LocalProtocolError(f"S2: {request} given back while {set(writers)} may write")
        if any(reader == request for reader, _ in self._reads):
            raise LocalProtocolError(f"S2: {request} given back while it reads")
        if request not in self._reserved:
            raise LocalProtocolError(f"S5: {request} given back twice")
        for group, ids in enumerate(self._reserved.pop(request)):
            for block in ids:
                del self._owners[group][block]

    def holds(self, request: RequestId) -> bool:
        """Whether this request's destination blocks are reserved."""
        return request in self._reserved

    def open_read(self, request: RequestId, rank: Rank) -> None:
        """S2: a READ begins to fill this load's blocks; one at a time from each rank."""
        if request not in self._reserved:
            raise LocalProtocolError(f"S2: read into blocks that {request} does not have")
        if self.is_reading(request, rank):
            raise LocalProtocolError(f"S2: {request} reads from {rank} already")
        self._reads.add((request, rank))

    def close_read(self, request: RequestId, rank: Rank) -> None:
        """The read's last handle has ended."""
        if not self.is_reading(request, rank):
            raise LocalProtocolError(f"S2: {request} does not read from {rank}")
        self._reads.discard((request, rank))

    def is_reading(self, request: RequestId, rank: Rank) -> bool:
        """Whether a READ of this load from this rank has not ended."""
        return (request, rank) in self._reads

    def claim_fetched(self, request: RequestId, rank: Rank) -> None:
        """S8: the producer will be asked whether it has held what was read, so the READ is over."""
        if self.is_reading(request, rank):
            raise LocalProtocolError(f"S8: {request} counts what it still reads from {rank}")

    # -- producer --------------------------------------------------------------------------------

    def lend(self, request: RequestId) -> None:
        """A running request's blocks may be read from, until it says `withdraw`, or is pinned."""
        self._lent.add(request)

    def withdraw(self, request: RequestId) -> None:
        """vLLM takes a running request's blocks: nothing more is posted from them.

        Whoever reuses them waits until `reads` is false.
        """
        self._lent.discard(request)

    def reads(self, request: RequestId) -> bool:
        """S3: whether one of our writes may still read this request's blocks."""
        return any(of == request for _, of in self._writes.values())

    def pin(self, request: RequestId, part: PartId) -> None:
        """S3: vLLM keeps this prefill's blocks until each part has unpinned them."""
        self._lent.discard(request)
        parts = self._pinned.setdefault(request, set())
        if part in parts:
            raise LocalProtocolError(f"S3: {request} is pinned already by {part}")
        parts.add(part)

    def open_write(self, part: PartId, attempt: int, request: RequestId) -> None:
        """S4: a write begins to read this prefill's blocks."""
        if request not in self._lent and part not in self._pinned.get(request, ()):
            raise LocalProtocolError(f"S4: write of {part} from unpinned {request}")
        if part in self._writes:
            raise LocalProtocolError(f"S4: {part} is being written already")
        self._writes[part] = (attempt, request)

    def close_write(self, part: PartId) -> None:
        """The write's last handle has ended."""
        if self._writes.pop(part, None) is None:
            raise LocalProtocolError(f"S4: {part} is not being written")

    def is_open(self, part: PartId, attempt: int) -> bool:
        """Whether this very write may read now."""
        return self._writes.get(part, (None, None))[0] == attempt

    def unpin(self, request: RequestId, part: PartId) -> bool:
        """S3, S5: this part reads the prefill's blocks no more. True: vLLM may free them."""
        _, read = self._writes.get(part, (None, None))
        if read == request:
            raise LocalProtocolError(f"S3: {request} unpinned while being written to {part}")
        parts = self._pinned.get(request, set())
        if part not in parts:
            raise LocalProtocolError(f"S5: {request} unpinned twice by {part}")
        parts.discard(part)
        if not parts:
            del self._pinned[request]
        return not parts
