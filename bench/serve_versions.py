"""Compares the cost of a request in server and coordinator between this checkout and another.

Echo engines answer the requests.

    python bench/serve_versions.py --against ../other --json serve_versions.json

Each checkout runs `megatron serve` in its virtual environment .venv, with an echo engine. The echo engine is
tests/support/echo_serve.py, or `--backend echo` in a checkout that lacks this file. While one server is loaded, the
other is idle. Each round sends the same streamed requests to both, in alternating order. Each request has its own
connection. Figures can vary more between two starts of one server than between the checkouts. So both servers start
several times.

First, the servers have no API keys. Then they have one key with limits that the load does not reach. Then `megatron
bench coordinator` runs in both checkouts, in alternation. Figures are compared within a round.

With --instructions, server and coordinator run under valgrind's callgrind. The figures are then numbers of instructions
in user space instead of CPU times. They vary by less than 1 %, independently of other load on the machine.

With --tools, the requests are chats with tools that the model of --model may call.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeAlias

import click
import psutil
from peer_bench.cells import Engine
from peer_bench.servers import Server
from peers import commit

from megatron_runtime.cli.bench.report import machine
from megatron_runtime.cli.bench.serve import WORDS, Answers, measure
from megatron_runtime.protocol import strict_json as json

THIS, OTHER = "this", "other"
LOADS = ((1, 2), (1, 64), (8, 2), (8, 64))
"""Number of concurrent clients, and number of tokens of each answer."""
MIN_RATIO, MAX_COST = 0.97, 1.03
"""Goals for this checkout, relative to the other: minimum requests per second, and maximum CPU time per request."""
COMPONENTS = ("server", "coordinator")
"""The `megatron` commands of the processes that are measured."""
CALLGRIND_SERVE = Path(__file__).parent / "peer_workers/callgrind_serve.py"
IDLE_SECONDS = 10
KEY = "key-of-the-benchmark"
KEYS = f"keys:\n- name: bench\n  key: {KEY}\n  requestsPerMinute: 1000000000\n  tokensPerMinute: 1000000000\n"
REPOSITORY = Path(__file__).parents[1]
Row: TypeAlias = dict[str, Any]
"""The load, and for each figure the values `this`, `other`, `ratio` and `ratio_by_round`."""


def start(name: str, checkout: Path, keys: Path | None, model: str | None, counts: Path | None) -> Server:
    """Start `megatron serve` of a checkout.

    keys:   file of the server's API keys.
    model:  model reference; None means that echo engines answer.
    counts: folder for callgrind's files; None means that no instructions are counted.
    """
    serve, environment = checkout / "tests/support/echo_serve.py", checkout / ".venv/bin"
    if counts is not None:
        engine = checkout / "tests/support/echo_engine.py"
        counted = [str(CALLGRIND_SERVE), str(counts), str(engine) if serve.exists() else ""]
        backend = ["--backend", "echo"] if not serve.exists() else []
        command = [str(environment / "python"), *counted, "serve", *backend, "--port", "{port}"]
    elif model is not None:
        command = [str(environment / "megatron"), "serve", "--model", model, "--device", "cpu", "--port", "{port}"]
    elif serve.exists():
        command = [str(environment / "python"), str(serve), "serve", "--device", "cpu", "--port", "{port}"]
    else:
        command = [str(environment / "megatron"), "serve", "--backend", "echo", "--port", "{port}"]
    if keys is not None:
        command += ["--api-keys-file", str(keys)]
    paths = {"PYTHONPATH": str(checkout / "tests/support")} if counts is not None else {}
    server = Server(Engine(name, "echo", command), "/readyz", paths, api_key=None if keys is None else KEY)
    server.start(os.sched_getaffinity(0))
    return server


def component(server: Server, command: str) -> psutil.Process:
    """Return the process that `megatron serve` has started for a component. command: name of its subcommand."""
    assert server.process is not None
    for process in psutil.Process(server.process.pid).children(recursive=True):
        if command in process.cmdline():
            return process
    raise click.ClickException(f"{server.engine.name}: no process with the argument {command!r} in its command line")


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU seconds of all threads of a process.

    The time is read from the CPU clock of the process, because /proc has a resolution of only 10 ms.
    """
    return time.clock_gettime(~process.pid << 3 | 2)  # the same clock id as from clock_getcpuclockid()


def instructions(process: psutil.Process, folder: Path) -> int:
    """Return the number of instructions that a process under callgrind has executed since the previous call.

    folder: folder to which callgrind writes its files.
    """
    subprocess.run(["callgrind_control", "--dump=count", str(process.pid)], check=True, capture_output=True)
    (file,) = folder.glob(f"out.{process.pid}.*")
    totals = re.search(r"^totals: (\d+)", file.read_text(), re.MULTILINE)
    file.unlink()
    if totals is None:
        raise click.ClickException(f"{file}: no line `totals:`, which callgrind writes")
    return int(totals[1])


def idle_rates(server: Server, folder: Path) -> dict[str, float]:
    """Return the instructions per second of each component while there are no requests.

    Timers execute these instructions. Timers fire at the same rate under callgrind.
    """
    processes = {name: component(server, name) for name in COMPONENTS}
    for process in processes.values():
        instructions(process, folder)
    time.sleep(IDLE_SECONDS)
    return {name: instructions(process, folder) / IDLE_SECONDS for name, process in processes.items()}


def counted_run(
    server: Server, folder: Path, idle: dict[str, float], clients: int, tokens: int, *, requests: int, seed: int
) -> dict[str, float]:
    """Send a load to a server. Return the number of instructions of each component per request.

    The instructions that timers execute during the load are not included.

    idle: instructions per second of each component while there are no requests.
    """
    processes = {name: component(server, name) for name in COMPONENTS}
    for process in processes.values():
        instructions(process, folder)
    begun = time.perf_counter()
    answers = load(server, clients, tokens, requests=requests, seed=seed, tools=0)
    used = {name: instructions(process, folder) for name, process in processes.items()}
    seconds, answered = time.perf_counter() - begun, len(answers.first) + 1
    return {f"{name}_instructions": (count - idle[name] * seconds) / answered for name, count in used.items()}


def load(server: Server, clients: int, tokens: int, *, requests: int, seed: int, tools: int) -> Answers:
    options: dict[str, Any] = {"url": server.url, "model": server.model, "api_key": server.api_key, "prompt_words": 64}
    if tools:
        options |= {"path": "/v1/chat/completions", "prompt": partial(chat, tools=tools)}
    return measure(clients, requests=requests, new_tokens=tokens, seed=seed, **options)


def run(server: Server, clients: int, tokens: int, *, requests: int, seed: int, tools: int) -> dict[str, float]:
    """Return requests per second of the load, and CPU microseconds of each component per request."""
    processes = {name: component(server, name) for name in COMPONENTS}
    before = {name: cpu_seconds(process) for name, process in processes.items()}
    answers = load(server, clients, tokens, requests=requests, seed=seed, tools=tools)
    used = {name: cpu_seconds(process) - before[name] for name, process in processes.items()}
    answered = len(answers.first)
    costs = {f"{name}_cpu_us": 1e6 * seconds / (answered + 1) for name, seconds in used.items()}
    return {"requests_per_s": answered / answers.duration, **costs}


def chat(text: str, *, tools: int) -> dict[str, Any]:
    """Return the request body fields of a chat with tools and an earlier tool call."""
    properties = {word: {"type": "string", "maxLength": 40} for word in WORDS}
    schema = {"type": "object", "properties": properties, "required": list(WORDS[:3])}
    names = [f"find_{number}" for number in range(tools)]
    arguments = json.dumps(dict.fromkeys(WORDS[:3], "old"))
    call = {"id": "abcdefghi", "type": "function", "function": {"name": names[0], "arguments": arguments}}
    return {
        "messages": [
            {"role": "user", "content": "Find something old."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "user", "content": f"Find {text}."},
        ],
        "tools": [
            {"type": "function", "function": {"name": name, "description": "Finds things.", "parameters": schema}}
            for name in names
        ],
    }


def run_named(servers: dict[str, Server], name: str, seed: int, **options: int) -> dict[str, float]:
    return run(servers[name], seed=seed, **options)


def counted_rows(checkouts: dict[str, Path], keys: Path | None, *, rounds: int, requests: int) -> Iterator[Row]:
    """Yield, for each load, the instructions per request of the servers and coordinators of both checkouts."""
    servers: dict[str, Server] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)

        def measured(clients: int, tokens: int, count: int, name: str, seed: int) -> dict[str, float]:
            return counted_run(servers[name], folder, idle[name], clients, tokens, requests=count, seed=seed)

        try:
            for name, checkout in checkouts.items():
                servers[name] = start(name, checkout, keys, None, folder)
                load(servers[name], 8, 8, requests=requests, seed=-1, tools=0)  # warm-up
            idle = {name: idle_rates(server, folder) for name, server in servers.items()}
            for clients, tokens in LOADS:
                figures = Rounds()
                figures.measure(rounds, partial(measured, clients, tokens, requests if tokens < 8 else requests // 4))
                yield {"clients": clients, "tokens": tokens, "has_key": keys is not None, **figures.row()}
        finally:
            for server in servers.values():
                server.close()


def serve_rows(
    checkouts: dict[str, Path],
    keys: Path | None,
    *,
    starts: int,
    rounds: int,
    requests: int,
    tools: int,
    model: str | None,
) -> Iterator[Row]:
    """Yield the figures of the servers under each load.

    rounds: number of rounds after each start.
    model:  model reference; None means that echo engines answer.
    """
    rounds_by_load = {load: Rounds() for load in LOADS}
    for start_number in range(starts):
        servers: dict[str, Server] = {}
        try:
            for name in sorted(checkouts, reverse=start_number % 2 == 1):
                servers[name] = start(name, checkouts[name], keys, model, None)
                run(servers[name], 8, 8, requests=min(100, requests), seed=-1, tools=tools)  # warm-up
            for (clients, tokens), figures in rounds_by_load.items():
                count = requests if tokens < 8 else requests // 4
                options: dict[str, int] = {"clients": clients, "tokens": tokens, "requests": count, "tools": tools}
                figures.measure(rounds, partial(run_named, servers, **options))
        finally:
            for server in servers.values():
                server.close()
    for (clients, tokens), figures in rounds_by_load.items():
        yield {"clients": clients, "tokens": tokens, "has_key": keys is not None, **figures.row()}


def bench_coordinator(checkout: Path, requests: int) -> dict[str, float]:
    """Return the figures of `megatron bench coordinator`."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "figures.json")
        command = [checkout / ".venv/bin/megatron", "bench", "coordinator", "--requests", str(requests)]
        done = subprocess.run([*command, "--json", file], capture_output=True, text=True, check=False)
        if done.returncode:
            raise click.ClickException(f"{checkout}: megatron bench coordinator failed: {done.stderr[-500:]}")
        figures: dict[str, float] = json.loads(file.read_text())["figures"]
    return figures


class Rounds:
    """The figures of this checkout and of another checkout in each round."""

    def __init__(self) -> None:
        self._figures: dict[str, list[dict[str, float]]] = {THIS: [], OTHER: []}

    def measure(self, rounds: int, measured: Callable[[str, int], dict[str, float]]) -> None:
        """Measure both checkouts `rounds` times, in alternating order.

        measured: returns the figures of a checkout, given its name and the number of the round.
        """
        for _ in range(rounds):
            number = len(self._figures[THIS])
            for name in sorted(self._figures, reverse=number % 2 == 1):
                self._figures[name].append(measured(name, number))

    def row(self) -> Row:
        """Return the median of each figure in both checkouts, and the ratio of this checkout's figure to the other's.

        The ratio is given for each round, and as the median over the rounds.
        """
        row: Row = {}
        for figure in self._figures[THIS][0]:
            both = (self._figures[THIS], self._figures[OTHER])
            pairs = [(one[figure], two[figure]) for one, two in zip(*both, strict=True)]
            ratios = [round(one / two, 3) for one, two in pairs if two]  # CPU time in ticks can be 0
            row[figure] = {
                THIS: round(median(one for one, _ in pairs), 2),
                OTHER: round(median(two for _, two in pairs), 2),
                "ratio": round(median(ratios), 3) if ratios else None,
                "ratio_by_round": ratios,
            }
        return row


def say(what: str, row: Row, figures: Sequence[str]) -> None:
    """Print the figures of a row. Mark each figure whose ratio is worse than the goal MIN_RATIO or MAX_COST."""
    parts = []
    for figure in figures:
        values, ratio = row[figure], row[figure]["ratio"]
        is_cost = "cpu_us" in figure or "instructions" in figure
        is_met = ratio is None or (ratio <= MAX_COST if is_cost else ratio >= MIN_RATIO)
        missed = "" if is_met else " (goal missed)"
        parts.append(f"{figure} {values[THIS]:g} and {values[OTHER]:g}, ratio {values['ratio']}{missed}")
    click.echo(f"{what}: {'; '.join(parts)}")


@click.command()
@click.option("--against", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True)
@click.option(
    "--starts", type=click.IntRange(min=1), default=6, show_default=True, help="Number of starts of both servers."
)
@click.option(
    "--rounds", type=click.IntRange(min=1), default=2, show_default=True, help="Number of rounds after each start."
)
@click.option(
    "--requests",
    type=click.IntRange(min=4),
    default=300,
    show_default=True,
    help="Number of requests in a run with 2 tokens per answer.",
)
@click.option(
    "--tools",
    type=click.IntRange(0, 128),
    default=0,
    show_default=True,
    help="Number of tools in each chat request. 0 sends no chat requests.",
)
@click.option("--model", help="Model to use instead of the echo engines, which never call a tool.")
@click.option(
    "--instructions", "counts", is_flag=True, help="Count instructions with callgrind instead of measuring CPU time."
)
@click.option("--coordinator-requests", type=click.IntRange(min=100), default=20_000, show_default=True)
@click.option(
    "--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the results to this JSON file."
)
def main(
    *,
    against: Path,
    starts: int,
    rounds: int,
    requests: int,
    tools: int,
    model: str | None,
    counts: bool,
    coordinator_requests: int,
    json_file: Path | None,
) -> None:
    """Compare requests per second and CPU time of servers and coordinators between this checkout and another."""
    checkouts = {THIS: REPOSITORY, OTHER: against.absolute()}
    facts = machine() | {"commit": commit()}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder, "keys.yaml")
        keys.write_text(KEYS)
        for file in (None, keys):
            options: dict[str, Any] = {"rounds": rounds, "requests": requests}
            if counts:
                load_rows = counted_rows(checkouts, file, **options)
            else:
                load_rows = serve_rows(checkouts, file, starts=starts, tools=tools, model=model, **options)
            for row in load_rows:
                key = ", a key with limits" if row["has_key"] else ""
                what = f"{row['clients']} clients, {row['tokens']:2} tokens{key}"
                say(what, row, [figure for figure in row if isinstance(row[figure], dict)])
                rows.append(row)
    coordinators = None
    if not counts:
        figures = Rounds()
        figures.measure(starts * rounds, lambda name, _: bench_coordinator(checkouts[name], coordinator_requests))
        coordinators = figures.row()
        costs = ("cpu_us_per_request", "cpu_us_per_partial", "requests_per_second")
        say("megatron bench coordinator", coordinators, costs)
    if json_file is not None:
        goals = {"min_ratio_of_requests_per_s": MIN_RATIO, "max_ratio_of_cpu": MAX_COST}
        document = {
            "machine": facts,
            "starts": starts,
            "rounds": rounds,
            "tools": tools,
            "model": model,
            "goals": goals,
            "rows": rows,
            "coordinator": coordinators,
        }
        json_file.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
