"""The coordinator's Prometheus metrics, read from its state at each scrape."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megatron_runtime.coordinator.core.coordinator import CoordinatorCore
from megatron_runtime.protocol.lifecycle import CoordinatorState


class CoordinatorMetrics(Collector):
    def __init__(self, coordinator: CoordinatorCore) -> None:
        self._coordinator = coordinator

    def collect(self) -> Iterator[Metric]:
        yield from self._gauges()
        yield from self._counts()

    def _gauges(self) -> Iterator[Metric]:
        coordinator = self._coordinator
        journal = coordinator.dispatcher.journal
        for name, text, value in (
            ("queued_requests", "Requests that wait for an engine.", coordinator.dispatcher.waiting),
            ("open_requests", "Requests without a final answer.", len(journal)),
            ("journal_bytes", "Memory held for open requests.", journal.bytes),
            ("clients", "Clients registered.", len(coordinator.clients)),
            ("epoch", "Generation epoch.", coordinator.verbs.epoch),
        ):
            yield GaugeMetricFamily(f"megatron_coordinator_{name}", text, value=value)
        state = GaugeMetricFamily("megatron_coordinator_state", "1 for the state of this moment.", labels=["state"])
        for candidate in CoordinatorState:
            state.add_metric([candidate.value], float(candidate is coordinator.verbs.state))
        yield state
        in_flight = GaugeMetricFamily(
            "megatron_coordinator_in_flight_requests", "Requests given to an engine.", labels=["engine"]
        )
        serving = GaugeMetricFamily("megatron_coordinator_engine_serving", "1 if it serves.", labels=["engine"])
        for engine in coordinator.engines:
            in_flight.add_metric([engine.name], len(engine.in_flight))
            serving.add_metric([engine.name], float(engine.serving))
        yield in_flight
        yield serving

    def _counts(self) -> Iterator[Metric]:
        counters = self._coordinator.counters
        rejected = CounterMetricFamily(
            "megatron_coordinator_rejected_frames",
            "Frames dropped and connections refused, by reason.",
            labels=["reason"],
        )
        for reason in sorted({"malformed", "wrong_role", "unknown_peer", *counters.rejected}):
            rejected.add_metric([reason], counters.rejected[reason])
        rejected.add_metric(["key_not_admitted"], self._coordinator.access.rejected())
        yield rejected
        for name, text, value in (
            ("replays", "Requests dispatched anew because their engine was lost.", counters.replays),
            ("moved_requests", "Requests taken from an engine to make room for another tenant.", counters.moved),
            ("stale_answers", "Answers of engines that were not the next of their request.", counters.stale),
            ("late_answers", "Final answers of engines that had been removed, delivered.", counters.late),
            ("evicted_blocks", "Prefix blocks that engines said they no longer hold.", counters.evicted_blocks),
            ("completed_requests", "Requests that got their final answer from an engine.", counters.completed),
            ("refused_requests", "Requests that the coordinator answered with an error.", counters.refused),
            ("aborted_requests", "Requests aborted by their client, or because it left.", counters.aborted),
            ("partials", "Partial answers received from engines.", counters.partials),
            ("engines_lost", "Engines removed because they left, failed or fell silent.", counters.engines_lost),
            ("engine_crashes", "Engines that crashed while they had requests.", counters.engine_crashes),
            ("suspect_requests", "Requests in flight at two crashes, held back to run alone.", counters.suspects),
            ("acquitted_requests", "Suspect requests that ran alone without harm.", counters.acquitted),
            ("poison_requests", "Requests failed because they end engines.", counters.poison_requests),
        ):
            yield CounterMetricFamily(f"megatron_coordinator_{name}", text, value=value)
