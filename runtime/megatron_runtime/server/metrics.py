"""Metrics of the server. Each metric has a name of this project, and also vLLM's name if vLLM has an equal metric."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)
_TIMES_OF_REPLY = {
    "queue_seconds": ("request_queue_time_seconds", "Time in the engine's queue."),
    "prefill_seconds": ("request_prefill_time_seconds", "From leaving the queue to the first token."),
    "decode_seconds": ("request_decode_time_seconds", "From the first token to the last."),
}
"""Name and help text of the histogram for each duration in an engine's final reply, by the key in the reply."""

_Kind = TypeVar("_Kind", Gauge, Counter, Histogram)


class _VllmNames(Collector):
    """A collector that exports the metrics of a registry under vLLM's names."""

    def __init__(self, own: CollectorRegistry) -> None:
        self._own = own

    def collect(self) -> Iterator[Metric]:
        for metric in self._own.collect():
            renamed = Metric(_vllm_name(metric.name), metric.documentation, metric.type, metric.unit)
            renamed.samples = [sample._replace(name=_vllm_name(sample.name)) for sample in metric.samples]
            yield renamed


def _vllm_name(name: str) -> str:
    return "vllm:" + name.removeprefix("megatron_")


class ServerMetrics:
    """The metrics of one server process. Each instance has its own registry.

    open_requests: number of unanswered choices, by tenant.
    """

    def __init__(self, *, model: str, vllm: bool) -> None:
        self.registry = CollectorRegistry()
        self.open_requests: collections.Counter[str] = collections.Counter()
        ProcessCollector(registry=self.registry)
        shared = CollectorRegistry()
        self.registry.register(shared)
        if vllm:
            self.registry.register(_VllmNames(shared))

        def family(kind: type[_Kind], name: str, text: str, **options: Any) -> _Kind:
            """Create and return the metric `megatron_NAME`, which has a label with the model's name."""
            metric = kind(f"megatron_{name}", text, ["model_name"], registry=shared, **options)
            return metric.labels(model)

        self.running = family(Gauge, "num_requests_running", "Open choices; streams from their first token on.")
        self.waiting = family(Gauge, "num_requests_waiting", "Streams without a first token.")
        self.prompt_tokens = family(Counter, "prompt_tokens", "Prompt tokens of answered requests.")
        self.generation_tokens = family(Counter, "generation_tokens", "Generated tokens.")
        self.cache_queries = family(Counter, "prefix_cache_queries", "Prompt tokens looked up in prefix caches.")
        self.cache_hits = family(Counter, "prefix_cache_hits", "Prompt tokens found in prefix caches.")
        labels = ["model_name", "finished_reason"]
        by_reason = Counter("megatron_request_success", "Choices answered, by reason.", labels, registry=shared)
        self.finished = {reason: by_reason.labels(model, reason) for reason in ("stop", "length")}
        seconds = partial(family, Histogram, buckets=_SECONDS)
        self.ttft = seconds("time_to_first_token_seconds", "Streams: time to the first token.")
        self.itl = seconds("inter_token_latency_seconds", "Streams: time between tokens.")
        self.e2e = seconds("e2e_request_latency_seconds", "Time to the whole answer.")
        self.inference = seconds("request_inference_time_seconds", "Prefill and decode.")
        self.times = {key: seconds(name, text) for key, (name, text) in _TIMES_OF_REPLY.items()}
        tokens = partial(family, Histogram, buckets=_TOKENS)
        self.prompt_size = tokens("request_prompt_tokens", "Prompt tokens of a request.")
        self.answer_size = tokens("request_generation_tokens", "Generated tokens of a request.")
        own, labels = self.registry, ["route", "status"]
        self.responses = Counter("megatron_http_responses", "Answers by route and status.", labels, registry=own)
        ignored = "Unknown fields of request bodies, which were ignored."
        self.ignored_fields = Counter("megatron_http_ignored_fields", ignored, registry=own)
        aborted = "Choices without an answer: disconnect, error or shutdown."
        self.aborted = Counter("megatron_requests_aborted", aborted, registry=own)
        by_key = partial(Counter, labelnames=["api_key"], registry=own)
        self.requests_by_key = by_key("megatron_api_key_requests", "POST requests by name of the API key.")
        self.prompt_tokens_by_key = by_key("megatron_api_key_prompt_tokens", "Prompt tokens by name of the API key.")
        text = "Generated tokens by name of the API key; also of aborted streams, and of aborted whole answers of keys "
        text += "with a limit of tokens."
        self.generation_tokens_by_key = by_key("megatron_api_key_generation_tokens", text)
        text = "Tokens counted against limits without a generation, such as the tokens of rejected bodies."
        self.charged_tokens_by_key = by_key("megatron_api_key_charged_tokens", text)
        labels = ["api_key", "reason"]
        text = "Requests beyond what their API key allows, by reason: requests, tokens, model."
        self.rejected_by_key = Counter("megatron_api_key_rejections", text, labels, registry=own)


class RequestObserver:
    """A context manager that records the metrics of one choice from its submission to its end.

    A choice counts as aborted if the `with` block ends before finished() is called.

    prompt_tokens: number of prompt tokens. If only the engine knows the number, set the attribute before you call
                   finished().
    on_generated: called with the number of new tokens.
    """

    def __init__(
        self,
        metrics: ServerMetrics,
        *,
        prompt_tokens: int,
        tenant: str,
        streams: bool,
        on_generated: Callable[[int], object] | None = None,
    ) -> None:
        self.generated = 0
        """Number of tokens generated so far, as last reported by the engine."""
        self.first_token_seconds: float | None = None
        """For a stream, the seconds from its submission to its first token."""
        self.prompt_tokens = prompt_tokens
        self._metrics = metrics
        self._tenant = tenant
        self._started = time.perf_counter()
        self._last: float | None = None
        self._gauge = metrics.waiting if streams else metrics.running
        self._on_generated = on_generated
        self._is_finished = False

    def __enter__(self) -> RequestObserver:
        self._metrics.open_requests[self._tenant] += 1
        self._gauge.inc()
        return self

    def __exit__(self, *_: object) -> None:
        open_requests = self._metrics.open_requests
        open_requests[self._tenant] -= 1
        if not open_requests[self._tenant]:
            del open_requests[self._tenant]
        self._gauge.dec()
        if not self._is_finished:
            self._metrics.aborted.inc()

    def count(self, tokens: int) -> None:
        """Count `tokens` generated tokens, including tokens that the client never reads."""
        self.generated += tokens
        if self._on_generated is not None:
            self._on_generated(tokens)

    def tokens(self, count: int, *, at: float) -> None:
        """Record that `count` tokens of a stream have arrived together.

        at: arrival time on the clock of perf_counter().
        """
        if self._last is None:
            self._gauge.dec()
            self._gauge = self._metrics.running
            self._gauge.inc()
            self.first_token_seconds = at - self._started
            self._metrics.ttft.observe(self.first_token_seconds)
        else:
            for _ in range(count):
                self._metrics.itl.observe((at - self._last) / count)
        self._last = at

    def finished(self, reason: str, reply: Mapping[str, Any]) -> None:
        """Record the end of the choice. reason: the finish reason. reply: the engine's final reply."""
        self._is_finished = True
        metrics, tokens = self._metrics, len(reply["generated_tokens"])
        self.count(tokens - self.generated)
        metrics.finished[reason].inc(1)
        metrics.e2e.observe(time.perf_counter() - self._started)
        metrics.prompt_size.observe(self.prompt_tokens)
        metrics.answer_size.observe(tokens)
        metrics.prompt_tokens.inc(self.prompt_tokens)
        metrics.generation_tokens.inc(tokens)
        metrics.cache_queries.inc(self.prompt_tokens)
        metrics.cache_hits.inc(reply.get("num_cached_tokens") or 0)
        times = {key: reply[key] for key in _TIMES_OF_REPLY if reply.get(key) is not None}
        for key, seconds in times.items():
            metrics.times[key].observe(seconds)
        if {"prefill_seconds", "decode_seconds"} <= times.keys():
            metrics.inference.observe(times["prefill_seconds"] + times["decode_seconds"])
