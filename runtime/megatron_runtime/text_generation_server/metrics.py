"""What the server measures, under its own names and, where they mean the same, under vLLM's."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

_SECONDS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10_000, 20_000, 50_000, 100_000)


class _Families:
    """Creates each metric once per name and writes to all of them."""

    def __init__(self, registry: CollectorRegistry, *, model: str, vllm: bool) -> None:
        self._registry = registry
        self._model = model
        self._prefixes = ("megatron_", "vllm:") if vllm else ("megatron_",)

    def histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> list[Histogram]:
        return [
            Histogram(prefix + name, text, ["model_name"], buckets=buckets, registry=self._registry).labels(self._model)
            for prefix in self._prefixes
        ]

    def counter(self, name: str, text: str) -> list[Counter]:
        return [
            Counter(prefix + name, text, ["model_name"], registry=self._registry).labels(self._model)
            for prefix in self._prefixes
        ]

    def gauge(self, name: str, text: str) -> list[Gauge]:
        return [
            Gauge(prefix + name, text, ["model_name"], registry=self._registry).labels(self._model)
            for prefix in self._prefixes
        ]

    def finished_counter(self) -> list[Counter]:
        return [
            Counter(
                f"{prefix}request_success",
                "Requests answered, by reason.",
                ["model_name", "finished_reason"],
                registry=self._registry,
            )
            for prefix in self._prefixes
        ]


class ServerMetrics:
    """Metrics of one server process, in a registry of their own."""

    def __init__(self, *, model: str, vllm: bool) -> None:
        self.registry = CollectorRegistry()
        self._model = model
        families = _Families(self.registry, model=model, vllm=vllm)
        self._running = families.gauge("num_requests_running", "Requests that this server waits for.")
        self._prompt_tokens = families.counter("prompt_tokens", "Prompt tokens of answered requests.")
        self._generation_tokens = families.counter("generation_tokens", "Generated tokens.")
        self._finished = families.finished_counter()
        self._ttft = families.histogram("time_to_first_token_seconds", "Streams: time to the first token.", _SECONDS)
        self._itl = families.histogram("inter_token_latency_seconds", "Streams: time between tokens.", _SECONDS)
        self._e2e = families.histogram("e2e_request_latency_seconds", "Time to the whole answer.", _SECONDS)
        self._prompt_size = families.histogram("request_prompt_tokens", "Prompt tokens of a request.", _TOKENS)
        self._answer_size = families.histogram("request_generation_tokens", "Generated tokens of a request.", _TOKENS)
        self.responses = Counter(
            "megatron_http_responses", "Answers by route and status.", ["route", "status"], registry=self.registry
        )
        self.aborted = Counter(
            "megatron_requests_aborted", "Choices given up: disconnect, error or shutdown.", registry=self.registry
        )

    @contextmanager
    def request(self, prompt_tokens: int) -> Generator[RequestObserver]:
        """Observe one choice from submission to its end; one that ends without `finished` counts as aborted."""
        observer = RequestObserver(self, prompt_tokens)
        for gauge in self._running:
            gauge.inc()
        try:
            yield observer
        finally:
            for gauge in self._running:
                gauge.dec()
            if not observer.is_finished:
                self.aborted.inc()

    def first_token(self, seconds: float) -> None:
        for histogram in self._ttft:
            histogram.observe(seconds)

    def next_token(self, seconds: float) -> None:
        for histogram in self._itl:
            histogram.observe(seconds)

    def answered(self, *, reason: str, seconds: float, prompt_tokens: int, tokens: int) -> None:
        for finished in self._finished:
            finished.labels(self._model, reason).inc()
        for histogram, value in (
            *((h, seconds) for h in self._e2e),
            *((h, prompt_tokens) for h in self._prompt_size),
            *((h, tokens) for h in self._answer_size),
        ):
            histogram.observe(value)
        for counter in self._prompt_tokens:
            counter.inc(prompt_tokens)
        for counter in self._generation_tokens:
            counter.inc(tokens)


class RequestObserver:
    """Timings of one choice."""

    def __init__(self, metrics: ServerMetrics, prompt_tokens: int) -> None:
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        self._started = time.perf_counter()
        self._last: float | None = None
        self.is_finished = False

    def tokens(self, count: int, *, at: float) -> None:
        """Note `count` tokens that came together at time `at` (of perf_counter)."""
        if self._last is None:
            self._metrics.first_token(at - self._started)
        elif count:
            for _ in range(count):
                self._metrics.next_token((at - self._last) / count)
        self._last = at

    def finished(self, reason: str, *, tokens: int) -> None:
        self.is_finished = True
        self._metrics.answered(
            reason=reason,
            seconds=time.perf_counter() - self._started,
            prompt_tokens=self._prompt_tokens,
            tokens=tokens,
        )
