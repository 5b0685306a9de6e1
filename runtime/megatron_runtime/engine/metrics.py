"""Prometheus metrics of an engine, read at the moment of the scrape. docs/reference/metrics.md lists the names."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from megatron_runtime.engine.engine_request import BackendStats, StepSizes
from megatron_runtime.engine.lifecycle import Lifecycle
from megatron_runtime.protocol.headers import SIGNALS
from megatron_runtime.protocol.lifecycle import EngineState

_GAUGES = {
    "num_requests_running": ("requests being generated", "num_running"),
    "num_requests_waiting": ("requests waiting for a slot or for pages", "num_waiting"),
    "kv_cache_usage_perc": ("share of the KV cache in use, 0 to 1", "kv_usage"),
}
_COUNTERS = {
    "prompt_tokens": ("prompt tokens computed", "prompt_tokens"),
    "generation_tokens": ("tokens generated", "generation_tokens"),
    "num_preemptions": ("requests whose KV was given up and computed again", "preemptions"),
    "prefix_cache_queries": ("prompt tokens looked for in the prefix cache", "prefix_cache_queries"),
    "prefix_cache_hits": ("prompt tokens found in the prefix cache", "prefix_cache_hits"),
}


class EngineMetrics(Collector):
    """Metrics `megatron_*`, and vLLM's names for those that it has too."""

    def __init__(self, lifecycle: Lifecycle, stats: Callable[[], BackendStats]) -> None:
        self._lifecycle = lifecycle
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        for prefix in ("megatron_", "vllm:"):
            for name, (text, attribute) in _GAUGES.items():
                yield GaugeMetricFamily(prefix + name, text, value=getattr(stats, attribute))
            for name, (text, attribute) in _COUNTERS.items():
                yield CounterMetricFamily(prefix + name, text, value=getattr(stats, attribute))
            yield _step_sizes(prefix + "iteration_tokens_total", stats.step_sizes)
            yield self._sleep_state(prefix + "engine_sleep_state")
        yield CounterMetricFamily("megatron_engine_steps", "engine steps", value=stats.steps)
        if stats.last_step is not None:
            age = time.monotonic() - stats.last_step
            yield GaugeMetricFamily("megatron_seconds_since_last_step", "since the last step ended", value=age)
        yield GaugeMetricFamily("megatron_generation_epoch", "epoch of the weights", value=self._lifecycle.epoch)
        state = GaugeMetricFamily("megatron_engine_state", "1 for the state the engine is in", labels=["state"])
        for name in EngineState:
            state.add_metric([name.value], float(self._lifecycle.state is name))
        yield state
        acted = CounterMetricFamily(
            "megatron_engine_signals", "signals whose work was done; a repeated one does not count", labels=["signal"]
        )
        for signal in sorted(SIGNALS):
            acted.add_metric([signal.name], self._lifecycle.acted.get(signal, 0))
        yield acted
        seconds = CounterMetricFamily(
            "megatron_engine_signal_seconds", "what the work of signals took, in all", labels=["signal"]
        )
        for signal in sorted(SIGNALS):
            seconds.add_metric([signal.name], self._lifecycle.seconds.get(signal, 0.0))
        yield seconds

    def _sleep_state(self, name: str) -> Metric:
        """vLLM's metric. Its level 1 does not occur here: weights are released or stay where they are."""
        sleeps = self._lifecycle.state is EngineState.SUSPENDED
        family = GaugeMetricFamily(name, "1 for what an engine that is suspended holds", labels=["sleep_state"])
        for state, is_so in (("awake", not sleeps), ("weights_offloaded", False), ("discard_all", sleeps)):
            family.add_metric([state], float(is_so))
        return family


def _step_sizes(name: str, sizes: StepSizes) -> Metric:
    bounds = [str(float(bound)) for bound in StepSizes.BOUNDS] + ["+Inf"]
    family = HistogramMetricFamily(name, "tokens of a step")
    family.add_metric([], list(zip(bounds, accumulate(sizes.counts), strict=True)), sizes.tokens)
    return family
