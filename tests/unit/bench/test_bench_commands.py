"""The benchmarks run and say what they measured; how much it was is nobody's test."""

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from megatron_runtime.cli import main
from megatron_runtime.cli.bench.report import percentile

COORDINATOR_FIGURES = {
    "start_seconds",
    "idle_rss_mib",
    "sequential_p50_ms",
    "sequential_p99_ms",
    "requests_per_second",
    "cpu_us_per_request",
    "added_p50_ms",
    "added_p99_ms",
    "partials_per_second",
    "cpu_us_per_partial",
}


def bench(*arguments: str) -> str:
    result = CliRunner().invoke(main, ["bench", *arguments])
    assert result.exit_code == 0, result.output
    return result.output


def figures_of(path: Path, benchmark: str) -> dict[str, float]:
    document = json.loads(path.read_text())
    assert document["benchmark"] == benchmark
    assert document["machine"]["cpus"] > 0
    assert all(math.isfinite(value) and value >= 0 for value in document["figures"].values())
    return document["figures"]


def test_the_help_names_every_benchmark() -> None:
    assert "coordinator" in bench("--help")


def test_coordinator(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    sizes = ("--clients", "2", "--engines", "2", "--requests", "100", "--prompt-tokens", "64", "--rate", "200")
    output = bench("coordinator", *sizes, "--json", str(path))
    assert "coordinator's CPU per request" in output
    figures = figures_of(path, "coordinator")
    assert set(figures) == COORDINATOR_FIGURES
    assert json.loads(path.read_text())["options"]["requests"] == 100
    assert figures["idle_rss_mib"] > 1
    assert figures["requests_per_second"] > 0


def test_more_clients_than_requests_end_too(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    bench("coordinator", "--clients", "9", "--requests", "4", "--prompt-tokens", "8", "--json", str(path))
    assert set(figures_of(path, "coordinator")) == COORDINATOR_FIGURES


@pytest.mark.parametrize(("percent", "value"), [(0, 1), (50, 51), (99, 100), (100, 100)])
def test_percentile(percent: float, value: float) -> None:
    assert percentile(range(100, 0, -1), percent) == value
