"""The benchmarks run and report every figure. No test checks the size of a figure."""

import asyncio
import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner
from coordinator_core import main as measure_core
from coordinator_latency import main as measure_latency
from fleet import free_ports
from random_checkpoint import LLAMA, random_tensors, write_model

from megatron_runtime.cli import main
from megatron_runtime.cli.bench.report import percentiles

from .test_serve_load import server

COORDINATOR_FIGURES = {
    "start_seconds",
    "idle_rss_mib",
    "sequential_p50_ms",
    "sequential_p99_ms",
    "requests_per_second",
    "cpu_us_per_request",
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
    assert all(math.isfinite(value) for value in document["figures"].values())
    assert all(value >= 0 for value in document["figures"].values())
    return document["figures"]


def test_the_help_names_every_benchmark() -> None:
    output = bench("--help")
    assert all(name in output for name in ("coordinator", "engine", "routing", "serve"))


def test_a_table_in_a_pipe_is_as_wide_as_its_content(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    output = bench("routing", "--engines", "2", "--requests", "4", "--seeds", "1", "--policy", "LongestPrefix")
    assert all(text in output for text in ("LongestPrefix", "first token p50", "hit rate")), output


def routing_figures(path: Path, *arguments: str) -> dict[str, dict[str, list[float]]]:
    bench("routing", *arguments, "--json", str(path))
    return json.loads(path.read_text())["figures"]


def test_routing_compares_policies_on_a_shape(tmp_path: Path) -> None:
    options = ("--engines", "2", "--requests", "10", "--seeds", "2", "--policy", "FirstCome", "--policy", "LeastCost")
    figures = routing_figures(tmp_path / "figures.json", *options)
    assert set(figures) == {f"{name}_{chunk}" for name in ("FirstCome", "LeastCost") for chunk in (512, 2048, 8192)}
    for values in figures.values():
        for first, last, gap in zip(values["ttft_p50_ms"], values["ttft_p99_ms"], values["gap_p50_ms"], strict=True):
            assert 0 < first <= last
            assert gap > 0
        assert len(set(values["ttft_p50_ms"])) == 2, "two traces"
    assert routing_figures(tmp_path / "again.json", *options) == figures, "the time is simulated"


def test_routing_compares_engines_with_and_without_roles(tmp_path: Path) -> None:
    options = ("--engines", "3", "--requests", "40", "--seeds", "1", "--policy", "LeastCost", "--chunk", "2048")
    roles = ("--prefill-engines", "0", "--prefill-engines", "1")
    figures = routing_figures(tmp_path / "figures.json", *options, *roles)
    assert set(figures) == {"LeastCost_2048", "LeastCost_2048_1"}
    assert figures["LeastCost_2048"]["split_share"] == [0]
    assert 0 < figures["LeastCost_2048_1"]["split_share"][0] < 1
    assert figures["LeastCost_2048_1"]["gap_p99_ms"] < figures["LeastCost_2048"]["gap_p99_ms"]
    result = CliRunner().invoke(main, ["bench", "routing", "--engines", "3", "--prefill-engines", "3"])
    assert result.exit_code != 0
    assert "at most 2" in result.output


def test_routing_reads_traces(tmp_path: Path) -> None:
    azure, mooncake = tmp_path / "azure.csv", tmp_path / "mooncake.jsonl"
    lines = ["TIMESTAMP,ContextTokens,GeneratedTokens"]
    lines += [f"2023-11-16 18:17:0{second}.9799600,{500 * second + 100},5" for second in range(4)]
    azure.write_text("\n".join(lines) + "\n")
    rows = [
        {"timestamp": 500 * n, "input_length": 1100, "output_length": 4, "hash_ids": [1, 2, n + 3]} for n in range(6)
    ]
    mooncake.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = ("--engines", "2", "--policy", "LeastCost", "--trace")
    assert routing_figures(tmp_path / "a.json", *options, str(azure))["LeastCost_512"]["hit_rate"] == [0]
    assert routing_figures(tmp_path / "m.json", *options, str(mooncake))["LeastCost_512"]["hit_rate"][0] > 0.5
    azure.write_text("TIMESTAMP,ContextTokens\nnow,5\n")
    for wrong, message in ((str(azure), "line 2"), ("no-such-shape", "azure-2024-code")):
        result = CliRunner().invoke(main, ["bench", "routing", "--trace", wrong])
        assert result.exit_code != 0
        assert message in result.output


def test_coordinator(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    sizes = ("--clients", "2", "--engines", "2", "--requests", "100", "--prompt-tokens", "64")
    output = bench("coordinator", *sizes, "--json", str(path))
    assert "coordinator's CPU per request" in output
    figures = figures_of(path, "coordinator")
    assert set(figures) == COORDINATOR_FIGURES
    assert json.loads(path.read_text())["options"]["requests"] == 100
    assert figures["idle_rss_mib"] > 1
    assert figures["requests_per_second"] > 0


def test_the_latency_of_a_coordinator(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    sizes = ("--clients", "2", "--engines", "2", "--requests", "100", "--prompt-tokens", "64", "--rate", "200")
    result = CliRunner().invoke(measure_latency, [*sizes, "--json", str(path)])
    assert result.exit_code == 0, result.output
    assert set(figures_of(path, "coordinator_latency")) == {"latency_p50_ms", "latency_p99_ms"}


def test_the_cost_of_a_request_in_the_core(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    policies = "LoadBalanced", "LeastCost"
    arguments = [part for policy in policies for part in ("--policy", policy)]
    result = CliRunner().invoke(measure_core, [*arguments, "--batches", "1", "--json", str(path)])
    assert result.exit_code == 0, result.output
    figures = figures_of(path, "coordinator_core")
    assert set(figures) == {f"{policy}_{what}" for policy in policies for what in ("us", "instructions")}
    assert 0 < figures["LoadBalanced_instructions"] < figures["LeastCost_instructions"]


def test_more_clients_than_requests_end(tmp_path: Path) -> None:
    path = tmp_path / "figures.json"
    bench("coordinator", "--clients", "9", "--requests", "4", "--prompt-tokens", "8", "--json", str(path))
    assert set(figures_of(path, "coordinator")) == COORDINATOR_FIGURES


@pytest.mark.parametrize(("count", "median", "percentile_99"), [(1, 1, 1), (2, 2, 2), (100, 51, 100), (1000, 501, 991)])
def test_percentiles_are_measured_values_in_milliseconds(count: int, median: int, percentile_99: int) -> None:
    figures = percentiles("latency", "request", range(count, 0, -1))
    assert [(figure.key, figure.value, figure.unit) for figure in figures] == [
        ("latency_p50_ms", 1000 * median, "ms"),
        ("latency_p99_ms", 1000 * percentile_99, "ms"),
    ]


def test_engine(tmp_path: Path) -> None:
    write_model(tmp_path / "model", LLAMA, random_tensors(LLAMA))
    path = tmp_path / "figures.json"
    options = ("--dtype", "float32", "--batch", "1,3", "--prompt-tokens", "8", "--new-tokens", "5", "--threads", "1")
    bench("engine", "--model", str(tmp_path / "model"), *options, "--kv-cache-memory", "4Mi", "--json", str(path))
    figures = figures_of(path, "engine")
    each = {"prefill_tokens_per_s", "first_token_ms", "decode_tokens_per_s", "weights_gb_per_s", "percent_of_bound"}
    each |= {"percent_of_compute", "decode_percent_of_compute"}
    runs = {f"b{batch}_{name}" for batch in (1, 3) for name in each}
    assert set(figures) == {"load_seconds", "bandwidth_gb_per_s", "products_gmac_per_s", "peak_memory_mib", *runs}
    assert figures["b3_decode_tokens_per_s"] > 0


@pytest.mark.parametrize("batch", ["0", "1,,2", "many"])
def test_a_batch_that_is_not_a_list_of_numbers_is_rejected(batch: str) -> None:
    result = CliRunner().invoke(main, ["bench", "engine", "--batch", batch])
    assert result.exit_code == 2
    assert "such as 1,8,32" in result.output


async def test_serve(tmp_path: Path) -> None:
    """The step `bench_serve` of test_gpu_campaign.py measures `megatron serve`."""
    path = tmp_path / "figures.json"
    sizes = ("--concurrency", "1,3", "--requests", "4", "--new-tokens", "2")
    async with server() as (url, _):
        await asyncio.to_thread(bench, "serve", "--url", url, "--model", "m", *sizes, "--json", str(path))
    figures = figures_of(path, "serve")
    names = {"tokens_per_s", "retries", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms"}
    assert set(figures) == {f"c{clients}_{name}" for clients in (1, 3) for name in names}


def test_serve_reports_the_url_of_a_server_that_does_not_answer() -> None:
    (port,) = free_ports(1)
    result = CliRunner().invoke(main, ["bench", "serve", "--url", f"http://127.0.0.1:{port}"])
    assert result.exit_code == 1
    assert "no server answers" in result.output
