"""What the operator counts."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from megatron_operator.model.states import SignalKind


class Metrics:
    """One set per process, in a registry of its own."""

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
        self.resources = Gauge("megatron_operator_resources", "Resources being served.", registry=self.registry)
        self.leading = Gauge("megatron_operator_leading", "1 while this process leads.", registry=self.registry)
        self.term = Gauge("megatron_operator_term", "Term of this leader: its fence.", registry=self.registry)

    def count_write(self, verb: str, kind: str) -> None:
        self.writes.labels(verb=verb, kind=kind).inc()

    def count_signal(self, kind: SignalKind) -> None:
        self.signals.labels(signal=kind.value).inc()
