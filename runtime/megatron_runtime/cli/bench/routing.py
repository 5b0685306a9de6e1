"""`megatron bench routing`: compares routing policies on a trace of requests, with simulated engines.

The lengths of the traces named azure-* are drawn from published statistics of the Azure LLM inference traces
(https://github.com/Azure/AzurePublicDataset). Splitwise (ISCA 2024) describes the traces of 2023, and DynamoLLM (HPCA
2025) the traces of 2024. The traces contain no texts, so no two prompts share a prefix.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
from rich.table import Table

from megatron_runtime.backends.native.scheduler import Scheduler
from megatron_runtime.cli.bench.report import json_file, print_table, write_figures
from megatron_runtime.cli.bench.simulated_pool import FirstComeScheduler, SimulatedPool, StepModel, TraceRequest
from megatron_runtime.cli.options import COUNT
from megatron_runtime.process.options import FiniteRange
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.requests.config import RoutingPolicy

SHORT_TOKENS = 2000
"""Prompts with fewer tokens than this are reported separately."""
TRACE_BLOCK_TOKENS = 512
"""Number of tokens per block of `hash_ids` in Mooncake traces."""
MAX_PROMPT_TOKENS, MAX_ANSWER_TOKENS = 32_768, 4096
FULL_ROWS = 48
"""Number of requests that generate a token in each step of a fully loaded engine."""
CHUNKS = (512, 2048, 8192)
WARM_UP = 10
"""The first 1/WARM_UP of the requests is not measured, because engines report their rates only after some steps."""
POLICIES: Mapping[str, tuple[RoutingPolicy, type[Scheduler]]] = {
    **{policy.value: (policy, Scheduler) for policy in RoutingPolicy},
    "FirstCome": (RoutingPolicy.LOAD_BALANCED, FirstComeScheduler),
}
"""Routing policies and engine schedulers, by the names that the command accepts."""
_VOCABULARY = 1 << 16

ENGINES: Mapping[str, StepModel] = {
    "h100-8b": StepModel(
        step=5.753e-3,
        prompt=17.25e-6,
        decode=6.0e-6,
        held=0.039e-6,
        kv_tokens=467_280,
        kv_bytes=128 << 10,
        link_bytes=50e9,
    ),
    "cpu-135m": StepModel(
        step=2.92e-3,
        prompt=0.523e-3,
        decode=0.395e-3,
        held=0.702e-6,
        kv_tokens=65_536,
        kv_bytes=23_040,
        link_bytes=1.25e9,
    ),
}
"""Measured step costs of engines, by name.

h100-8b: Llama 3.1 8B in bfloat16 on one H100 with vLLM 0.8.4. The coefficients come from BLIS
    (github.com/inference-sim/inference-sim, defaults.yaml). `held` is 128 KiB per token at 3.35 TB/s.
cpu-135m: SmolLM2-135M in int4 on 2 CPUs with the native engine. The coefficients are fitted to decode steps with 28
    combinations of batch size and context length (docs/measurements/2026-11-25-decode-step-zen4.json). `prompt` is
    1,912 tokens per second (2026-11-26-peers-zen4.md).
The link speeds are assumptions: 400 and 10 Gbit/s.
"""

Sample = Callable[[np.random.Generator], tuple[int, int]]
"""A function that draws the number of tokens of a prompt and of its answer."""


def _quantiles(*points: tuple[float, float]) -> Callable[[np.random.Generator], int]:
    """Return a function that draws token counts from a distribution. points: pairs of a probability and its quantile.

    Between two quantiles, the logarithm of the count is interpolated linearly.
    """
    places, tokens = zip(*points, strict=True)
    logs = np.log(tokens)
    return lambda rng: round(math.exp(np.interp(rng.random(), places, logs)))


def _lognormal(median: float, mean: float, maximum: int) -> Callable[[np.random.Generator], int]:
    sigma = math.sqrt(2 * math.log(mean / median))
    return lambda rng: min(maximum, max(1, round(rng.lognormal(math.log(median), sigma))))


def _pair(prompt: Callable[[np.random.Generator], int], answer: Callable[[np.random.Generator], int]) -> Sample:
    return lambda rng: (prompt(rng), answer(rng))


def _mixed(rng: np.random.Generator) -> tuple[int, int]:
    is_long = rng.random() < 0.1
    prompt = rng.integers(8000, 30_001) if is_long else min(2000, 1 + round(rng.lognormal(math.log(400), 0.8)))
    return int(prompt), min(1000, 1 + round(rng.lognormal(math.log(100), 0.9)))


SHAPES: Mapping[str, Sample] = {
    "azure-2023-conversation": _pair(_lognormal(1020, 1155, 14_050), _lognormal(129, 211, 1000)),
    "azure-2023-code": _pair(_lognormal(1500, 2048, 7437), _lognormal(13, 28, 1899)),
    "azure-2024-conversation": _pair(
        _quantiles((0, 8), (0.5, 928), (0.9, 3830), (0.99, 6683), (1, 7999)),
        _quantiles((0, 1), (0.5, 41), (0.9, 342), (0.99, 694), (1, 1500)),
    ),
    "azure-2024-code": _pair(
        _quantiles((0, 16), (0.5, 1930), (0.9, 6251), (0.99, 7685), (1, 7743)),
        _quantiles((0, 1), (0.5, 8), (0.9, 43), (0.99, 271), (1, 5000)),
    ),
    "uniform": lambda rng: (1000, 200),
    "mixed": _mixed,
}
"""Distributions of prompt and answer lengths, by the name of a trace. Arrivals are a Poisson process."""


def synthesised(name: str, *, requests: int, rate: float, seed: int) -> list[TraceRequest]:
    """Return a random trace with the length distribution of the trace `name`. rate: requests per second."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, requests))
    trace = []
    for arrival in arrivals.tolist():
        prompt, answer = SHAPES[name](rng)
        tokens = rng.integers(_VOCABULARY, size=max(2, prompt), dtype=np.int32)
        trace.append(TraceRequest(arrival=arrival, prompt=tokens, tokens=max(1, answer)))
    return trace


def read_trace(path: Path, *, requests: int) -> list[TraceRequest]:
    """Return the first `requests` requests of a trace file.

    The file is Azure's CSV (TIMESTAMP, ContextTokens, GeneratedTokens), or Mooncake's JSON lines (timestamp in ms,
    input_length, output_length, hash_ids). Raises ValueError with the number of a line that cannot be parsed.
    """
    read = _mooncake if path.suffix == ".jsonl" else _azure
    trace: list[TraceRequest] = []
    with path.open() as lines:
        for number, request in enumerate(read(lines), 1):
            trace.append(request)
            if number == requests:
                break
    first = min((request.arrival for request in trace), default=0.0)
    return [replace(request, arrival=request.arrival - first) for request in trace]


def _azure(lines: Iterable[str]) -> Iterable[TraceRequest]:
    rng = np.random.default_rng(1)
    for number, row in enumerate(csv.DictReader(lines), 2):
        try:
            arrival = datetime.fromisoformat(row["TIMESTAMP"].strip()[:26]).timestamp()
            prompt, answer = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"line {number}: want TIMESTAMP, ContextTokens and GeneratedTokens ({error!r})") from error
        tokens = rng.integers(_VOCABULARY, size=_bounded(prompt, MAX_PROMPT_TOKENS), dtype=np.int32)
        yield TraceRequest(arrival=arrival, prompt=tokens, tokens=_bounded(answer, MAX_ANSWER_TOKENS))


def _mooncake(lines: Iterable[str]) -> Iterable[TraceRequest]:
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            arrival, ids = row["timestamp"] / 1000, [int(block) for block in row["hash_ids"]]
            prompt, answer = int(row["input_length"]), int(row["output_length"])
        except (KeyError, TypeError, ValueError) as error:
            message = "want timestamp, input_length, output_length and hash_ids"
            raise ValueError(f"line {number}: {message} ({error!r})") from error
        blocks = [
            np.random.default_rng(block).integers(_VOCABULARY, size=TRACE_BLOCK_TOKENS, dtype=np.int32)
            for block in ids[: MAX_PROMPT_TOKENS // TRACE_BLOCK_TOKENS]
        ]
        tokens = np.concatenate([*blocks, np.zeros(2, np.int32)])[: _bounded(prompt, MAX_PROMPT_TOKENS)]
        session = str(ids[0]) if ids else ""
        yield TraceRequest(arrival=arrival, prompt=tokens, tokens=_bounded(answer, MAX_ANSWER_TOKENS), session=session)


def _bounded(tokens: int, maximum: int) -> int:
    return max(2, min(tokens, maximum))


def rate_of(name: str, model: StepModel, *, engines: int, utilisation: float) -> float:
    """Return the number of requests per second that keeps the engines busy for the fraction `utilisation` of the time.

    The function assumes that each step has FULL_ROWS requests.
    """
    rng = np.random.default_rng(0)
    draws = [SHAPES[name](rng) for _ in range(2000)]
    seconds = [
        prompt * model.prompt + answer * (model.decode + (prompt + answer / 2) * model.held + model.step / FULL_ROWS)
        for prompt, answer in draws
    ]
    return utilisation * engines / float(np.mean(seconds))


def measure(
    trace: Sequence[TraceRequest], model: StepModel, name: str, *, engines: int, prefill_engines: int, chunk: int
) -> dict[str, float]:
    """Run a trace with the routing policy `name` of POLICIES.

    Return percentiles in milliseconds, the hit rate of the prefix caches, and the share of requests for which one
    engine computed the prompt and another engine generated the answer.
    """
    run = [replace(request, gaps=[]) for request in trace]
    policy, scheduler = POLICIES[name]
    pool = SimulatedPool(
        model, engines=engines, prefill_engines=prefill_engines, policy=policy, scheduler=scheduler, chunk=chunk
    )
    pool.run(run)
    del run[: len(run) // WARM_UP]
    first = [request.first_token - request.arrival for request in run]
    short = [wait for wait, request in zip(first, run, strict=True) if len(request.prompt) < SHORT_TOKENS]
    series = {
        "ttft": first,
        "ttft_short": short or first,
        "gap": [gap for request in run for gap in request.gaps] or [0.0],
        "queue": [request.admitted - request.arrival for request in run],
    }
    figures = {
        f"{key}_p{percent}_ms": 1000 * float(np.percentile(seconds, percent))
        for key, seconds in series.items()
        for percent in (50, 90, 99)
    }
    return {**figures, "hit_rate": pool.hit_rate, "split_share": pool.num_split / len(trace)}


_COLUMNS = {
    "first token p50": "ttft_p50_ms",
    "p99": "ttft_p99_ms",
    f"under {SHORT_TOKENS} p50": "ttft_short_p50_ms",
    "p99 ": "ttft_short_p99_ms",
    "gap p50": "gap_p50_ms",
    "p90": "gap_p90_ms",
    " p99": "gap_p99_ms",
    "queue p99": "queue_p99_ms",
}
"""Columns of the table, in milliseconds: time to first token of all prompts and of short prompts, time between tokens,
and wait for an engine slot.
"""


def _source(context: click.Context, parameter: click.Parameter, value: str) -> str | Path:
    if value in SHAPES:
        return value
    if not Path(value).is_file():
        raise click.BadParameter(f"{value!r} is not a file; name a file or one of {', '.join(SHAPES)}")
    return Path(value)


@click.command()
@click.option(
    "--trace",
    callback=_source,
    default="mixed",
    help="Trace file (CSV as published by Azure, or .jsonl as published by Mooncake), or one of "
    + ", ".join(SHAPES)
    + ".",
)
@click.option("--engines", type=COUNT, default=8, help="Number of simulated engines.")
@click.option(
    "--engine",
    type=click.Choice(list(ENGINES)),
    default="h100-8b",
    help="Hardware and model whose step times are simulated.",
)
@click.option("--requests", type=COUNT, default=2000, help="Number of requests to take from the trace.")
@click.option(
    "--utilisation",
    type=FiniteRange(0.01, 1),
    default=0.85,
    help="Share of the engines' capacity that a built-in trace uses, which determines the arrival rate of requests.",
)
@click.option(
    "--seeds",
    type=COUNT,
    default=3,
    help="Number of runs of a built-in trace, each with different arrival times and request sizes.",
)
@click.option(
    "--policy",
    "policies",
    multiple=True,
    type=click.Choice(list(POLICIES)),
    default=("FirstCome", "LoadBalanced", "LongestPrefix", "LeastCost"),
    help="Policy to compare. FirstCome is LoadBalanced with engines that compute the oldest prompts first. Default: "
    "four policies. Repeatable.",
)
@click.option(
    "--chunk",
    "chunks",
    multiple=True,
    type=COUNT,
    default=CHUNKS,
    help="Maximum number of prompt tokens in a step. Default: 512, 2048 and 8192, one after another. Repeatable.",
)
@click.option(
    "--prefill-engines",
    multiple=True,
    type=click.IntRange(min=0),
    default=(0,),
    help="Number of engines with the role prefill. The other engines have the role decode. With 0, which is the "
    "default, no engine has a role. Repeatable.",
)
@json_file
def routing(*, trace: str | Path, json_file: Path | None, **options: Any) -> None:
    """Compare routing policies on one trace, in simulated time.

    The command runs the real coordinator core, schedulers and prefix caches. It computes the duration of each engine
    step with a formula. Every policy serves the same requests, with every combination of prompt tokens per step and
    number of prefill engines. For a built-in trace, the table shows medians over --seeds runs. The JSON file has the
    figures of each run.
    """
    model, engines = ENGINES[options["engine"]], options["engines"]
    if (most := max(options["prefill_engines"])) >= engines:
        message = f"{most} of {engines} engines: at least one engine has to decode; choose at most {engines - 1}"
        raise click.BadParameter(message, param_hint="--prefill-engines")
    if isinstance(trace, Path):
        try:
            traces = [read_trace(trace, requests=options["requests"])]
        except (ValueError, OSError) as error:
            raise click.BadParameter(f"{trace}: {error}", param_hint="--trace") from error
    else:
        rate = rate_of(trace, model, engines=engines, utilisation=options["utilisation"])
        seeds = range(1, options["seeds"] + 1)
        traces = [synthesised(trace, requests=options["requests"], rate=rate, seed=seed) for seed in seeds]
    names = "policy", "chunk", "prefill", *_COLUMNS, "hit rate", "split"
    table = Table(*names, title="Routing, in ms", title_justify="left")
    figures: dict[str, dict[str, list[float]]] = {}
    for chunk, name, split in product(options["chunks"], options["policies"], options["prefill_engines"]):
        rows = [
            measure(requests, model, name, engines=engines, prefill_engines=split, chunk=chunk) for requests in traces
        ]
        key = f"{name}_{chunk}_{split}" if split else f"{name}_{chunk}"
        figures[key] = by_key = {key: [row[key] for row in rows] for key in rows[0]}
        cells = (f"{median(by_key[key]):.4g}" for key in _COLUMNS.values())
        shares = (f"{median(by_key[key]):.0%}" for key in ("hit_rate", "split_share"))
        table.add_row(name, str(chunk), str(split), *cells, *shares)
    print_table(table)
    if json_file is not None:
        write_figures("routing", {"trace": str(trace), **options}, figures, json_file)
