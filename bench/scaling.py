"""How long a decode step takes, and what memory it needs, by batch and by context.

    python bench/scaling.py --dtype int4 --json docs/scaling.json

One engine in this process; a cell is the median of some steps on a cache of the length asked for, all of it written.
Lines are fitted: what one more sequence and one more cached token cost, beside the time that reading their bytes takes
at the memory bandwidth measured in the same run. A table (.md) and a plot (.svg) are written beside the figures.
"""

from __future__ import annotations

import itertools
import json
import statistics
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import psutil
import torch

from megatron_runtime.cli.bench.engine_load import memory_bandwidth
from megatron_runtime.cli.bench.report import Counts, machine
from megatron_runtime.engines.device import Processor
from megatron_runtime.engines.executor import StepPlan
from megatron_runtime.engines.torch_executor import TorchExecutor
from megatron_runtime.loading.checkpoint import open_checkpoint
from megatron_runtime.loading.source import resolve

_PAGE = 16
_LEFT, _RIGHT, _TOP, _BOTTOM = 60, 580, 40, 340


@dataclass(frozen=True, slots=True)
class Cell:
    """A step of `batch` sequences of `context` tokens. rss_mib: of the process, with the cache of all cells so far."""

    batch: int
    context: int
    ms: float
    bound_ms: float
    rss_mib: float

    @property
    def tokens(self) -> int:
        return self.batch * self.context


class Bench:
    """Decode steps of a model on a cache of `most_tokens` tokens at most."""

    def __init__(self, model: str, *, dtype: str, threads: int, most_tokens: int) -> None:
        source, device = resolve(model), Processor()
        element = device.cache_dtype(device.select_dtype(dtype)).itemsize
        self.token_bytes = open_checkpoint(source).config.kv_elements_per_token * element
        self.executor = TorchExecutor(
            source,
            dtype=dtype,
            device=device,
            kv_cache_memory=(most_tokens + _PAGE) * self.token_bytes,
            threads=threads,
            page_size=_PAGE,
        )
        self.executor.load()
        self._written = 0

    @torch.inference_mode()
    def write_cache(self, tokens: int) -> None:
        """Have numbers in the pages of so many tokens: memory that was never written is read from one page of zeros."""
        pages = -(-tokens // _PAGE)
        cache_LPXE = self.executor._pool.cache_LPXE
        assert cache_LPXE is not None
        if pages > self._written:
            cache_LPXE[:, self._written : pages].normal_()
            self._written = pages

    def milliseconds(self, batch: int, context: int, *, steps: int) -> float:
        """Of a step that computes one token of each of `batch` sequences of `context` tokens."""
        plan = _plan(batch, context, self.executor.vocab_size)
        taken = []
        for _ in range(steps + 1):
            begun = time.perf_counter()
            runner, cache_LPXE = self.executor.controller.inference_wrapped_model, self.executor._pool.cache_LPXE
            assert runner is not None
            assert cache_LPXE is not None
            runner.run_one_forward_step(plan, cache_LPXE).sampled_logits()
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


def _slope(points: list[tuple[float, float]]) -> float | None:
    if len({x for x, _ in points}) < 2:
        return None
    return float(np.polyfit(*zip(*points, strict=True), 1)[0])


def fit(cells: list[Cell], *, token_bytes: int, weight_bytes: int, bandwidth: float) -> dict[str, Any]:
    """What one more sequence and one more cached token cost, measured and at least."""
    shortest = min(cell.context for cell in cells)
    by_tokens = {
        batch: _slope([(cell.tokens, cell.ms) for cell in cells if cell.batch == batch])
        for batch in sorted({cell.batch for cell in cells})
    }
    kilobytes = _slope([(cell.tokens, cell.rss_mib * 1024) for cell in cells])
    return {
        "weights_read_ms": round(weight_bytes / bandwidth * 1000, 3),
        "ms_per_sequence": _slope([(cell.batch, cell.ms) for cell in cells if cell.context == shortest]),
        "us_per_cached_token": {batch: slope * 1000 for batch, slope in by_tokens.items() if slope is not None},
        "us_per_cached_token_bound": token_bytes / bandwidth * 1e6,
        "kib_per_cached_token": kilobytes,
        "kib_per_cached_token_bound": token_bytes / 1024,
    }


def table(document: dict[str, Any]) -> str:
    """Milliseconds by batch and context, and the slopes, in Markdown."""
    cells = {(cell["batch"], cell["context"]): cell for cell in document["cells"]}
    batches, contexts = (sorted({key[place] for key in cells}) for place in (0, 1))
    fitted, which = document["fitted"], f"{document['model']}, {document['dtype']}"
    lines = [
        f"# A decode step by batch and context\n\n{which}, on {document['machine']['processor']}, "
        f"{document['machine']['threads']} threads, memory read at {document['machine']['memory_gb_per_s']} GB/s. "
        "Milliseconds, and in brackets the time that reading the weights and the cache takes at least.\n",
        "| context | " + " | ".join(f"batch {batch}" for batch in batches) + " |",
        "|---" * (len(batches) + 1) + "|",
    ]
    for context in contexts:
        row = [cells.get((batch, context)) for batch in batches]
        shown = ("" if cell is None else f"{cell['ms']:.1f} ({cell['bound_ms']:.1f})" for cell in row)
        lines.append(f"| {context} | " + " | ".join(shown) + " |")
    lines += ["", "| what one more costs | measured | bound |", "|---|---|---|"]
    if fitted["ms_per_sequence"] is not None:
        lines.append(f"| sequence, at {contexts[0]} tokens | {fitted['ms_per_sequence']:.2f} ms | |")
    bound = f"{fitted['us_per_cached_token_bound']:.2f} µs"
    for batch, slope in fitted["us_per_cached_token"].items():
        lines.append(f"| cached token, at batch {batch} | {slope:.2f} µs | {bound} |")
    if (kib := fitted["kib_per_cached_token"]) is not None:
        bound = f"{fitted['kib_per_cached_token_bound']:.1f} KiB"
        lines.append(f"| cached token, of memory | {kib:.1f} KiB | {bound} |")
    return "\n".join(lines) + "\n"


def plot(document: dict[str, Any]) -> str:
    """Milliseconds of a step against context, both by powers of two, one line a batch: an SVG."""
    cells = document["cells"]
    contexts, times = sorted({cell["context"] for cell in cells}), [cell["ms"] for cell in cells]
    low, high = np.log2(min(times)), np.log2(max(times)) + 0.1
    width = max(np.log2(contexts[-1] / contexts[0]), 1)

    def place(context: int, ms: float) -> tuple[str, str]:
        x = _LEFT + (_RIGHT - _LEFT) * np.log2(context / contexts[0]) / width
        y = _BOTTOM - (_BOTTOM - _TOP) * (np.log2(ms) - low) / (high - low)
        return f"{x:.0f}", f"{y:.0f}"

    lines = [
        '<svg xmlns="http://www.w3.org/2000/svg" width="720" height="390" font-family="sans-serif" font-size="12">',
        f'<text x="8" y="18">ms of a decode step against context, by batch; {document["dtype"]}</text>',
    ]
    for context in contexts:
        x, _ = place(context, min(times))
        lines.append(f'<text x="{x}" y="362" text-anchor="middle">{context}</text>')
    for value in (min(times), max(times)):
        lines.append(f'<text x="4" y="{place(contexts[0], value)[1]}">{value:.0f} ms</text>')
    for batch in sorted({cell["batch"] for cell in cells}):
        points = [place(cell["context"], cell["ms"]) for cell in cells if cell["batch"] == batch]
        joined = " ".join(f"{x},{y}" for x, y in points)
        lines.append(f'<polyline points="{joined}" fill="none" stroke="#26a"/>')
        lines.append(f'<text x="{int(points[-1][0]) + 6}" y="{points[-1][1]}">batch {batch}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


@click.command()
@click.option("--model", default="builtin:smollm2-135m", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=15, show_default=True, help="Of each cell.")
@click.option("--batches", type=Counts(), default="1,2,4,8,16,32,64", show_default=True)
@click.option("--contexts", type=Counts(), default="128,512,2048,8192", show_default=True)
@click.option("--most-tokens", type=click.IntRange(min=1), default=1 << 16, show_default=True, help="Of a cell.")
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), default="docs/scaling.json")
def main(
    *,
    model: str,
    dtype: str,
    threads: int,
    steps: int,
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    most_tokens: int,
    path: Path,
) -> None:
    """Measure decode steps; write figures, a table and a plot."""
    torch.set_num_threads(threads)
    bandwidth = memory_bandwidth()
    # The memory that is resident grows with the cells.
    sizes = sorted(itertools.product(batches, contexts), key=lambda size: size[0] * size[1])
    sizes = [(batch, context) for batch, context in sizes if batch * context <= most_tokens]
    # A page more for each sequence, for contexts that are no multiple of a page.
    room = max(batch * (context + _PAGE) for batch, context in sizes)
    bench = Bench(model, dtype=dtype, threads=threads, most_tokens=room)
    cells = []
    for batch, context in sizes:
        bench.write_cache(batch * (context + _PAGE))
        bound = (bench.executor.weight_bytes + batch * context * bench.token_bytes) / bandwidth * 1000
        taken = bench.milliseconds(batch, context, steps=steps)
        memory = psutil.Process().memory_info().rss / (1 << 20)
        cells.append(Cell(batch, context, round(taken, 2), round(bound, 2), round(memory, 1)))
        click.echo(f"batch {batch:3} context {context:5}: {taken:8.2f} ms, at least {bound:8.2f}; {memory:.0f} MiB")
    document = {
        "machine": machine() | {"memory_gb_per_s": round(bandwidth / 1e9, 1), "threads": threads},
        "model": model,
        "dtype": dtype,
        "cells": [
            {name: getattr(cell, name) for name in ("batch", "context", "ms", "bound_ms", "rss_mib")}
            for cell in sorted(cells, key=lambda cell: (cell.batch, cell.context))
        ],
        "fitted": fit(
            cells, token_bytes=bench.token_bytes, weight_bytes=bench.executor.weight_bytes, bandwidth=bandwidth
        ),
    }
    path.write_text(json.dumps(document, indent=2) + "\n")
    path.with_suffix(".md").write_text(table(document))
    path.with_suffix(".svg").write_text(plot(document))
    click.echo(path.with_suffix(".md").read_text())


if __name__ == "__main__":
    main()
