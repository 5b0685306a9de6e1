"""Prometheus metrics of an engine, read at each scrape. docs/reference/metrics.md lists the names."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from megatron_runtime.engine.backend import EngineBackend
from megatron_runtime.engine.lifecycle import Lifecycle
from megatron_runtime.process.metrics import families, labelled
from megatron_runtime.protocol.headers import SIGNALS
from megatron_runtime.protocol.lifecycle import EngineState


class EngineMetrics(Collector):
    """The metrics `megatron_*`, and vLLM's own metrics.

    If the backend is not vLLM, metrics that vLLM also has are also exported under vLLM's names.
    """

    def __init__(self, lifecycle: Lifecycle, backend: EngineBackend) -> None:
        self._lifecycle = lifecycle
        self._backend = backend

    def collect(self) -> Iterator[Metric]:
        stats, own = self._backend.stats(), self._backend.metrics()
        yield from own or ()
        for prefix in ("megatron_", "vllm:") if own is None else ("megatron_",):
            yield from families(stats, prefix, only_vllm=prefix == "vllm:")
            # vLLM's metric. Its level 1, weights_offloaded, does not occur here.
            text, label = "1 for the sleep state of the engine", "sleep_state"
            suspended = self._lifecycle.state is EngineState.SUSPENDED
            levels = (("awake", not suspended), ("weights_offloaded", False), ("discard_all", suspended))
            yield labelled(GaugeMetricFamily(prefix + "engine_sleep_state", text, labels=[label]), levels)
        if stats.last_step is not None:
            age, text = time.monotonic() - stats.last_step, "since the last step ended; not with vLLM"
            yield GaugeMetricFamily("megatron_seconds_since_last_step", text, value=age)
        for name, text, value in (
            ("queued_prompt_tokens", "prompt tokens that are not computed and not cached", stats.queued_tokens),
            ("prefill_tokens_per_second", "rate of prompts, fitted to steps", stats.prefill_rate),
            ("decode_tokens_per_second", "tokens held per second that they add to a step", stats.decode_rate),
        ):
            if value is not None:
                yield GaugeMetricFamily(f"megatron_{name}", text, value=value)
        yield GaugeMetricFamily("megatron_generation_epoch", "epoch of the weights", value=self._lifecycle.epoch)
        yield labelled(
            GaugeMetricFamily("megatron_engine_state", "1 for the engine's state", labels=["state"]),
            ((state.value, self._lifecycle.state is state) for state in EngineState),
        )
        yield labelled(
            CounterMetricFamily("megatron_engine_signals", "signals executed, without repetitions", labels=["signal"]),
            ((signal.name, self._lifecycle.acted.get(signal, 0)) for signal in sorted(SIGNALS)),
        )
        yield labelled(
            CounterMetricFamily("megatron_engine_signal_seconds", "duration of signals", labels=["signal"]),
            ((signal.name, self._lifecycle.seconds.get(signal, 0.0)) for signal in sorted(SIGNALS)),
        )
