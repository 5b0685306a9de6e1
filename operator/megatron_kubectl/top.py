"""Shows the load of the engines of a resource, for `kubectl megatron top`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megatron_kubectl.proxy import ClusterError, rejection
from megatron_kubectl.resource_client import ResourceClient
from megatron_kubectl.resource_view import Object, summary, table
from megatron_kubectl.samples import (
    UNREACHABLE,
    EngineSample,
    PodMetrics,
    Sample,
    metrics_key,
    parse_page,
    sample_pods,
)
from megatron_operator.cluster.kinds import POD
from megatron_operator.resource.names import PORT_HEALTH

METRICS_SECONDS = 5.0
MAX_PAGE_BYTES = 4 << 20
"""Maximum number of bytes of a metrics page that are read."""
MIN_UNEVEN_TOKENS, UNEVEN_FACTOR = 8192, 4
"""Thresholds of uneven load.

The load is uneven if the longest queue has at least MIN_UNEVEN_TOKENS prompt tokens, and UNEVEN_FACTOR times the prompt
tokens of the shortest queue.
"""
HEADERS = (
    *("ENGINE", "STATE", "QUEUE", "QUEUED TOKENS", "RUNNING", "KV USE", "PREFIX HITS", "DRAFT HITS", "TOKENS/S"),
    *("EPOCH", "RANKS"),
)


class Sampler:
    """Reads the status of one resource and the metrics of its pods."""

    def __init__(self, client: ResourceClient, name: str) -> None:
        self._client = client
        self._name = name
        self._before: dict[str, PodMetrics] = {}
        self._before_at = 0.0

    def take(self) -> Object:
        """Return the data that `top` shows. Rates are averages since the previous call. Raises ClusterError."""
        resource = self._client.get(self._name)
        pods: dict[str, tuple[str, str]] = {}
        for pod in self._client.pods(self._name):
            key = metrics_key(pod)
            if key is not None and (pod.get("status") or {}).get("phase") == "Running":
                pods[pod["metadata"]["name"]] = key
        at, now = time.time(), time.monotonic()
        pages: dict[str, PodMetrics] = {}
        errors: list[str] = []

        def read(pod: str) -> None:
            try:
                pages[pod] = self._page(pod)
            except (ClusterError, ValueError) as error:
                errors.append(str(error))

        if pods:
            with ThreadPoolExecutor(max_workers=min(16, len(pods))) as threads:
                list(threads.map(read, pods))
        seconds = now - self._before_at
        sample, self._before = sample_pods(at=at, seconds=seconds, before=self._before, pods=pods, pages=pages)
        self._before_at = now
        return view(resource, sample, min(errors, default=""))

    def _page(self, pod: str) -> PodMetrics:
        path = POD.path(self._client.namespace, f"{pod}:{PORT_HEALTH}", subresource="proxy/metrics")
        try:
            with self._client.api.open("GET", path, seconds=METRICS_SECONDS) as answer:
                text = answer.read(MAX_PAGE_BYTES)
                if answer.status != 200:
                    raise rejection(answer.status, text, about=f"metrics of pod {pod}")
        except ClusterError as error:
            if error.code and error.code < 500:
                raise
            raise ClusterError(f"{error}; {UNREACHABLE}", code=error.code) from error
        return parse_page(text.decode())


def view(resource: Mapping[str, Any], sample: Sample, error: str) -> Object:
    """Return the data that `top -o json` prints.

    sample: metrics of the resource's pods.
    error:  reason why the metrics of some pods are missing; empty if none are missing.
    """
    engines = [
        {
            "name": engine["name"],
            "state": engine["state"],
            "role": engine.get("role"),
            "ranks": engine.get("ranks", 0),
            **_engine(sample.engines.get(engine["name"], EngineSample()), engine.get("epoch")),
        }
        for engine in (resource.get("status") or {}).get("engines") or ()
    ]
    return {
        **summary(resource),
        "at": sample.at,
        "tokensPerSecond": sample.tokens_per_second,
        "queued": sample.queued,
        "ttftSeconds": {"p50": sample.ttft_p50, "p95": sample.ttft_p95},
        "interTokenSeconds": {"p50": sample.itl_p50, "p95": sample.itl_p95},
        "engines": engines,
        "metricsError": error,
    }


def imbalance(sample: Object) -> list[str]:
    """Return a list with one warning if the queues of prompt tokens differ widely between engines.

    Returns an empty list otherwise.

    sample: result of Sampler.take().
    """
    queues = sorted(
        (engine["queuedTokens"], engine["name"]) for engine in sample["engines"] if engine["queuedTokens"] is not None
    )
    if len(queues) < 2 or queues[-1][0] < max(MIN_UNEVEN_TOKENS, UNEVEN_FACTOR * queues[0][0]):
        return []
    (minimum, idle), (maximum, busy) = queues[0], queues[-1]
    remedy = "use spec.coordinator.routing.policy LeastCost, which balances prompt tokens"
    return [f"  load is uneven: {busy} has {maximum:.0f} queued prompt tokens, {idle} has {minimum:.0f}; {remedy}"]


def _engine(sample: EngineSample, epoch: Any) -> Object:
    return {
        "queue": sample.waiting,
        "queuedTokens": sample.queued_tokens,
        "running": sample.running,
        "kvUse": sample.kv_usage,
        "prefixHitRate": sample.prefix_hit_rate,
        "draftHitRate": sample.draft_hit_rate,
        "tokensPerSecond": sample.tokens_per_second,
        "epoch": epoch if sample.epoch is None else sample.epoch,
    }


def lines(sample: Object) -> list[str]:
    """Return the lines of text that `top` shows.

    sample: result of Sampler.take().
    """
    latencies = [
        f"{name} {_ms(sample[key]['p50'])}, p95 {_ms(sample[key]['p95'])}"
        for name, key in (("first token", "ttftSeconds"), ("between tokens", "interTokenSeconds"))
        if sample[key]["p50"] is not None
    ]
    total = [f"{_number(sample['tokensPerSecond'])} tokens/s"] if sample["tokensPerSecond"] is not None else []
    queued = [f"{_number(sample['queued'])} queued in the coordinator"] if sample["queued"] is not None else []
    state = f"{sample['state']}, {sample['ready'] or '0/0'} engines ready"
    rows = [
        (
            engine["name"],
            engine["state"],
            _number(engine["queue"]),
            _number(engine["queuedTokens"]),
            _number(engine["running"]),
            _share(engine["kvUse"]),
            _share(engine["prefixHitRate"]),
            _share(engine["draftHitRate"]),
            _number(engine["tokensPerSecond"]),
            _number(engine["epoch"]),
            _number(engine["ranks"]),
        )
        for engine in sample["engines"]
    ]
    text = [f"{sample['namespace']}/{sample['name']}: " + "; ".join([state, *queued, *total, *latencies])]
    if sample["waitingOn"]:
        text.append(f"  waits for: {sample['waitingOn']}")
    if sample["metricsError"]:
        text.append(f"  metrics are incomplete: {sample['metricsError']}")
    return [*text, *table(HEADERS, rows)]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.0f}"


def _share(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.0f}%"


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.0f} ms"
