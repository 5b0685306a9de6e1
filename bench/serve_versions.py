"""What a server costs for each request, beside the server of another checkout. Engines of both echo their prompts.

    python bench/serve_versions.py --against ../other --json serve_versions.json

`megatron serve` of both starts once, with the virtual environment .venv of its checkout; then one is loaded while the
other is idle. Each round sends the same streamed requests to both, in alternating order. Each request has its own
connection. Figures are compared within a round.
"""

from __future__ import annotations

import os
from pathlib import Path
from statistics import median
from typing import Any

import click
import psutil
from peer_bench.cells import Engine
from peer_bench.servers import Server
from peers import commit

from megatron_runtime.cli.bench.report import machine
from megatron_runtime.cli.bench.serve import measure
from megatron_runtime.protocol import strict_json as json

THIS, OTHER = "this", "other"
LOADS = ((1, 2), (1, 64), (8, 2), (8, 64))
"""Clients at once, and tokens of each answer."""
LEAST_RATIO = 0.97
PROGRAM = "server"
"""The command of `megatron` that the server's process runs."""
REPOSITORY = Path(__file__).parents[1]


def start(name: str, checkout: Path) -> Server:
    command = [str(checkout / ".venv/bin/megatron"), "serve", "--backend", "echo", "--port", "{port}"]
    server = Server(Engine(name, "echo", command), "/readyz")
    server.start(os.sched_getaffinity(0))
    click.echo(f"{name} is ready: {checkout}")
    return server


def server_process(server: Server) -> psutil.Process:
    """Return the process of the HTTP server: `megatron serve` starts each component as a process."""
    assert server.process is not None
    for process in psutil.Process(server.process.pid).children(recursive=True):
        if PROGRAM in process.cmdline():
            return process
    raise click.ClickException(f"{server.engine.name}: no process with the argument {PROGRAM!r} in its command line")


def cpu_seconds(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


def run(server: Server, clients: int, tokens: int, *, requests: int, seed: int) -> dict[str, float]:
    """Return requests per second of the load, and CPU microseconds of the HTTP server for each request."""
    process = server_process(server)
    before = cpu_seconds(process)
    options: dict[str, Any] = {"url": server.url, "model": server.model, "api_key": None, "prompt_words": 64}
    answers = measure(clients, requests=requests, new_tokens=tokens, seed=seed, **options)
    used = cpu_seconds(process) - before
    answered = len(answers.first)
    return {"requests_per_s": answered / answers.duration, "cpu_us": 1e6 * used / (answered + 1)}


@click.command()
@click.option("--against", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True)
@click.option("--rounds", type=click.IntRange(min=1), default=8, show_default=True)
@click.option("--requests", type=click.IntRange(min=1), default=300, show_default=True, help="Of a run of 2 tokens.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures there.")
def main(*, against: Path, rounds: int, requests: int, json_file: Path | None) -> None:
    """Compare requests per second and CPU time of the servers of two checkouts."""
    checkouts = {THIS: REPOSITORY, OTHER: against.absolute()}
    facts = machine() | {"commit": commit()}
    rows: list[dict[str, Any]] = []
    servers: dict[str, Server] = {}
    try:
        for name, checkout in checkouts.items():
            servers[name] = start(name, checkout)
            run(servers[name], 8, 8, requests=100, seed=-1)  # warm-up
        for clients, tokens in LOADS:
            count = requests if tokens < 8 else requests // 4
            found: dict[str, list[dict[str, float]]] = {THIS: [], OTHER: []}
            for number in range(rounds):
                for name in sorted(servers, reverse=number % 2 == 1):
                    found[name].append(run(servers[name], clients, tokens, requests=count, seed=number))
            row: dict[str, Any] = {"clients": clients, "tokens": tokens}
            for figure, digits in (("requests_per_s", 1), ("cpu_us", 0)):
                pairs = [(one[figure], two[figure]) for one, two in zip(found[THIS], found[OTHER], strict=True)]
                row[figure] = {
                    THIS: round(median(one for one, _ in pairs), digits),
                    OTHER: round(median(two for _, two in pairs), digits),
                    "ratio": round(median(one / two for one, two in pairs), 3),
                    "ratio_by_round": [round(one / two, 3) for one, two in pairs],
                }
            rows.append(row)
            shown = row["requests_per_s"]
            click.echo(
                f"{clients} clients, {tokens:2} tokens: {shown[THIS]} and {shown[OTHER]} requests/s, ratio "
                f"{shown['ratio']} (goal {LEAST_RATIO}); CPU time of the server, ratio {row['cpu_us']['ratio']}"
            )
    finally:
        for server in servers.values():
            server.close()
    if json_file is not None:
        json_file.write_text(json.dumps({"machine": facts, "rounds": rounds, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
