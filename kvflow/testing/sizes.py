"""How large the prompts of modelled engines are: the same for all who ask, by transfer id."""

import zlib

from kvflow.ids import TransferId

GROUPS = 2
BLOCK_TOKENS = 16


def blocks_of(transfer_id: TransferId) -> tuple[int, ...]:
    """How many blocks per group the prompt of this transfer has."""
    seed = zlib.crc32(transfer_id.encode())
    return (2 + seed % 7, 1 + seed // 7 % 3)


def tokens_of(transfer_id: TransferId) -> int:
    return BLOCK_TOKENS * blocks_of(transfer_id)[0]


def complete_blocks(transfer_id: TransferId, tokens: int) -> tuple[int, ...]:
    """How many blocks per group are complete with so many tokens; all of them at the end.

    A group's blocks hold as many tokens as its share of the prompt makes them.
    """
    total = tokens_of(transfer_id)
    return tuple(min(tokens, total) * count // total for count in blocks_of(transfer_id))
