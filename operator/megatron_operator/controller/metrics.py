"""Prometheus metrics: counters of the operator, and the state of its resources at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megatron_operator.decision.coordinator_snapshot import CoordinatorSnapshot
from megatron_operator.resource.states import LifecyclePhase, SignalKind

VERB_BUCKETS = (0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)


@dataclass(frozen=True, slots=True)
class Reading:
    """The state of one resource after its last decision, as metrics export it."""

    namespace: str
    name: str
    status: Mapping[str, Any]
    coordinator: CoordinatorSnapshot
    manager: str = ""
    """Lease of another operator that manages the resource; empty if this operator manages it."""
    contested: int = 0
    """Number of children that another program changes back each time the operator applies them."""


class Metrics:
    """The metrics of this process, in a Prometheus registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.passes = Counter(
            "megatron_operator_reconcile_passes", "Passes over a resource.", ["outcome"], registry=self.registry
        )
        self.seconds = Histogram(
            "megatron_operator_reconcile_seconds",
            "Duration of one pass.",
            buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
            registry=self.registry,
        )
        self.writes = Counter(
            "megatron_operator_api_writes", "Writes to the API server.", ["verb", "kind"], registry=self.registry
        )
        self.signals = Counter(
            "megatron_operator_signals", "Control signals sent to coordinators.", ["signal"], registry=self.registry
        )
        self.verb_seconds = Histogram(
            "megatron_operator_verb_seconds",
            "Time from the intent of a signal to each phase that it reaches.",
            ["verb", "phase"],
            buckets=VERB_BUCKETS,
            registry=self.registry,
        )
        self.resources = Gauge("megatron_operator_resources", "Managed resources.", registry=self.registry)
        self.isolated = Gauge(
            "megatron_operator_isolated",
            "1 while this process suspects its own network, because many coordinators are silent at once.",
            registry=self.registry,
        )
        self.leading = Gauge("megatron_operator_leading", "1 while this process leads.", registry=self.registry)
        self.term = Gauge("megatron_operator_term", "Term of this leader.", registry=self.registry)

    def count_write(self, verb: str, kind: str) -> None:
        self.writes.labels(verb=verb, kind=kind).inc()

    def count_signal(self, kind: SignalKind) -> None:
        self.signals.labels(signal=kind.value).inc()

    def show(
        self,
        readings: Callable[[], Iterable[Reading]],
        *,
        denied: Callable[[], Mapping[tuple[str, str], str]] = dict,
        standby: Callable[[], tuple[str, str] | None] = lambda: None,
    ) -> None:
        """Register the metrics that are read at each scrape.

        readings: returns the readings of the resources.
        denied:   returns the reason for each watch that the server rejects, by API resource and namespace.
        standby:  returns the Lease that this process waits for, and its holder; None if this process leads.
        """
        self.registry.register(_Resources(readings))
        self.registry.register(_Process(denied, standby))


class VerbClock:
    """Measures how long each operation takes from phase Pending to each later phase, as this process observes them."""

    def __init__(self, metrics: Metrics, clock: Callable[[], float]) -> None:
        self._metrics, self._clock = metrics, clock
        self._seen: tuple[str, str] | None = None
        self._began: float | None = None

    def look(self, lifecycle: Mapping[str, Any]) -> None:
        """Record how long the operation in `status.lifecycle` has taken to reach its phase.

        Call this before the decision's status is persisted.
        """
        operation, phase = lifecycle.get("operationId"), lifecycle.get("phase")
        if not operation or not phase or (operation, phase) == self._seen:
            return
        if phase == LifecyclePhase.PENDING.value:
            self._began = self._clock()
        elif self._began is not None and self._seen is not None and self._seen[0] == operation:
            taken = self._clock() - self._began
            self._metrics.verb_seconds.labels(verb=lifecycle["signal"], phase=phase).observe(taken)
        else:
            self._began = None
        self._seen = (operation, phase)


class _Process(Collector):
    def __init__(
        self, denied: Callable[[], Mapping[tuple[str, str], str]], standby: Callable[[], tuple[str, str] | None]
    ) -> None:
        self._denied, self._standby = denied, standby

    def collect(self) -> Iterator[Metric]:
        denied = GaugeMetricFamily(
            "megatron_operator_watch_denied",
            "1 for a kind that the operator cannot watch in a namespace; * for all namespaces.",
            labels=["resource", "namespace"],
        )
        for resource, namespace in self._denied():
            denied.add_metric([resource, namespace or "*"], 1)
        standby = GaugeMetricFamily(
            "megatron_operator_standby",
            "1 while this process waits for the Lease that another one holds.",
            labels=["lease", "holder"],
        )
        waits_for = self._standby()
        if waits_for is not None:
            standby.add_metric(waits_for, 1)
        yield from (denied, standby)


class _Resources(Collector):
    def __init__(self, readings: Callable[[], Iterable[Reading]]) -> None:
        self._readings = readings

    def collect(self) -> Iterator[Metric]:
        labels = ["namespace", "name"]
        state = GaugeMetricFamily(
            "megatron_operator_resource_state", "1 for the state of a resource.", labels=[*labels, "state"]
        )
        conditions = GaugeMetricFamily(
            "megatron_operator_condition",
            "1 for the status and reason of each condition.",
            labels=[*labels, "type", "status", "reason"],
        )
        queued = GaugeMetricFamily(
            "megatron_operator_queued_requests", "Requests that wait in a coordinator.", labels=labels
        )
        in_flight = GaugeMetricFamily(
            "megatron_operator_in_flight_requests", "Requests in flight in an engine.", labels=[*labels, "engine"]
        )
        elsewhere = GaugeMetricFamily(
            "megatron_operator_managed_elsewhere",
            "1 for a resource that another operator manages, with its Lease.",
            labels=[*labels, "lease"],
        )
        contested = GaugeMetricFamily(
            "megatron_operator_contested_children",
            "Children that another program changes as often as the operator applies them.",
            labels=labels,
        )
        for reading in self._readings():
            key = [reading.namespace, reading.name]
            contested.add_metric(key, reading.contested)
            if reading.manager:
                elsewhere.add_metric([*key, reading.manager], 1)
            if reading.status.get("state"):
                state.add_metric([*key, reading.status["state"]], 1)
            for entry in reading.status.get("conditions") or ():
                conditions.add_metric([*key, entry["type"], entry["status"], entry["reason"]], 1)
            if reading.coordinator.reachable:
                queued.add_metric(key, reading.coordinator.queue_length)
                # Other names that a coordinator reports are not used as labels.
                known = {entry["name"] for entry in reading.status.get("engines") or ()}
                for engine in reading.coordinator.engines:
                    if engine.name in known:
                        in_flight.add_metric([*key, engine.name], engine.in_flight)
        yield from (state, conditions, queued, in_flight, elsewhere, contested)
