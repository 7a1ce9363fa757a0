"""Every metric of kvflow: the one table from which they are made, documented and checked.

Rules: names, units and suffixes follow Prometheus; each metric has the labels of vLLM's own, then
`rank` ("pp0.tp0", or "scheduler" for what vLLM's scheduler sees), then its own.

The idea: a worker counts for itself, and each worker's series stay apart, so that nothing is added
up that should not be: with several ranks every one of them has a record of each request.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from kvflow.core import TABLES, Reason
from kvflow.core.tally import FATES
from kvflow.observe.schema import ORDERS

SCHEDULER = "scheduler"
NO_REASON = "none"
"""The reason of a transfer that ended as it should."""

ORDER_OUTCOMES = ("done", "stopped", "failed")
WHY_LOCAL = ("few_tokens", "load_failed", "preempted")

_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
_SHORT = (0.00005, 0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1)

_TRANSFERS = tuple(table for table in TABLES if table.terminal)
_MACHINES = tuple((table.name,) for table in _TRANSFERS)
_LIVE = tuple(
    (table.name, state)
    for table in _TRANSFERS
    for state in table.states
    if state not in table.terminal | {table.initial, "forgotten"}
)
_PEERS = tuple((state,) for state in TABLES[-1].states if state not in ("unmet", "forgotten"))
_ENDS = (
    ("producer", "sent", NO_REASON),
    ("consumer", "received", NO_REASON),
    ("consumer", "released", str(Reason.RELEASED)),
    *((table.name, "failed", str(reason)) for table in _TRANSFERS for reason in Reason),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One family of series.

    kind     "counter", "gauge" or "histogram".
    labels   of its own, in order.
    help     one line.
    buckets  upper bounds of a histogram, in its unit.
    known    label values that are there from the start, at 0; others come when they happen.
    scheduler
             whether it is counted by the scheduler half, not by each worker.
    """

    name: str
    kind: str
    labels: tuple[str, ...] = ()
    help: str
    buckets: tuple[float, ...] = ()
    known: tuple[tuple[str, ...], ...] = ((),)
    scheduler: bool = False


def _pairs(*values: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
    pairs: tuple[tuple[str, ...], ...] = ((),)
    for each in values:
        pairs = tuple((*pair, value) for pair in pairs for value in each)
    return pairs


METRICS: tuple[Metric, ...] = (
    # -- transfers -------------------------------------------------------------------------------
    Metric(name="kvflow_transfers_started_total", kind="counter", labels=("machine",),
           known=_MACHINES,
           help="Transfers that became live: started = ended + live."),
    Metric(name="kvflow_transfers_ended_total", kind="counter",
           labels=("machine", "outcome", "reason"), known=_ENDS,
           help="Transfers that ended, by the state they ended in and, without their KV, why."),
    Metric(name="kvflow_transfers_live", kind="gauge", labels=("machine", "state"), known=_LIVE,
           help="Transfers that are not over, by state."),
    Metric(name="kvflow_state_seconds", kind="histogram", labels=("machine", "state"),
           buckets=_SECONDS, known=_LIVE,
           help="Seconds that a transfer spent in a state, observed when it is over."),
    Metric(name="kvflow_transitions_total", kind="counter",
           labels=("machine", "trigger", "source", "dest"), known=(),
           help="Rows of the state tables that were taken."),
    # -- registrations ---------------------------------------------------------------------------
    Metric(name="kvflow_registrations_sent_total", kind="counter",
           help="Registrations that a consumer sent, one for each producer rank and attempt."),
    Metric(name="kvflow_registrations_resent_total", kind="counter",
           help="Registrations that a consumer sent once more, for want of an answer."),
    Metric(name="kvflow_registrations_received_total", kind="counter",
           help="Registrations that a producer received, repetitions left out."),
    Metric(name="kvflow_registrations_repeated_total", kind="counter",
           help="Registrations that a producer had received already."),
    Metric(name="kvflow_registrations_settled_total", kind="counter", labels=("fate",),
           known=tuple((fate,) for fate in FATES),
           help="Registrations received, by what became of them: matched, refused at once, or why "
                "their KV never began to move."),
    Metric(name="kvflow_renewals_missed_total", kind="counter",
           help="Renewals of a consumer that a producer rank did not answer before the next one."),
    # -- messages and peers ----------------------------------------------------------------------
    Metric(name="kvflow_messages_stale_total", kind="counter", labels=("machine",),
           known=_MACHINES,
           help="Messages about an attempt that was settled or replaced; they change nothing."),
    Metric(name="kvflow_messages_ignored_total", kind="counter", labels=("kind",), known=(),
           help="Messages and events about nothing that is on record, by kind."),
    Metric(name="kvflow_messages_refused_total", kind="counter", labels=("kind",),
           known=(("frame",), ("peer",)),
           help="Frames that could not be read, and peers that cannot be exchanged KV with."),
    Metric(name="kvflow_peers", kind="gauge", labels=("state",), known=_PEERS,
           help="Peers by state."),
    # -- moving KV -------------------------------------------------------------------------------
    Metric(name="kvflow_orders_total", kind="counter", labels=("direction", "outcome"),
           known=_pairs(ORDERS, ORDER_OUTCOMES),
           help="WRITEs and READs that ended; a streamed prompt takes several."),
    Metric(name="kvflow_order_seconds", kind="histogram", labels=("direction",),
           buckets=_SECONDS, known=_pairs(ORDERS),
           help="Seconds from a WRITE's or READ's order to the end of its last handle."),
    Metric(name="kvflow_plan_seconds", kind="histogram", labels=("direction",),
           buckets=_SHORT, known=_pairs(ORDERS),
           help="Seconds of planning of a WRITE or READ."),
    Metric(name="kvflow_bytes_total", kind="counter", labels=("direction",),
           known=_pairs(ORDERS),
           help="Bytes of KV that this worker has written to peers, or read from them."),
    Metric(name="kvflow_runs_total", kind="counter", labels=("direction",),
           known=_pairs(ORDERS),
           help="Runs of adjacent bytes that those were posted as."),
    Metric(name="kvflow_posts_total", kind="counter", labels=("direction",),
           known=_pairs(ORDERS),
           help="Slices of WRITEs and READs that were posted."),
    # -- the loop --------------------------------------------------------------------------------
    Metric(name="kvflow_polls_total", kind="counter",
           help="Looks for news; the rate is how often the loop polls."),
    Metric(name="kvflow_poll_delay_seconds_total", kind="counter",
           help="Seconds by which looks came too late, added up."),
    Metric(name="kvflow_poll_delay_max_seconds", kind="gauge",
           help="The most by which one look came too late, since the last report."),
    Metric(name="kvflow_internal_errors_total", kind="counter",
           help="Errors that are bugs of kvflow; the log has their tracebacks."),
    # -- what vLLM's scheduler sees --------------------------------------------------------------
    Metric(name="kvflow_prompt_tokens_received_total", kind="counter", scheduler=True,
           help="Prompt tokens whose KV came from a producer."),
    Metric(name="kvflow_prompt_tokens_computed_locally_total", kind="counter", labels=("why",),
           known=_pairs(WHY_LOCAL), scheduler=True,
           help="Prompt tokens of requests for remote prefill that are computed here instead."),
    Metric(name="kvflow_requests_waiting_for_room_total", kind="counter", scheduler=True,
           help="Times that a request had to wait since `parked_max` loads were parked."),
)  # fmt: skip

BY_NAME: Mapping[str, Metric] = {metric.name: metric for metric in METRICS}

Series = tuple[str, ...]
"""A metric's name, the rank, and the values of its own labels."""


@dataclass(slots=True)
class Reading:
    """What has changed since the reading before.

    counts  increments of counters.
    levels  gauges.
    seen    observations of histograms.
    """

    counts: dict[Series, float] = field(default_factory=dict)
    levels: dict[Series, float] = field(default_factory=dict)
    seen: dict[Series, list[float]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.counts or self.levels or self.seen)


def as_markdown() -> str:
    """The table of specs/metrics.md."""
    lines = [
        "# Metrics",
        "",
        "Generated by `kvflow states --write specs`; a test fails when this file is stale.",
        "",
        "They are on vLLM's own `/metrics`, with vLLM's labels (`model_name`, `engine`), a label",
        "`rank` (`pp0.tp0`, ..., or `scheduler` for what vLLM's scheduler sees) and those listed",
        "here. Every rank counts for itself: with tensor parallelism each has a record of each",
        'request, so a sum over requests takes one rank (`rank="pp0.tp0"`), and a sum over bytes',
        "takes all.",
        "",
        "vLLM takes them from its workers with its steps, here at most four times a second and",
        "whenever a transfer has ended; an engine without work makes no steps, and shows what",
        "happens then with its next request. Two identities hold of each rank once nothing is",
        "under way:",
        "",
        "- `kvflow_transfers_started_total` = sum of `kvflow_transfers_ended_total` of the same",
        "  machine;",
        "- `kvflow_registrations_received_total` = sum of `kvflow_registrations_settled_total`.",
        "",
        "| metric | kind | labels | meaning |",
        "|---|---|---|---|",
    ]
    for metric in METRICS:
        labels = ", ".join(f"`{label}`" for label in metric.labels)
        lines.append(f"| `{metric.name}` | {metric.kind} | {labels} | {metric.help} |")
    lines += ["", "Buckets of the histograms, in seconds:", ""]
    for metric in METRICS:
        if metric.buckets:
            bounds = ", ".join(f"{bound:g}" for bound in metric.buckets)
            lines.append(f"- `{metric.name}`: {bounds}")
    return "\n".join(lines) + "\n"
