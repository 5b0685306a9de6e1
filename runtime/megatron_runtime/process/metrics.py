"""Declares metrics as fields of a dataclass, each with its name, type and help text.

Code changes a metric by assigning to its field, which is cheap. The output of /metrics, the reference page, and the
panels of the dashboard are derived from the declarations.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import accumulate
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from prometheus_client.core import Metric

SECONDS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300)
"""Default bucket bounds of histograms of durations, in seconds."""


class Histogram:
    """A histogram.

    bounds: upper bounds of the buckets, ascending.
    counts: number of values in each bucket; the last bucket has the values above the last bound.
    total:  sum of the values.
    """

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total: float = 0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """The declaration of a metric.

    name:  name without the prefix of the component, and without a counter's `_total`.
    vllm:  whether vLLM has a metric of the same name and meaning.
    panel: title of the dashboard's panel that shows the metric; empty if no panel is derived.
    """

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    text: str
    vllm: bool = False
    panel: str = ""


def counter(name: str, text: str, **options: Any) -> Any:
    """Return a dataclass field that declares a counter, which only increases. options: more fields of Declaration."""
    return field(default=0, metadata={"metric": Declaration(kind="counter", name=name, text=text, **options)})


def gauge(name: str, text: str, **options: Any) -> Any:
    """Return a dataclass field that declares a gauge, which holds a current value."""
    return field(default=0, metadata={"metric": Declaration(kind="gauge", name=name, text=text, **options)})


def histogram(name: str, text: str, *, bounds: Sequence[float] = SECONDS, **options: Any) -> Any:
    """Return a dataclass field that declares a Histogram."""
    declaration = Declaration(kind="histogram", name=name, text=text, **options)
    return field(default_factory=lambda: Histogram(bounds), metadata={"metric": declaration})


def declared(record: Any) -> list[tuple[str, Declaration]]:
    """Return the metrics that `record`, a dataclass or an instance of one, declares, as pairs (field name, metric)."""
    return [(each.name, each.metadata["metric"]) for each in fields(record) if "metric" in each.metadata]


def families(record: Any, prefix: str, *, only_vllm: bool = False) -> Iterator[Metric]:
    """Yield the metrics of an instance as families for the Prometheus client.

    only_vllm: yield only metrics that vLLM also has.
    """
    # Imported here, because it takes a tenth of a second and a coordinator binds its ports first.
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    for attribute, metric in declared(record):
        value, name = getattr(record, attribute), prefix + metric.name
        if only_vllm and not metric.vllm:
            continue
        if metric.kind == "counter":
            yield CounterMetricFamily(name, metric.text, value=value)
        elif metric.kind == "gauge":
            yield GaugeMetricFamily(name, metric.text, value=value)
        else:
            bounds = [*(str(float(bound)) for bound in value.bounds), "+Inf"]
            family = HistogramMetricFamily(name, metric.text)
            family.add_metric([], list(zip(bounds, accumulate(value.counts), strict=True)), value.total)
            yield family


def labelled(family: Any, values: Iterable[tuple[str, float]]) -> Metric:
    """Add a metric for each (label value, value) pair to `family`, and return `family`."""
    for label, value in values:
        family.add_metric([label], float(value))
    metric: Metric = family
    return metric
