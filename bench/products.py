"""Measures the matrix products of the CPU kernels by format, instruction set and batch, and the limits of one core.

    python bench/products.py --formats bfloat16,int4 --instruction-sets avx2,avx512_bf16 --json build/products.json

One thread computes. Products with fewer than --cached-from rows read each weight from memory, because the matrices
together exceed the cache. Products with more rows use a single matrix with 512 outputs, which stays in the cache, so
they measure the arithmetic rate. The figure of a cell is the minimum CPU time of the thread over many runs, because
other processes hardly affect this minimum. Bytes are the size of the packed weights.
"""

from __future__ import annotations

import itertools
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import torch

from megatron_kernels.cpu.library import Matrix, instruction_sets, library
from megatron_kernels.cpu.packing import PackedMatrix, pack
from megatron_kernels.cpu.thread_pool import ThreadPool
from megatron_kernels.quantized import BLOCK_SIZES, Q2_K, Q3_K, Q4_K, Q5_0, Q5_K, Q6_K, SCALES, QuantizedTensor
from megatron_runtime.cli.options import COUNTS
from megatron_runtime.protocol import strict_json as json

_FORMATS = ("float32", "bfloat16", "float16", "int8", "q5_0", "int4", "q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
_KINDS = {"q5_0": Q5_0, "q2_k": Q2_K, "q3_k": Q3_K, "q4_k": Q4_K, "q5_k": Q5_K, "q6_k": Q6_K}
_CACHED_OUTPUTS = 512
_MEMORY = 96 << 20
"""Bytes of the matrices of one format together, which exceed the cache of a core."""


@dataclass(frozen=True, slots=True)
class Cell:
    """The speed of one product, in units of 10^9 bytes of weights per second and of 10^9 operations per second."""

    format: str
    instruction_set: str
    batch: int
    gigabytes: float
    gigaflops: float


def best_seconds(run: Callable[[], object], seconds: float) -> float:
    """Return the minimum CPU time of this thread per call. `run` is called repeatedly for `seconds`."""
    end, best = time.perf_counter() + seconds, float("inf")
    while time.perf_counter() < end:
        begun = time.thread_time()
        run()
        best = min(best, time.thread_time() - begun)
    return best


def random_matrix(format: str, outputs: int, inputs: int) -> PackedMatrix:
    if format not in _KINDS:
        return pack(torch.randn(outputs, inputs), format)
    kind = _KINDS[format]
    values, size = BLOCK_SIZES[kind]
    blocks = torch.randint(256, (outputs, inputs // values, size), dtype=torch.uint8)
    # Random bytes are rarely finite scales.
    blocks[..., SCALES[kind]] = 0x20
    return pack(QuantizedTensor(kind, (outputs, inputs), blocks.view(outputs, -1)), "int4")


def measure(pool: ThreadPool, matrices: list[Matrix], batch: int, seconds: float) -> float:
    """Return the minimum CPU time of one product with `batch` rows, in seconds.

    Products run for `seconds` seconds, and use the matrices one after the other.
    """
    x, y = torch.randn(batch, matrices[0].inputs), torch.empty(batch, matrices[0].outputs)
    following = itertools.cycle(matrices)
    return best_seconds(
        lambda: library().megatron_multiply(pool.handle, next(following), x.data_ptr(), batch, y.data_ptr()), seconds
    )


@click.command(help=__doc__, context_settings={"max_content_width": 120})
@click.option("--formats", default=",".join(_FORMATS), show_default=True)
@click.option(
    "--instruction-sets",
    "names",
    default="",
    help="Instruction sets to measure, with commas between. Default: every one that this CPU supports.",
)
@click.option("--batches", type=COUNTS, default="1,2,4,8,32,128", show_default=True)
@click.option("--outputs", type=int, default=4096, show_default=True)
@click.option("--inputs", type=int, default=2048, show_default=True)
@click.option(
    "--cached-from",
    type=int,
    default=8,
    show_default=True,
    help="Number of rows from which the weights stay in the CPU cache.",
)
@click.option("--seconds", type=float, default=0.5, show_default=True, help="Seconds per cell.")
@click.option("--json", "json_path", type=click.Path(path_type=Path))
def main(
    formats: str,
    names: str,
    batches: list[int],
    outputs: int,
    inputs: int,
    cached_from: int,
    seconds: float,
    json_path: Path | None,
) -> None:
    torch.set_num_threads(1)
    chosen = tuple(names.split(",")) if names else instruction_sets()
    memory = torch.ones(_MEMORY // 8, dtype=torch.int64)
    bandwidth = memory.nbytes / best_seconds(memory.sum, seconds) / 1e9
    click.echo(f"{platform.machine()}, one thread reads {bandwidth:.1f} GB/s from memory (sum of {_MEMORY >> 20} MiB)")
    pool, cells = ThreadPool(1), []
    for format in formats.split(","):
        first = random_matrix(format, outputs, inputs)
        packed = [first, *(random_matrix(format, outputs, inputs) for _ in range(_MEMORY // first.data.nbytes))]
        cached = Matrix(first.format, inputs, min(outputs, _CACHED_OUTPUTS), first.data.data_ptr())
        for batch, name in itertools.product(batches, chosen):
            library().megatron_select(name.encode())
            matrices = [cached] if batch >= cached_from else [each.record for each in packed]
            took = measure(pool, matrices, batch, seconds)
            share = matrices[0].outputs / outputs
            speed = first.data.nbytes * share / took / 1e9, 2 * batch * outputs * share * inputs / took / 1e9
            cells.append(Cell(format, name, batch, *speed))
            click.echo(f"{format:9} {name:12} batch {batch:4}: {speed[0]:6.1f} GB/s, {speed[1]:7.1f} GFLOP/s")
    if json_path is not None:
        json_path.write_text(json.dumps({"bandwidth": bandwidth, "cells": [asdict(cell) for cell in cells]}, indent=2))


if __name__ == "__main__":
    main()
