"""The coordinator's Prometheus metrics, read from its state at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megatron_runtime.coordinator.core.coordinator import CoordinatorCore
from megatron_runtime.protocol.lifecycle import CoordinatorState

_PREFIX = "megatron_coordinator_"


class CoordinatorMetrics(Collector):
    """core: returns the current core, which a standby replaces."""

    def __init__(self, core: Callable[[], CoordinatorCore]) -> None:
        self._core = core

    def collect(self) -> Iterator[Metric]:
        coordinator = self._core()
        counters = coordinator.counters
        journal, clients = coordinator.dispatcher.journal, list(coordinator.clients)
        stuck = sum(client.stuck_since is not None for client in clients)
        unread = sum(client.outbox_bytes for client in clients)
        for name, text, value in (
            ("queued_requests", "Requests that wait for an engine.", coordinator.dispatcher.waiting),
            ("open_requests", "Requests without a final answer.", len(journal)),
            ("journal_bytes", "Memory held for open requests.", journal.bytes),
            ("clients", "Clients registered.", len(clients)),
            ("stuck_clients", "Clients whose connection accepts no more.", stuck),
            ("unread_bytes", "Memory held for answers to clients that do not read.", unread),
            ("quota_windows", "Minutes of API keys with limits, of requests or tokens.", len(coordinator.quotas)),
            ("epoch", "Generation epoch.", coordinator.verbs.epoch),
            ("active", "1 if it serves; 0 if it is the standby of another coordinator.", coordinator.context.active),
        ):
            yield GaugeMetricFamily(_PREFIX + name, text, value=value)
        state = GaugeMetricFamily(_PREFIX + "state", "1 for the current state.", labels=["state"])
        for candidate in CoordinatorState:
            state.add_metric([candidate.value], float(candidate is coordinator.verbs.state))
        yield state
        in_flight = GaugeMetricFamily(_PREFIX + "in_flight_requests", "Requests given to an engine.", labels=["engine"])
        serving = GaugeMetricFamily(_PREFIX + "engine_serving", "1 if it serves.", labels=["engine"])
        for engine in coordinator.engines:
            in_flight.add_metric([engine.name], len(engine.in_flight))
            serving.add_metric([engine.name], float(engine.serving))
        yield in_flight
        yield serving
        text = "Frames dropped and connections rejected, by reason."
        rejected = CounterMetricFamily(_PREFIX + "rejected_frames", text, labels=["reason"])
        for reason in sorted({"malformed", "wrong_role", "unknown_peer", *counters.rejected}):
            rejected.add_metric([reason], counters.rejected[reason])
        rejected.add_metric(["key_not_admitted"], coordinator.access.rejected())
        yield rejected
        for field in fields(counters):
            if "metric" in field.metadata:
                name, text = field.metadata["metric"], field.metadata["description"]
                yield CounterMetricFamily(_PREFIX + name, text, value=getattr(counters, field.name))
