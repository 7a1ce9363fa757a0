"""What the measurements mean. Times of a shared machine say little: the bounds are wide."""

from collections.abc import Iterator

from kvflow.core import Timings
from kvflow.doctor.checks.rdma import in_bytes
from kvflow.doctor.facts import Measured, Nixl
from kvflow.doctor.findings import Finding, note, ok, warning

_SCATTERED_RATIO_MIN = 0.25
_ROUND_TRIP_MAX_S = 0.005


def check(nixl: Nixl) -> Iterator[Finding]:
    """Each pair that was measured."""
    pairs = (("within this machine", nixl.here), ("without shared memory", nixl.elsewhere))
    for where, pair in pairs:
        if pair is not None and pair.measured is not None:
            yield _large(where, pair.measured)
            yield _scattered(where, pair.measured)
            yield _round_trips(where, pair.measured)


def _large(where: str, measured: Measured) -> Finding:
    slice_max_s = Timings().slice_max_s
    found = (
        f"{where.capitalize()}: {in_bytes(measured.bytes)} in large runs at "
        f"{_speed(measured, measured.large_s)}, {measured.copy_s / measured.large_s:.0%} of a "
        f"memory copy's {_speed(measured, measured.copy_s)}; the slowest slice of "
        f"{in_bytes(measured.slice_bytes)} took {_ms(measured.slice_s)}."
    )
    if measured.slice_s > slice_max_s / 2:
        return warning(
            found,
            f"kvflow takes it that a slice has ended after slice_max_s ({slice_max_s:g} s), and "
            "lets blocks be used again on that ground; this is too near.",
            f'A smaller "post_bytes_max" ({measured.slice_bytes} by default), or a larger '
            '"slice_max_s" with "fence_s" to fit.',
        )
    return ok(found, f"A slice has to end within slice_max_s ({slice_max_s:g} s).")


def _scattered(where: str, measured: Measured) -> Finding:
    ratio = measured.large_s / measured.scattered_s
    found = (
        f"{where.capitalize()}: the same in runs of {in_bytes(measured.run_bytes)}, scattered, at "
        f"{_speed(measured, measured.scattered_s)}, {ratio:.0%} of large runs."
    )
    if ratio < _SCATTERED_RATIO_MIN:
        return note(
            found,
            "Each run costs this transport dearly, and how KV lies decides how long runs are.",
            "kvflow plan shows the runs of a pair; larger blocks (--block-size) and "
            '"cache_layout": "LBHNC" make them longer.',
        )
    return ok(found, "That is what short runs cost.")


def _round_trips(where: str, measured: Measured) -> Finding:
    median, worst = measured.round_trip_s
    found = (
        f"{where.capitalize()}: a notification and its answer take {_ms(median)} at the median, "
        f"{_ms(worst)} at the 99th percentile, of {measured.round_trips}."
    )
    if median > _ROUND_TRIP_MAX_S:
        return warning(
            found,
            "A load waits for two or three of them before its first byte; the processors are "
            "probably busy, or the network is slow.",
            "See that engines have processors to themselves (no pinning of two to one core), and "
            "measure again when the machine is quiet.",
        )
    return ok(found, "A load waits for two or three of them before its first byte.")


def _speed(measured: Measured, seconds: float) -> str:
    return f"{measured.bytes / seconds / 1e9:.1f} GB/s"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
