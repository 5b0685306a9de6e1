"""Rates and quantiles from metrics pages."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from megatron_kubectl import top
from megatron_kubectl.samples import (
    HISTOGRAMS,
    VALUES,
    PodMetrics,
    Sample,
    make_sample,
    parse_page,
    quantile,
)

VLLM = Path(__file__).parents[1] / "vllm" / "interfaces.json"
REFERENCE = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
INF = float("inf")


def test_every_metric_exists() -> None:
    own = set(re.findall(r"`(megatron_\w+)`", REFERENCE.read_text()))
    for interface in json.loads(VLLM.read_text()).values():
        assert own | {f"{name}_total" for name in interface["metrics"]} >= VALUES | HISTOGRAMS


def test_the_share_of_accepted_drafts_is_shown_for_engines_that_speculate() -> None:
    counts = {"vllm:spec_decode_num_draft_tokens": 40, "vllm:spec_decode_num_accepted_tokens": 10}
    lines = [f'# TYPE {name} counter\n{name}_total{{engine="0"}} {count}\n' for name, count in counts.items()]
    shown = sample(None, parse_page("".join(lines)))
    assert shown.engines["e"].draft_hit_rate == 0.25
    assert sample(None, page(1, (1, 1, 1))).engines["e"].draft_hit_rate is None
    status = {"engines": [{"name": "e", "state": "Running", "ranks": 1}]}
    resource = {"metadata": {"name": "demo", "namespace": "default"}, "status": status}
    _, header, row = top.lines(top.view(resource, shown, ""))
    place = header.index("DRAFT HITS")
    assert row[place : place + 3] == "25%"


@pytest.mark.parametrize(
    ("counts", "share", "expected"),
    [
        ({}, 0.5, None),
        ({1.0: 0.0, INF: 0.0}, 0.5, None),
        ({1.0: 10.0, 2.0: 10.0, INF: 10.0}, 0.5, 0.5),
        ({1.0: 0.0, 2.0: 10.0, INF: 10.0}, 0.5, 1.5),
        ({1.0: 5.0, 2.0: 5.0, 4.0: 10.0, INF: 10.0}, 0.75, 3.0),
        ({1.0: 1.0, INF: 10.0}, 0.95, 1.0),
    ],
)
def test_quantiles_are_interpolated_within_their_bucket(
    counts: dict[float, float], share: float, expected: float | None
) -> None:
    assert quantile(counts, share) == expected


def page(tokens: float, counts: tuple[float, float, float]) -> PodMetrics:
    bounds = ("0.1", "0.2", "+Inf")
    name = "megatron_time_to_first_token_seconds"
    buckets = [
        f'{name}_bucket{{le="{bound}",model_name="{model}"}} {count / 2}'
        for model in "ab"
        for bound, count in zip(bounds, counts, strict=True)
    ]
    lines = [
        f"# TYPE {name} histogram",
        *buckets,
        "# TYPE megatron_generation_tokens counter",
        f"megatron_generation_tokens_total {tokens}",
    ]
    return parse_page("\n".join(lines) + "\n")


def sample(before: PodMetrics | None, after: PodMetrics) -> Sample:
    earlier = {} if before is None else {"e": before, "s": before}
    return make_sample(at=1.0, seconds=2.0, before=earlier, engines={"e": after}, servers={"s": after}, coordinators=[])


def test_a_page_sums_over_labels() -> None:
    found = page(7, (2, 4, 4))
    assert found.values == {"megatron_generation_tokens_total": 7.0}
    assert found.buckets == {"megatron_time_to_first_token_seconds": {0.1: 2.0, 0.2: 4.0, INF: 4.0}}


@pytest.mark.parametrize("value", ["NaN", "+Inf", "-Inf", "1e999"])
def test_values_that_are_not_finite_are_left_out(value: str) -> None:
    name, number = "megatron_time_to_first_token_seconds", float(value)
    assert page(number, (2, number, 4)) == PodMetrics({}, {name: {0.1: 2.0, INF: 4.0}})
    assert parse_page(f'# TYPE {name} histogram\n{name}_bucket{{le="NaN"}} 1\n').buckets == {name: {}}


def test_rates_and_latencies_are_those_of_the_interval() -> None:
    found = sample(page(100, (10, 10, 10)), page(300, (10, 20, 20)))
    assert (found.tokens_per_second, found.engines["e"].tokens_per_second) == (100.0, 100.0)
    assert found.ttft_p50 == pytest.approx(0.15)
    assert found.itl_p50 is None


def test_the_first_page_gives_no_rate() -> None:
    found = sample(None, page(100, (10, 10, 10)))
    assert (found.tokens_per_second, found.ttft_p50) == (None, None)


def test_counters_of_a_restarted_process_begin_at_zero() -> None:
    found = sample(page(100, (10, 10, 10)), page(30, (4, 4, 4)))
    assert found.tokens_per_second == 15.0
    assert found.ttft_p50 == pytest.approx(0.05)
