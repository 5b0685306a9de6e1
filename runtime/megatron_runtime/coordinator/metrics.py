"""The coordinator's Prometheus metrics, read from its state at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megatron_runtime.coordinator.core.coordinator import CoordinatorCore
from megatron_runtime.process.metrics import families, labelled
from megatron_runtime.protocol.lifecycle import CoordinatorState

_PREFIX = "megatron_coordinator_"


class CoordinatorMetrics(Collector):
    """Prometheus metrics of one coordinator process.

    core: returns the current core, which changes when a standby takes over.
    """

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
            ("stuck_clients", "Clients whose send buffer is full.", stuck),
            ("unread_bytes", "Memory held for answers to clients that do not read.", unread),
            ("quota_windows", "Minutes of API keys with limits, of requests or tokens.", len(coordinator.quotas)),
            ("epoch", "Generation epoch.", coordinator.verbs.epoch),
            ("active", "1 if it serves; 0 if it is the standby of another coordinator.", coordinator.context.active),
        ):
            yield GaugeMetricFamily(_PREFIX + name, text, value=value)
        states = ((state.value, coordinator.verbs.state is state) for state in CoordinatorState)
        yield labelled(_gauge("state", "1 for the current state.", "state"), states)
        in_flight = ((engine.name, len(engine.in_flight)) for engine in coordinator.engines)
        yield labelled(_gauge("in_flight_requests", "Requests given to an engine.", "engine"), in_flight)
        serving = ((engine.name, engine.serving) for engine in coordinator.engines)
        yield labelled(_gauge("engine_serving", "1 if it serves.", "engine"), serving)
        rejected = {"malformed": 0, "wrong_role": 0, "unknown_peer": 0, **counters.rejected}
        rejected["key_not_admitted"] = coordinator.access.rejected()
        text = "Frames dropped and connections rejected, by reason."
        yield labelled(CounterMetricFamily(_PREFIX + "rejected_frames", text, labels=["reason"]), rejected.items())
        yield from families(counters, _PREFIX)


def _gauge(name: str, text: str, label: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(_PREFIX + name, text, labels=[label])
