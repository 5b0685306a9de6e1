"""Computes rates and latencies of one resource from the metrics pages of its pods. All functions are pure."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from megatron_kubectl.resource_view import label
from megatron_operator.resource.names import (
    COORDINATOR,
    ENGINE,
    LABEL_COMPONENT,
    LABEL_ENGINE,
    LABEL_POD_INDEX,
    SERVER,
    STANDBY,
)

UNREACHABLE = (
    "if the cluster enforces NetworkPolicies, name the API server's addresses in the chart's value "
    "networkPolicy.apiServer"
)
"""The remedy if the API server's proxy cannot reach the metrics of a pod."""
INTERVAL_SECONDS = 5.0
WINDOW_SECONDS = 900.0
MAX_SAMPLES = int(WINDOW_SECONDS / INTERVAL_SECONDS)

RUNNING = "megatron_num_requests_running"
WAITING = "megatron_num_requests_waiting"
QUEUED_TOKENS = "megatron_queued_prompt_tokens"
KV_USAGE = "megatron_kv_cache_usage_perc"
CACHE_HITS = "megatron_prefix_cache_hits_total"
CACHE_QUERIES = "megatron_prefix_cache_queries_total"
TOKENS = "megatron_generation_tokens_total"
DRAFTED = "vllm:spec_decode_num_draft_tokens_total"
ACCEPTED = "vllm:spec_decode_num_accepted_tokens_total"
"""Metrics of speculative decoding, which only engines with speculation have."""
EPOCH = "megatron_generation_epoch"
QUEUED = "megatron_coordinator_queued_requests"
TTFT = "megatron_time_to_first_token_seconds"
ITL = "megatron_inter_token_latency_seconds"
VALUES = frozenset(
    {
        *(RUNNING, WAITING, QUEUED_TOKENS, KV_USAGE, CACHE_HITS, CACHE_QUERIES, TOKENS, DRAFTED, ACCEPTED, EPOCH),
        QUEUED,
    }
)
HISTOGRAMS = frozenset({TTFT, ITL})


@dataclass(frozen=True, slots=True)
class PodMetrics:
    """The metrics of one pod that the dashboard shows.

    values:  sum of each metric over all labels, by the metric's name.
    buckets: for the name of each histogram, the cumulative counts by upper bound in seconds.
    """

    values: dict[str, float] = field(default_factory=dict)
    buckets: dict[str, dict[float, float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EngineSample:
    """The metrics of one engine at one time.

    A value is None if the metrics page lacks the metric. A rate is also None if there is no earlier page.

    queued_tokens:   number of prompt tokens that are neither computed nor in the prefix cache; only for native engines.
    prefix_hit_rate: fraction of the looked-up prompt tokens that were in the prefix cache, since the engine started.
    draft_hit_rate:  fraction of the speculative draft tokens that the model accepted, since the engine started.
    """

    running: float | None = None
    waiting: float | None = None
    queued_tokens: float | None = None
    kv_usage: float | None = None
    prefix_hit_rate: float | None = None
    draft_hit_rate: float | None = None
    tokens_per_second: float | None = None
    epoch: float | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """The metrics of a resource at one time.

    Latencies are quantiles over the time since the previous sample, in seconds. They are None if no latency was
    measured in this time.

    at:     Unix time.
    queued: number of requests that wait in the coordinator.
    """

    at: float
    tokens_per_second: float | None
    queued: float | None
    ttft_p50: float | None
    ttft_p95: float | None
    itl_p50: float | None
    itl_p95: float | None
    engines: dict[str, EngineSample]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def parse_page(text: str) -> PodMetrics:
    """Return the metrics that the dashboard shows, from a page in the Prometheus text format.

    Values that are not finite are omitted.

    Raises:
        ValueError: the text is not in this format.
    """
    values: defaultdict[str, float] = defaultdict(float)
    buckets: dict[str, dict[float, float]] = {}
    for family in text_string_to_metric_families(text):
        if family.name in HISTOGRAMS:
            counts = buckets.setdefault(family.name, defaultdict(float))
            for sample in family.samples:
                if sample.name == f"{family.name}_bucket" and math.isfinite(sample.value):
                    bound = float(sample.labels["le"])
                    if not math.isnan(bound):
                        counts[bound] += sample.value
            continue
        for sample in family.samples:
            if sample.name in VALUES and math.isfinite(sample.value):
                values[sample.name] += sample.value
    return PodMetrics(dict(values), {name: dict(counts) for name, counts in buckets.items()})


def quantile(counts: Mapping[float, float], share: float) -> float | None:
    """Return a quantile of a histogram, interpolated within its bucket as Prometheus does.

    Returns None if there are no observations. An observation above the highest finite bound counts as this bound.

    counts: cumulative counts by upper bound.
    share:  the quantile, from 0 to 1.
    """
    bounds = sorted(counts)
    if not bounds or counts[bounds[-1]] <= 0:
        return None
    rank, below, low = share * counts[bounds[-1]], 0.0, 0.0
    for bound in bounds:
        if counts[bound] >= rank and counts[bound] > below:
            if bound == float("inf"):
                break
            return low + (bound - low) * (rank - below) / (counts[bound] - below)
        below = counts[bound]
        low = bound if bound != float("inf") else low
    return low


def _increase(new: float, old: float) -> float:
    """Return the increase of a counter.

    If `new` is lower than `old`, the process has restarted, and the counter started at 0 again.
    """
    return new - old if new >= old else new


def _increases(pods: Iterable[tuple[PodMetrics | None, PodMetrics]], name: str) -> dict[float, float]:
    """Return the increase of each bucket of a histogram, summed over the pods that have an earlier page.

    pods: metrics of the earlier page and of the current page of each pod. The first is None if there is no earlier
          page.
    name: name of the histogram.
    """
    total: defaultdict[float, float] = defaultdict(float)
    for old, new in pods:
        if old is None:
            continue
        before = old.buckets.get(name, {})
        after = new.buckets.get(name, {})
        restarted = any(after.get(bound, 0.0) < count for bound, count in before.items())
        for bound, count in after.items():
            total[bound] += count if restarted else count - before.get(bound, 0.0)
    return total


def make_sample(
    *,
    at: float,
    seconds: float,
    before: Mapping[str, PodMetrics],
    engines: Mapping[str, PodMetrics],
    servers: Mapping[str, PodMetrics],
    coordinators: Iterable[PodMetrics],
) -> Sample:
    """Return the sample of the interval between the earlier pages and the current pages.

    Args:
        at:           Unix time of the current pages.
        seconds:      length of the interval.
        before:       earlier pages of engines and servers by name.
        engines:      current pages of engines by the engine's name.
        servers:      current pages of servers by the pod's name.
        coordinators: current pages of coordinators.
    """
    rows = {name: _engine(page, before.get(name), seconds) for name, page in engines.items()}
    rates = [row.tokens_per_second for row in rows.values() if row.tokens_per_second is not None]
    queued = [page.values[QUEUED] for page in coordinators if QUEUED in page.values]
    pairs = [(before.get(name), page) for name, page in servers.items()]
    ttft, itl = _increases(pairs, TTFT), _increases(pairs, ITL)
    return Sample(
        at=at,
        tokens_per_second=sum(rates) if rates else None,
        queued=sum(queued) if queued else None,
        ttft_p50=quantile(ttft, 0.5),
        ttft_p95=quantile(ttft, 0.95),
        itl_p50=quantile(itl, 0.5),
        itl_p95=quantile(itl, 0.95),
        engines=rows,
    )


def metrics_key(pod: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the component and the name under which a pod's metrics are shown. Returns None for a pod without metrics.

    The first pod of an engine has the metrics of all ranks of the engine. The other pods of the engine have none.
    """
    component, name = label(pod, LABEL_COMPONENT), pod["metadata"]["name"]
    if component == ENGINE:
        engine = label(pod, LABEL_ENGINE)
        return (ENGINE, engine) if label(pod, LABEL_POD_INDEX) in ("", "0") and name == f"{engine}-0" else None
    if component in (COORDINATOR, STANDBY):
        return COORDINATOR, name
    return (SERVER, name) if component == SERVER else None


def sample_pods(
    *,
    at: float,
    seconds: float,
    before: Mapping[str, PodMetrics],
    pods: Mapping[str, tuple[str, str]],
    pages: Mapping[str, PodMetrics],
) -> tuple[Sample, dict[str, PodMetrics]]:
    """Return the sample of one interval, and the pages to pass as `before` for the next interval.

    Args:
        at:      Unix time of the current pages.
        seconds: length of the interval.
        before:  earlier pages of engines and servers by name.
        pods:    component and name of each pod, from metrics_key(), by the pod's name.
        pages:   current metrics page of each pod, by the pod's name.
    """
    by_kind: dict[str, dict[str, PodMetrics]] = {ENGINE: {}, SERVER: {}, COORDINATOR: {}}
    for pod, page in pages.items():
        component, counted_as = pods[pod]
        by_kind[component][counted_as] = page
    engines, servers = by_kind[ENGINE], by_kind[SERVER]
    coordinators = by_kind[COORDINATOR].values()
    taken = make_sample(
        at=at, seconds=seconds, before=before, engines=engines, servers=servers, coordinators=coordinators
    )
    return taken, {**engines, **servers}


def _engine(page: PodMetrics, before: PodMetrics | None, seconds: float) -> EngineSample:
    values = page.values
    queries, drafted = values.get(CACHE_QUERIES, 0.0), values.get(DRAFTED, 0.0)
    rate = None
    if before is not None and TOKENS in values and seconds > 0:
        rate = _increase(values[TOKENS], before.values.get(TOKENS, 0.0)) / seconds
    return EngineSample(
        running=values.get(RUNNING),
        waiting=values.get(WAITING),
        queued_tokens=values.get(QUEUED_TOKENS),
        kv_usage=values.get(KV_USAGE),
        prefix_hit_rate=values.get(CACHE_HITS, 0.0) / queries if queries else None,
        draft_hit_rate=values.get(ACCEPTED, 0.0) / drafted if drafted else None,
        tokens_per_second=rate,
        epoch=values.get(EPOCH),
    )
