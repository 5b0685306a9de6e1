"""Prometheus metrics of an engine, read at each scrape. docs/reference/metrics.md lists the names."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from megatron_runtime.engine.backend import EngineBackend
from megatron_runtime.engine.engine_request import StepSizes
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
    "num_preemptions": ("preempted requests, whose KV was computed again", "preemptions"),
    "prefix_cache_queries": ("prompt tokens looked up in the prefix cache", "prefix_cache_queries"),
    "prefix_cache_hits": ("prompt tokens found in the prefix cache", "prefix_cache_hits"),
}


class EngineMetrics(Collector):
    """Metrics `megatron_*`, and vLLM's own metrics; from other backends, those that vLLM has under its names, too."""

    def __init__(self, lifecycle: Lifecycle, backend: EngineBackend) -> None:
        self._lifecycle = lifecycle
        self._backend = backend

    def collect(self) -> Iterator[Metric]:
        stats, own = self._backend.stats(), self._backend.metrics()
        yield from own or ()
        for prefix in ("megatron_", "vllm:") if own is None else ("megatron_",):
            for name, (text, attribute) in _GAUGES.items():
                yield GaugeMetricFamily(prefix + name, text, value=getattr(stats, attribute))
            for name, (text, attribute) in _COUNTERS.items():
                yield CounterMetricFamily(prefix + name, text, value=getattr(stats, attribute))
            yield _step_sizes(prefix + "iteration_tokens_total", stats.step_sizes)
            # vLLM's metric. Its level 1, weights_offloaded, does not occur here.
            text, label = "1 for the sleep state of the engine", "sleep_state"
            suspended = self._lifecycle.state is EngineState.SUSPENDED
            levels = (("awake", not suspended), ("weights_offloaded", False), ("discard_all", suspended))
            yield _labelled(GaugeMetricFamily(prefix + "engine_sleep_state", text, labels=[label]), levels)
        yield CounterMetricFamily("megatron_engine_steps", "engine steps; 0 with vLLM", value=stats.steps)
        text = "requests that failed in a step, without harm to others; 0 with vLLM"
        yield CounterMetricFamily("megatron_engine_failed_rows", text, value=stats.failed_rows)
        if stats.last_step is not None:
            age, text = time.monotonic() - stats.last_step, "since the last step ended; not with vLLM"
            yield GaugeMetricFamily("megatron_seconds_since_last_step", text, value=age)
        yield GaugeMetricFamily("megatron_generation_epoch", "epoch of the weights", value=self._lifecycle.epoch)
        yield _labelled(
            GaugeMetricFamily("megatron_engine_state", "1 for the engine's state", labels=["state"]),
            ((state.value, self._lifecycle.state is state) for state in EngineState),
        )
        yield _labelled(
            CounterMetricFamily("megatron_engine_signals", "signals done, without repetitions", labels=["signal"]),
            ((signal.name, self._lifecycle.acted.get(signal, 0)) for signal in sorted(SIGNALS)),
        )
        yield _labelled(
            CounterMetricFamily("megatron_engine_signal_seconds", "duration of signals", labels=["signal"]),
            ((signal.name, self._lifecycle.seconds.get(signal, 0.0)) for signal in sorted(SIGNALS)),
        )


def _labelled(family: GaugeMetricFamily | CounterMetricFamily, values: Iterable[tuple[str, float]]) -> Metric:
    for label, value in values:
        family.add_metric([label], float(value))
    return family


def _step_sizes(name: str, sizes: StepSizes) -> Metric:
    bounds = [str(float(bound)) for bound in StepSizes.BOUNDS] + ["+Inf"]
    family = HistogramMetricFamily(name, "tokens of a step; empty with vLLM")
    family.add_metric([], list(zip(bounds, accumulate(sizes.counts), strict=True)), sizes.tokens)
    return family
