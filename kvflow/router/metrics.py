"""What is counted, for `/metrics`. Names begin with `kvflow_router_`.

What an engine's state is (gauges) is read from the fleet when somebody asks, so nothing here has to
be kept in step with it.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvflow.router.engines import Engine, Fleet, Role

_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)


class Metrics:
    """The router's counters."""

    def __init__(self, fleet: Fleet) -> None:
        self.registry = CollectorRegistry()
        self.registry.register(FleetCollector(fleet))
        self._requests = Counter(
            "kvflow_router_requests",
            "Requests by how they ended: answered, refused (the client's mistake), failed, busy "
            "(503), broken (an answer that had begun), gone (the client).",
            ["outcome"],
            registry=self.registry,
        )
        self._dispatches = Counter(
            "kvflow_router_dispatches",
            "Dispatches by mode: push (both legs at once), pull (decode after prefill), local "
            "(no legs).",
            ["mode"],
            registry=self.registry,
        )
        self._local = Counter(
            "kvflow_router_local",
            "Requests computed by a decode engine alone, by what in them allows no legs.",
            ["why"],
            registry=self.registry,
        )
        self._failures = Counter(
            "kvflow_router_leg_failures",
            "Legs that failed, by the role of the engine.",
            ["role"],
            registry=self.registry,
        )
        self._legs = Histogram(
            "kvflow_router_leg_seconds",
            "From a leg's dispatch until its answer has begun (prefill: has ended).",
            ["role"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._first = Histogram(
            "kvflow_router_first_byte_seconds",
            "From a request's arrival until its client could be given something.",
            buckets=_SECONDS,
            registry=self.registry,
        )

    def dispatched(self, mode: str, why_local: str | None) -> None:
        """One dispatch was made."""
        self._dispatches.labels(mode).inc()
        if why_local is not None:
            self._local.labels(why_local).inc()

    def leg(self, role: Role, seconds: float) -> None:
        """A leg's answer has begun."""
        self._legs.labels(role).observe(seconds)

    def failed(self, role: Role) -> None:
        """A leg failed."""
        self._failures.labels(role).inc()

    def first(self, seconds: float) -> None:
        """A client could be given something."""
        self._first.observe(seconds)

    def ended(self, outcome: str) -> None:
        """A request ended."""
        self._requests.labels(outcome).inc()

    def page(self) -> bytes:
        """In Prometheus' text format."""
        return generate_latest(self.registry)


class FleetCollector(Collector):
    """Reads the fleet when it is asked."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet

    def collect(self) -> Iterator[Metric]:
        labels = ["engine", "role"]
        up = GaugeMetricFamily("kvflow_router_engine_up", "1 while it is used.", labels=labels)
        flight = GaugeMetricFamily(
            "kvflow_router_in_flight", "Legs in flight on an engine.", labels=labels
        )
        usage = GaugeMetricFamily(
            "kvflow_router_kv_usage", "Share of its KV pool in use, as it says.", labels=labels
        )
        computed = CounterMetricFamily(
            "kvflow_router_computed_locally",
            "Prompt tokens that a decode engine has computed itself, as it says: those of requests "
            "without legs, and those whose KV was to come from a producer and did not.",
            labels=labels,
        )
        for engine in self._fleet.engines:
            of = _labels(engine)
            up.add_metric(of, engine.met is not None)
            flight.add_metric(of, engine.in_flight)
            usage.add_metric(of, engine.kv_usage)
            if engine.role is Role.DECODE:
                computed.add_metric(of, engine.computed)
        waiting = GaugeMetricFamily("kvflow_router_waiting", "Requests that wait for a place.")
        waiting.add_metric([], self._fleet.waiting)
        yield from (up, flight, usage, computed, waiting)


def _labels(engine: Engine) -> list[str]:
    return [engine.url, str(engine.role)]
