"""Metrics that are declared as fields: what /metrics shows of them, and which panels the dashboard gets."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from megatron_runtime.coordinator.core.counters import Counters
from megatron_runtime.engine.engine_request import BackendStats
from megatron_runtime.process.metrics import Histogram, counter, declared, families, gauge, histogram
from tools import monitoring


@dataclass(eq=False)
class Example(Collector):
    not_shown: int = 7
    answers: int = counter("answers", "Answers.", vllm=True)
    load: float = gauge("load", "Load.")
    seconds: Histogram = histogram("wait_seconds", "Time.", bounds=(0.5, 2.0), panel="Time to wait")

    def collect(self) -> Iterator[Metric]:
        return families(self, "example_")


def test_a_declared_field_is_a_metric_with_its_name_text_type_and_value() -> None:
    example = Example(answers=3, load=0.25)
    for value in (0.1, 0.5, 1.0, 9.0):
        example.seconds.observe(value)
    registry = CollectorRegistry()
    registry.register(example)
    shown = {metric.name: (metric.type, metric.documentation) for metric in registry.collect()}
    assert shown == {
        "example_answers": ("counter", "Answers."),
        "example_load": ("gauge", "Load."),
        "example_wait_seconds": ("histogram", "Time."),
    }
    value = registry.get_sample_value
    assert (value("example_answers_total"), value("example_load")) == (3, 0.25)
    buckets = [value("example_wait_seconds_bucket", {"le": bound}) for bound in ("0.5", "2.0", "+Inf")]
    assert buckets == [2, 3, 4], "a value at a bound is counted up to it"
    assert (value("example_wait_seconds_count"), value("example_wait_seconds_sum")) == (4, 10.6)


def test_metrics_that_vllm_has_are_chosen_by_their_declaration() -> None:
    assert [metric.name for metric in families(Example(), "vllm:", only_vllm=True)] == ["vllm:answers"]


def test_each_instance_has_a_histogram_of_its_own() -> None:
    assert Example().seconds is not Example().seconds


@pytest.mark.parametrize("record", [Counters, BackendStats])
def test_names_are_declared_once_and_have_a_text(record: type) -> None:
    metrics = [metric for _, metric in declared(record)]
    assert len({metric.name for metric in metrics}) == len(metrics) > 5
    assert all(metric.text for metric in metrics)


def test_a_panel_shows_the_metrics_that_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitoring, "Counters", Example)
    panels = {title: (unit, curves) for title, unit, curves in monitoring.declared_panels()}
    unit, curves = panels["Time to wait"]
    assert (unit, [legend for _, legend in curves]) == ("s", ["p50", "p99"])
    assert all("megatron_coordinator_wait_seconds_bucket" in query for query, _ in curves)
    titles = {metric.panel for _, metric in declared(BackendStats) if metric.panel}
    assert titles == {"Waiting inside engines"} == panels.keys() - {"Time to wait"}
