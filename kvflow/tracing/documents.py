"""An analysis as JSON: what `kvflow trace summary --json` prints."""

import json

from kvflow.tracing.figures import (
    Analysis,
    Spread,
    endings,
    time_in_states,
    unfinished,
    where_time_went,
)
from kvflow.tracing.transfers import Transfer
from kvflow.tracing.waterfall import Waterfall


def ms(us: int) -> float:
    """Milliseconds; of whole microseconds exactly as many digits as there are."""
    return us / 1000


def summary_as_json(analysis: Analysis, shown: list[Waterfall]) -> str:
    """Everything that the summary tells, for scripts; `requests` are those `shown`, in order."""
    clocks = analysis.clocks
    return json.dumps(
        {
            "version": 1,
            "files": [str(file.path) for file in analysis.traces.files],
            "lines": sum(len(file.lines) for file in analysis.traces.files),
            "notes": analysis.notes(),
            "clocks": [
                {
                    "engine": offset.engine,
                    "reference": offset.reference,
                    "ahead_ms": ms(offset.ahead_us),
                    "uncertainty_ms": ms(offset.uncertainty_us),
                    "exchanges": offset.exchanges,
                    "contradicts_ms": ms(offset.contradicts_us),
                    "known": clocks.is_known(offset.engine),
                }
                for offset in clocks.offsets.values()
            ],
            "requests_of_all": len(analysis.waterfalls),
            "requests": [request_as_dict(fall) for fall in shown],
            "where_time_went": [_spread(each) for each in where_time_went(analysis.waterfalls)],
            "states": [
                {"machine": each.machine, **_spread(each.spread, "state")}
                for each in time_in_states(analysis.traces)
            ],
            "endings": [
                {"machine": machine, "state": state, "reason": reason or None, "count": count}
                for (machine, state, reason), count in sorted(endings(analysis.traces).items())
            ],
            "unfinished": [
                {
                    "id": each.line.id,
                    "engine": each.line.engine,
                    "rank": each.line.rank,
                    "machine": each.line.machine,
                    "state": each.line.dest,
                    "since": each.since / 1e6,
                    "for_ms": each.for_ms,
                    "awaits": each.awaits,
                }
                for each in unfinished(analysis)
            ],
        },
        indent=2,
    )


def request_as_dict(fall: Waterfall) -> dict[str, object]:
    """One request with its segments."""
    request = fall.request
    return {
        "transfer": request.transfer.id,
        "request": request.request_id,
        "consumer": request.consumer,
        "producers": request.producers,
        "attempts": request.attempts,
        "outcome": fall.outcome.value,
        "reason": fall.reason or None,
        "start": fall.start / 1e6,
        "span_ms": ms(fall.span_us),
        "segments": [
            {
                "part": segment.part.value,
                "at_ms": ms(segment.begin - fall.start),
                "ms": ms(segment.us),
            }
            for segment in fall.segments
        ],
    }


def transfer_as_json(transfer: Transfer, falls: list[Waterfall]) -> str:
    """One transfer's time line, for scripts."""
    return json.dumps(
        {
            "version": 1,
            "transfer": transfer.id,
            "start": transfer.start / 1e6,
            "requests": [request_as_dict(fall) for fall in falls],
            "events": [
                {
                    "at_ms": ms(event.at - transfer.start),
                    "engine": event.line.engine,
                    "rank": event.line.rank,
                    "machine": event.line.machine,
                    "attempt": event.line.attempt,
                    "request": event.line.request,
                    "trigger": event.line.trigger,
                    "from": event.line.source,
                    "to": event.line.dest,
                    "reason": event.line.reason,
                    "detail": event.line.detail,
                }
                for event in transfer.events
            ],
        },
        indent=2,
    )


def _spread(spread: Spread, name: str = "part") -> dict[str, object]:
    return {
        name: spread.name,
        "count": spread.count,
        "mean_ms": round(spread.mean_ms, 3),
        "p50_ms": round(spread.p50_ms, 3),
        "p90_ms": round(spread.p90_ms, 3),
        "p99_ms": round(spread.p99_ms, 3),
        "max_ms": round(spread.max_ms, 3),
        **({"share": round(spread.share, 6)} if name == "part" else {}),
    }
