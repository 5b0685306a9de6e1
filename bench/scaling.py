"""How long a decode step takes, and what memory it needs, by batch and by context.

    python bench/scaling.py --dtype int4 --json docs/scaling.json

One engine in this process; every cell is the median of some steps on a cache of the length asked for. A line is fitted
through the points of each column: what one more sequence, and one more token of context, cost, beside the time that
reading their bytes takes at the memory bandwidth that is measured in the same run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from megatron_runtime.cli.bench.engine_load import memory_bandwidth
from megatron_runtime.cli.bench.report import machine
from megatron_runtime.engines.device import Processor
from megatron_runtime.engines.executor import StepPlan
from megatron_runtime.engines.torch_executor import TorchExecutor
from megatron_runtime.loading.checkpoint import open_checkpoint
from megatron_runtime.loading.source import resolve

_PAGE = 16


class Bench:
    """Decode steps of an engine's model on a cache that holds anything."""

    def __init__(self, options: argparse.Namespace) -> None:
        pages = max(b * (-(-c // _PAGE) + 1) for b, c in _cells(options))
        device = Processor()
        self.executor = TorchExecutor(
            resolve(options.model),
            dtype=options.dtype,
            device=device,
            kv_cache_memory=pages * _PAGE * options.token_bytes + (1 << 20),
            threads=options.threads,
        )
        self.executor.load()
        self.steps = options.steps

    def milliseconds(self, batch: int, context: int) -> float:
        """Of a step that computes one token of each of `batch` sequences of `context` tokens."""
        plan = _plan(batch, context, self.executor.vocab_size)
        runner, pool = self.executor.controller.inference_wrapped_model, self.executor._pool
        assert runner is not None
        assert pool.cache_LPXE is not None
        taken = []
        for _ in range(self.steps + 1):
            begun = time.perf_counter()
            runner.run_one_forward_step(plan, pool.cache_LPXE).sampled_logits()
            taken.append(time.perf_counter() - begun)
        return statistics.median(taken[1:]) * 1000


def _plan(batch: int, context: int, vocabulary: int) -> StepPlan:
    pages = -(-context // _PAGE)
    tables = np.arange(batch * pages, dtype=np.int32).reshape(batch, pages)
    return StepPlan(
        token_ids=np.random.default_rng(batch).integers(0, vocabulary, batch).astype(np.int32),
        positions=np.full(batch, context - 1, dtype=np.int32),
        query_lengths=np.ones(batch, dtype=np.int32),
        context_lengths=np.full(batch, context, dtype=np.int32),
        block_tables=tables,
        slot_mapping=tables[:, -1].astype(np.int64) * _PAGE + (context - 1) % _PAGE,
        needs_sample=np.ones(batch, dtype=bool),
        sampling=SimpleNamespace(prompt_targets={}),  # type: ignore[arg-type]
    )


def _cells(options: argparse.Namespace) -> list[tuple[int, int]]:
    """Batches at the shortest context, contexts at some batches."""
    cells = itertools.product(options.batches, options.contexts)
    return [(b, c) for b, c in cells if b * c <= options.most_tokens]


def _slope(points: list[tuple[float, float]]) -> float | None:
    if len(points) < 2:
        return None
    return float(np.polyfit(*zip(*points, strict=True), 1)[0])


def fit(cells: list[dict[str, Any]], *, kv_bytes: int, weight_bytes: int, bandwidth: float) -> dict[str, Any]:
    """What one more sequence and one more cached token cost, measured and at least."""
    shortest = min(cell["context"] for cell in cells)
    by_batch = [(cell["batch"], cell["ms"]) for cell in cells if cell["context"] == shortest]
    by_tokens = {
        batch: _slope([(cell["context"] * batch, cell["ms"]) for cell in cells if cell["batch"] == batch])
        for batch in sorted({cell["batch"] for cell in cells})
    }
    return {
        "weights_read_ms": weight_bytes / bandwidth * 1000,
        "ms_per_sequence": _slope(by_batch),
        "us_per_cached_token": {batch: slope * 1000 for batch, slope in by_tokens.items() if slope is not None},
        "us_per_cached_token_bound": kv_bytes / bandwidth * 1e6,
    }


def plot(document: dict[str, Any], path: Path) -> None:
    """Milliseconds of a step against context, both by powers of two, one line a batch: an SVG."""
    cells = document["cells"]
    contexts, times = sorted({cell["context"] for cell in cells}), [cell["ms"] for cell in cells]
    low, high = np.log2(min(times)), np.log2(max(times)) + 0.1

    def place(cell: dict[str, Any]) -> str:
        across = np.log2(cell["context"] / contexts[0]) / max(np.log2(contexts[-1] / contexts[0]), 1)
        up = (np.log2(cell["ms"]) - low) / (high - low)
        return f"{60 + 520 * across:.0f},{340 - 300 * up:.0f}"

    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="720" height="390" font-family="sans-serif" font-size="12">',
        f'<text x="8" y="18">ms of a decode step against context, by batch; {document["dtype"]}</text>',
    ]
    for context in contexts:
        x = place({"context": context, "ms": 2**low}).split(",")[0]
        lines.append(f'<text x="{x}" y="362" text-anchor="middle">{context}</text>')
    for value in (min(times), max(times)):
        y = place({"context": contexts[0], "ms": value}).split(",")[1]
        lines.append(f'<text x="4" y="{y}">{value:.0f} ms</text>')
    for batch in sorted({cell["batch"] for cell in cells}):
        points = [place(cell) for cell in cells if cell["batch"] == batch]
        x, y = points[-1].split(",")
        lines.append(f'<polyline points="{" ".join(points)}" fill="none" stroke="#26a"/>')
        lines.append(f'<text x="{int(x) + 6}" y="{y}">batch {batch}</text>')
    path.write_text("\n".join([*lines, "</svg>"]) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="builtin:smollm2-135m")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--batches", type=_numbers, default=(1, 2, 4, 8, 16, 32, 64))
    parser.add_argument("--contexts", type=_numbers, default=(128, 512, 2048, 8192))
    parser.add_argument("--most-tokens", type=int, default=1 << 16, help="of all sequences of a cell")
    parser.add_argument("--json", type=Path, default=Path("docs/scaling.json"))
    options = parser.parse_args()
    source = resolve(options.model)
    config = open_checkpoint(source).config
    options.token_bytes = config.kv_elements_per_token * 4
    torch.set_num_threads(options.threads)
    bandwidth = memory_bandwidth()
    bench = Bench(options)
    cells = []
    for batch, context in _cells(options):
        cells.append({"batch": batch, "context": context, "ms": round(bench.milliseconds(batch, context), 2)})
        print(cells[-1], flush=True)
    document = {
        "machine": machine() | {"memory_gb_per_s": round(bandwidth / 1e9, 1), "threads": options.threads},
        "model": options.model,
        "dtype": options.dtype,
        "cells": cells,
        "fitted": fit(
            cells, kv_bytes=options.token_bytes, weight_bytes=bench.executor.weight_bytes, bandwidth=bandwidth
        ),
        "kv_bytes_per_token": options.token_bytes,
    }
    options.json.write_text(json.dumps(document, indent=2) + "\n")
    plot(document, options.json.with_suffix(".svg"))
    print(json.dumps(document["fitted"], indent=2))


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


if __name__ == "__main__":
    main()
