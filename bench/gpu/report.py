"""The sizes of the workloads, the device and the results file, which all steps of the GPU campaign use."""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from megatron_runtime.protocol import strict_json as json

ROOT = Path(__file__).resolve().parents[2]
RESULTS = "results.jsonl"
_ERROR_CHARACTERS = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of the steps' workloads. Numbers of tokens are per sequence unless stated otherwise.

    max_rows, max_tokens: maximum number of rows and of tokens of an engine's step.
    max_sequence_length:  maximum number of tokens, prompt plus answer.
    kv_cache_mib:         memory of the KV cache of the engines in one process, in MiB.
    batches:              numbers of rows of the measured decode steps and matrix products, ascending.
    prompt_tokens, new_tokens: prompt and answer of a request in the decode cells.
    prefill_tokens:       length of the long prompt.
    short_prompts:        lengths of the prompts whose time to the first token is measured.
    turns:                number of times that a cell is measured.
    steps:                number of measured steps of a cell.
    contexts, split_tokens: for decode attention, numbers of cached tokens, and minimum numbers of tokens per program.
    stagings:             number of times that weights are staged during captures.
    copy_elements, product_side: sizes of the copy and the matrix product that measure the device's rates.
    server_kv_cache_mib:  memory of the KV cache of an engine behind the server, in MiB.
    threads:              number of CPU threads of an engine behind the server.
    streams, stream_tokens: number of open streams in the server's cells, and number of tokens of each answer.
    clients, requests_per_client, answer_tokens: load of `megatron bench serve`.
    """

    max_rows: int = 64
    max_tokens: int = 8192
    max_sequence_length: int = 16384
    kv_cache_mib: int = 24 << 10
    batches: tuple[int, ...] = (1, 8, 64)
    prompt_tokens: int = 1024
    new_tokens: int = 128
    prefill_tokens: int = 8192
    short_prompts: tuple[int, ...] = (16, 128, 512)
    turns: int = 3
    steps: int = 20
    contexts: tuple[int, ...] = (1024, 8192)
    split_tokens: tuple[int, ...] = (128, 256, 512, 1024)
    stagings: int = 3
    copy_elements: int = 2**28
    product_side: int = 8192
    server_kv_cache_mib: int = 4 << 10
    threads: int = 4
    streams: int = 8
    stream_tokens: int = 256
    clients: tuple[int, ...] = (1, 8, 32)
    requests_per_client: int = 4
    answer_tokens: int = 64

    def with_values(self, values: Sequence[str]) -> Sizes:
        """Return a copy in which some sizes are replaced. Each of `values` is NAME=NUMBER or NAME=NUMBER,NUMBER.

        Raises:
            ValueError: a name is unknown, or a value is not a positive number.
        """
        sizes = self
        names = [field.name for field in fields(self)]
        for text in values:
            name, _, value = text.partition("=")
            if name not in names:
                raise ValueError(f"{text!r}: no size has this name: choose among {', '.join(names)}")
            numbers = tuple(int(number) if number.isdecimal() else 0 for number in value.split(","))
            is_list = isinstance(getattr(self, name), tuple)
            if min(numbers) < 1 or (len(numbers) > 1 and not is_list):
                raise ValueError(f"{text!r}: want {'positive numbers with commas' if is_list else 'a positive number'}")
            sizes = replace(sizes, **{name: numbers if is_list else numbers[0]})
        return sizes


DRY_SIZES = Sizes(
    max_rows=4,
    max_tokens=64,
    max_sequence_length=256,
    kv_cache_mib=8,
    batches=(1, 3),
    prompt_tokens=16,
    new_tokens=8,
    prefill_tokens=48,
    short_prompts=(16,),
    turns=2,
    steps=2,
    contexts=(40,),
    split_tokens=(64, 128),
    stagings=1,
    copy_elements=1 << 12,
    product_side=32,
    server_kv_cache_mib=64,
    threads=1,
    streams=3,
    stream_tokens=8,
    clients=(1,),
    requests_per_client=2,
    answer_tokens=4,
)
"""Sizes for a dry run on a CPU, which takes seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Campaign:
    """The context of one step of a campaign, or of the driver that starts the steps.

    folder: folder of the results and logs.
    step:   name of the step in the results.
    dry:    whether the step runs on the CPU, with the shapes of small models.
    model:  model reference for the steps with a server.
    box:    time limit of the step, or of the whole campaign in the driver, in seconds.
    """

    folder: Path
    step: str
    dry: bool
    sizes: Sizes
    model: str
    box: float

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    def emit(self, name: str, **figures: Any) -> None:
        """Append a result to the results file, and flush the file to disk, because the machine may be lost at any
        time.
        """
        line = append_line(
            self.folder / RESULTS, {"step": self.step, "name": name, "time": round(time.time(), 1), **figures}
        )
        print(line[:600], flush=True)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Return a context manager for a part of a step.

        If the part raises an exception, record the exception as a result, and continue with the next part.
        """
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.emit(name, error=f"{type(error).__name__}: {error}"[:_ERROR_CHARACTERS])

    def used_mib(self) -> int | None:
        """Return how much memory of the GPU all processes use together, in MiB. Return None on a CPU."""
        if self.dry:
            return None
        return int(_nvidia_smi("--query-gpu=memory.used", units=False).split()[0])

    def memory_of_processes(self) -> str:
        """Return the processes that use the GPU, each with its memory, as text."""
        return "" if self.dry else _nvidia_smi("--query-compute-apps=pid,used_memory")

    def describe_gpu(self) -> str:
        fields = (
            "name,driver_version,memory.total,memory.used,clocks.sm,clocks.mem,temperature.gpu,"
            "ecc.errors.uncorrected.volatile.total"
        )
        return "" if self.dry else _nvidia_smi(f"--query-gpu={fields}")


def append_line(path: Path, value: Any) -> str:
    """Append a value to a file as a line of JSON, and flush the file to disk. Return the line."""
    line = json.dumps(value)
    with path.open("a") as file:
        file.write(line + "\n")
        file.flush()
        os.fsync(file.fileno())
    return line


def _nvidia_smi(query: str, *, units: bool = True) -> str:
    command = ["nvidia-smi", query, f"--format=csv,noheader{'' if units else ',nounits'}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout.strip()


def read_results(folder: Path) -> list[dict[str, Any]]:
    """Return all results in the results file of `folder`."""
    return [json.loads(line) for line in (folder / RESULTS).read_text().splitlines()]
