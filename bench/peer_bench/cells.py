"""Defines the cells, which are the measurements of each engine, and measures the engines in alternation."""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil
from peer_bench.processes import Worker, WorkerError
from peer_bench.weights import DTYPES

from megatron_runtime.cli.bench.engine import memory_bandwidth

OURS = "megatron"
PEERS = ("llama.cpp", "OpenVINO", "transformers", "vLLM")
T = TypeVar("T")
_SEQUENCES = 32
_IDLE_CPU, _IDLE_INTERVAL, _IDLE_LIMIT = 0.2, 0.5, 30.0
"""Maximum number of busy CPUs of an idle machine, the seconds over which this number is measured, and the maximum
seconds to wait.
"""
_LONG_LOAD = 20.0
"""A load that takes this many seconds or more is measured once."""


@dataclass(frozen=True, slots=True)
class Cell:
    """A workload that is measured: a batch of prompts, and the number of tokens to generate.

    turns:   number of times that a round measures this cell on each engine. With many short turns, which alternate
             between the engines, the memory bandwidth is the same for all engines.
    is_less: whether a lower figure is better.
    """

    name: str
    batch: int = 1
    prompt_tokens: int = 64
    new_tokens: int = 1
    turns: int = 1
    is_less: bool = False


DECODE = (
    Cell("decode b1", 1, new_tokens=24, turns=5),
    Cell("decode b8", 8, new_tokens=48),
    Cell("decode b32", 32, new_tokens=32),
)
PREFILL = Cell("prefill 512", prompt_tokens=512, turns=3)
FIRST_TOKEN = Cell("first token of 64 ms", turns=3, is_less=True)
ASKED = (*DECODE, PREFILL, FIRST_TOKEN)
LOAD = Cell("load s", is_less=True)
START = Cell("load and first token s", is_less=True)
MEMORY = Cell("peak memory MiB", is_less=True)
HTTP = (
    Cell("http 1", 1, new_tokens=48, turns=3),
    Cell("http 8", 8, new_tokens=48),
    Cell("http 32", 32, new_tokens=48),
)
READY = Cell("http ready s", is_less=True)
CELLS = (*ASKED, LOAD, START, MEMORY, *HTTP, READY)


@dataclass(slots=True)
class Engine:
    """The figures of one engine, or of one engine's server, with one kind of weights, such as 4-bit weights.

    rates:   memory bandwidths in bytes per second, as pairs: measured before and after the measurement of a figure.
    retries: number of requests whose connection the server closed before it answered.
    """

    name: str
    weights: str
    command: list[str]
    worker: Worker | None = None
    failure: str = ""
    figures: dict[str, list[float]] = field(default_factory=dict)
    rates: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    start: dict[str, float] = field(default_factory=dict)
    spent: float = 0.0
    retries: int | None = None

    def add(self, cell: Cell, figure: float) -> None:
        self.figures.setdefault(cell.name, []).append(figure)

    def run_guarded(self, what: Callable[[], T]) -> T | None:
        """Return the result of `what`, or None if `what` raises WorkerError.

        After an error, store the message in `failure` and skip this engine from now on.
        """
        begun = time.perf_counter()
        try:
            return what()
        except WorkerError as error:
            self.worker, self.failure = None, str(error)
            print(f"{self.name}, {self.weights}: {error}", flush=True)
            return None
        finally:
            self.spent += time.perf_counter() - begun


def engines(
    weights: str, files: dict[str, str], *, venv: Path | None, vllm_venv: Path | None, threads: int
) -> list[Engine]:
    """Return the engines that support the weights. Engines whose virtual environment is None are left out."""
    dtype, count = DTYPES[weights], str(threads)
    commands = {OURS: [sys.executable, "ours.py", files[f"packed-{weights}"], dtype, count]}
    if venv is not None:
        python = str(venv.absolute() / "bin" / "python")
        commands["llama.cpp"] = [python, "llama_cpp_batch.py", files[weights], count, str(_SEQUENCES)]
        commands["OpenVINO"] = [python, "openvino_cpu.py", files[weights], count]
    if weights != "4-bit":
        commands["transformers"] = [sys.executable, "hf_transformers.py", files["hf"], dtype, count]
        if vllm_venv is not None:
            python = str(vllm_venv.absolute() / "bin" / "python")
            commands["vLLM"] = [python, "vllm_cpu.py", files["hf"], dtype, count]
    return [Engine(name, weights, command) for name, command in commands.items()]


def measure_all(
    group: list[Engine],
    *,
    rounds: int,
    seconds_each: float,
    cpus: set[int],
    after_round: Callable[[], None],
    memory_rate: Callable[[], float] = memory_bandwidth,
) -> None:
    """Measure every cell of every engine in each round.

    An engine skips the remaining rounds when it has used `seconds_each` seconds.
    """
    for engine in group:
        engine.run_guarded(lambda engine=engine: _start(engine, cpus))  # type: ignore[misc]
        engine.spent = 0.0
    try:
        for number in range(rounds):
            taking_part = [engine for engine in group if engine.spent < seconds_each]
            for cell, seed in turns(ASKED, number):
                for engine in taking_part:
                    if engine.worker is not None:
                        measure(engine, cell, partial(_figure, engine, cell, seed), memory_rate=memory_rate)
            print(f"{group[0].weights}: round {number + 1} of {rounds}", flush=True)
            after_round()
    finally:
        close(group)


def turns(cells: Iterable[Cell], number: int) -> Iterable[tuple[Cell, int]]:
    """Yield the turns of a round as pairs (cell, seed for the prompts). number: number of the round."""
    return zip((cell for cell in cells for _ in range(cell.turns)), itertools.count(1000 * (number + 1)), strict=False)


def measure(
    engine: Engine, cell: Cell, figure: Callable[[], float], *, memory_rate: Callable[[], float] = memory_bandwidth
) -> None:
    """Wait until the machine is idle, call `figure`, and record the result as the engine's figure for `cell`.

    Also record the memory bandwidth before and after the call.
    """
    wait_until_idle()
    before = memory_rate()
    measured = engine.run_guarded(figure)
    if measured is not None:
        engine.add(cell, measured)
        engine.rates.setdefault(cell.name, []).append((before, memory_rate()))


def wait_until_idle() -> None:
    """Wait until threads that continue after a start or a request, such as a peer's spinning threads, have stopped."""
    end, cpus = time.perf_counter() + _IDLE_LIMIT, psutil.cpu_count() or 1
    while psutil.cpu_percent(_IDLE_INTERVAL) / 100 * cpus > _IDLE_CPU and time.perf_counter() < end:
        pass


def measure_starts(group: Iterable[Engine], *, rounds: int, cpus: set[int]) -> None:
    """Measure how long the engines take to load, in new processes. Each round measures one engine after the other.

    The figures are the time until the model is loaded, and the time from the end of the load to the first token. An
    engine that maps its file reads the file only in the first request. All files are in the page cache. An engine whose
    load takes _LONG_LOAD seconds or more is measured once.
    """
    engines = list(group)
    for number in range(rounds):
        for engine in engines:
            if not engine.failure and (number == 0 or engine.figures[LOAD.name][0] < _LONG_LOAD):
                engine.run_guarded(lambda engine=engine: _measure_start(engine, cpus))  # type: ignore[misc]


def measure_memory(group: Iterable[Engine], *, cpus: set[int]) -> None:
    """Measure the peak memory during one short answer in a new process, minus the memory of the interpreter and
    torch.
    """
    for engine in group:
        engine.run_guarded(lambda engine=engine: _measure_memory(engine, cpus))  # type: ignore[misc]


def close(group: Iterable[Engine]) -> None:
    for engine in group:
        if engine.worker is not None:
            engine.worker.close()
            engine.worker = None


def _start(engine: Engine, cpus: set[int]) -> None:
    _drop_cached_weights(engine)
    engine.worker = Worker(engine.command, cpus=cpus)
    engine.start = engine.worker.ready
    # Warm-up.
    for batch in (1, 8):
        engine.worker.ask(batch=batch, prompt_tokens=16, new_tokens=3, seed=batch)


def _drop_cached_weights(engine: Engine) -> None:
    """Remove from the page cache all files that the engine's command names.

    A file that has just been written is in other pages than a file that was read after a boot. This difference affects
    engines that map the file.
    """
    named = [Path(argument) for argument in engine.command[1:] if argument.startswith("/")]
    for file in [*named, *(file for path in named if path.is_dir() for file in path.rglob("*"))]:
        if file.is_file():
            with file.open("rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _figure(engine: Engine, cell: Cell, seed: int) -> float:
    assert engine.worker is not None
    reply = engine.worker.ask(batch=cell.batch, prompt_tokens=cell.prompt_tokens, new_tokens=cell.new_tokens, seed=seed)
    if cell in DECODE:
        after_first: float = reply["seconds"] - reply["first_seconds"]
        return cell.batch * (cell.new_tokens - 1) / after_first
    if cell is PREFILL:
        return cell.prompt_tokens / float(reply["seconds"])
    return float(reply["seconds"]) * 1000


def _measure_start(engine: Engine, cpus: set[int]) -> None:
    wait_until_idle()
    engine.worker = Worker(engine.command, cpus=cpus)
    try:
        load = engine.worker.ready["load_seconds"]
        reply = engine.worker.ask(batch=1, prompt_tokens=64, new_tokens=1, seed=6)
        engine.add(LOAD, load)
        engine.add(START, load + reply["seconds"])
    finally:
        close([engine])


def _measure_memory(engine: Engine, cpus: set[int]) -> None:
    # llama.cpp reserves the cache of all its sequences.
    command = [*engine.command[:-1], "1"] if engine.name == "llama.cpp" else engine.command
    engine.worker = Worker(command, cpus=cpus)
    try:
        reply = engine.worker.ask(batch=1, prompt_tokens=64, new_tokens=32, seed=5)
        engine.add(MEMORY, reply["peak_rss_mib"] - engine.worker.ready["platform_rss_mib"])
    finally:
        close([engine])
