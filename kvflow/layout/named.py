"""Layouts that vLLM's kernels use, by name: the planes of one block, and how layers lie together.

A name such as "LBNHC" lists the axes from the outermost to the innermost: L layer, B block, N
token, H head, C the bytes of one token and head (its key and its value, or its latent). "NHD" and
"HND" are vLLM's own names of two of them. On CPUs a head's keys and values lie apart, and its keys
are laid for the instruction set that reads them.
"""

from dataclasses import dataclass

from kvflow.layout.region import Plane

ORDERS = {
    "NHD": "LBNHC",
    "HND": "LBHNC",
    "LBNHC": "LBNHC",
    "LBHNC": "LBHNC",
    "BLNHC": "BLNHC",
    "BLHNC": "BLHNC",
    "LHBNC": "LHBNC",
    "BHLNC": "BHLNC",
}
"""Axis orders by name."""
_AMX_TILE = 16
"""Tokens of a tile of keys, elements of a row of values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Strides:
    """Bytes from one step of each axis to the next, and of everything together."""

    layer: int
    block: int
    token: int
    head: int
    total: int


def strides(order: str, *, layers: int, blocks: int, tokens: int, heads: int, cell: int) -> Strides:
    """Dense strides of an axis order; `cell` bytes per token and head."""
    extents = {"L": layers, "B": blocks, "N": tokens, "H": heads, "C": 1}
    size = cell
    step: dict[str, int] = {}
    for axis in reversed(order):
        step[axis] = size
        size *= extents[axis]
    return Strides(layer=step["L"], block=step["B"], token=step["N"], head=step["H"], total=size)


def cell_plane(name: str, cell_bytes: int, step: Strides) -> Plane:
    """All that is kept of a token and head, together."""
    return Plane(
        name=name,
        offset=0,
        head_stride=step.head,
        rows=1,
        row_stride=cell_bytes,
        token_stride=step.token,
        cell_bytes=cell_bytes,
    )


def vec_planes(tokens: int, head_size: int, element_bytes: int) -> tuple[Plane, ...]:
    """CPU, vector instructions: per head the keys, one row per element; then the values."""
    half = tokens * head_size * element_bytes
    row = tokens * element_bytes
    return (
        Plane(
            name="k",
            offset=0,
            head_stride=2 * half,
            rows=head_size,
            row_stride=row,
            token_stride=element_bytes,
            cell_bytes=element_bytes,
        ),
        Plane(
            name="v",
            offset=half,
            head_stride=2 * half,
            rows=1,
            row_stride=half,
            token_stride=head_size * element_bytes,
            cell_bytes=head_size * element_bytes,
        ),
    )


def amx_planes(tokens: int, head_size: int, element_bytes: int) -> tuple[Plane, ...]:
    """CPU, AMX: per head the keys in tiles of 16 tokens; the values in rows, tokens in pairs."""
    half = tokens * head_size * element_bytes
    cell = _AMX_TILE * element_bytes
    return (
        Plane(
            name="k",
            offset=0,
            head_stride=2 * half,
            rows=1,
            row_stride=half,
            token_stride=head_size * element_bytes,
            cell_bytes=head_size * element_bytes,
            tile=_AMX_TILE,
        ),
        Plane(
            name="v",
            offset=half,
            head_stride=2 * half,
            rows=head_size // _AMX_TILE,
            row_stride=tokens * cell,
            token_stride=cell,
            cell_bytes=cell,
            tile=2,
        ),
    )
