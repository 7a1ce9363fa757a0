"""A made-up result of a serving benchmark whose figures can be worked out by hand."""

from collections.abc import Sequence

from kvflow.bench.report_data import Point, RequestRecord, Result, SetUp

NAMES = {
    "kvflow-push": ("kvflow push", "kvflow"),
    "upstream-push": ("upstream push", "upstream"),
    "upstream-pull": ("upstream pull", "upstream"),
}


def request(number: int, ttft_ms: float | None, **others: object) -> RequestRecord:
    """An answered request; its TPOT is a tenth of its TTFT, its hand-over a half."""
    known = {} if ttft_ms is None else {"tpot_ms": ttft_ms / 10, "handover_ms": ttft_ms / 2}
    return RequestRecord(
        number=number,
        name=f"bench-{number}",
        arrival_s=0.0,
        late_ms=0.0,
        prompt_tokens=512,
        output_tokens=16,
        ttft_ms=ttft_ms,
        **{**known, **others},  # type: ignore[arg-type]
    )


def point(
    connector: str,
    dispatch: str,
    ttft_ms: Sequence[float],
    *,
    round: int = 1,
    rate: float = 2.0,
    length: int = 512,
    requests: Sequence[RequestRecord] | None = None,
) -> Point:
    """A point whose requests have these times; each engine used 0.1 s for each of them."""
    name, origin = NAMES[connector]
    if requests is None:
        requests = [request(number, time) for number, time in enumerate(ttft_ms, start=1)]
    return Point(
        connector=connector,
        name=name,
        origin=origin,
        dispatch=dispatch,
        round=round,
        rate=rate,
        length=length,
        window_s=10.0,
        producer_cpu_s=0.1 * len(requests),
        consumer_cpu_s=0.1 * len(requests),
        others_cpu_s=5.0,
        kv_bytes=8_388_608.0,
        kv_descriptors=64.0,
        consumer_computed_tokens=0,
        requests=tuple(requests),
    )


POINTS = (
    point("kvflow-push", "concurrent", [10, 20, 30, 40, 50]),
    point("upstream-push", "sequential", [40, 40, 40]),
    point("upstream-push", "concurrent", [60, 60, 60]),
    point("upstream-pull", "sequential", [120, 120, 120]),
    point("kvflow-push", "concurrent", [100, 100, 100], round=2),
    point("upstream-push", "sequential", [50, 50, 50], round=2),
    point("upstream-push", "concurrent", [500, 500, 500], round=2),
    point("upstream-pull", "sequential", [200, 200, 200], round=2),
)
"""Two rounds, one rate, one length. kvflow's median TTFT: 30 and 100."""


def result(points: Sequence[Point] = POINTS, problems: Sequence[str] = ()) -> Result:
    return Result(
        date="2026-01-02T03:04:05+00:00",
        wall_s=90.0,
        machine={"cores": 2},
        versions={"kvflow": "0"},
        options={"seed": 1},
        set_ups=(
            SetUp(
                connector="upstream-pull",
                name="upstream pull",
                round=1,
                transfer_config={"kv_connector": "NixlConnector", "kv_role": "kv_producer"},
                asked=("no-progress-thread", "no-pinning"),
                steps={
                    "producer": ("no-progress-thread", "no-pinning"),
                    "consumer": ("no-pinning",),
                },
                arguments=("--max-num-batched-tokens", "512"),
                ready_s=30.0,
            ),
        ),
        points=tuple(points),
        left_out=("kvflow pull: this version has no setting `mode`; left out",),
        problems=tuple(problems),
    )
