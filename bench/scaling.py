"""Measures the time and memory of a decode step by batch and by context.

    python bench/scaling.py --dtype int4 --json build/scaling.json

One engine runs in this process. The figure of a cell is the median time of --steps steps. Before these steps, all
tokens of the cell's KV cache are written. Linear fits determine the cost of one more sequence and of one more cached
token. The lower bound of a step is the time to read weights and cache at the memory bandwidth that the same run
measures. A table (.md) and a plot (.svg) are written next to the figures. Cells with more than --max-tokens tokens are
skipped. A cached token of the built-in model takes 23 KB.
"""

from __future__ import annotations

import itertools
import statistics
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import numpy as np
import psutil
import torch

from megatron_runtime.backends.native.cpu.executor import CpuExecutor, forward
from megatron_runtime.backends.native.executor import StepPlan
from megatron_runtime.checkpoints.checkpoint import open_checkpoint
from megatron_runtime.checkpoints.source import resolve
from megatron_runtime.cli.bench.engine import memory_bandwidth
from megatron_runtime.cli.bench.report import machine
from megatron_runtime.cli.options import COUNTS
from megatron_runtime.models.layers.cpu import select_numbers
from megatron_runtime.protocol import strict_json as json

PAGE = 16
_LEFT, _RIGHT, _TOP, _BOTTOM, _PANEL = 60, 480, 40, 340, 600


@dataclass(frozen=True, slots=True)
class Cell:
    """A decode step of `batch` sequences with `context` tokens each.

    bound_ms:  time to read the weights and the cache once.
    rss_mib:   resident memory of the process, including the largest cache so far.
    bound_mib: memory of the process before it loads the model, plus the sizes of the weights and the cache.
    """

    batch: int
    context: int
    ms: float
    bound_ms: float
    rss_mib: float
    bound_mib: float

    @property
    def tokens(self) -> int:
        return self.batch * self.context


class Bench:
    """The model under test, which runs decode steps on a KV cache of at most `max_tokens` tokens."""

    def __init__(self, model: str, *, dtype: str, threads: int, max_tokens: int) -> None:
        source = resolve(model)
        self.bare_mib = _rss_mib()
        element = select_numbers(dtype).cache.itemsize
        self.token_bytes = open_checkpoint(source).config.kv_elements_per_token * element
        self.executor = CpuExecutor(
            source,
            dtype=dtype,
            kv_cache_memory=(max_tokens + PAGE) * self.token_bytes,
            threads=threads,
            page_size=PAGE,
        )
        self.executor.load()
        self._written = 0

    @torch.inference_mode()
    def write_cache(self, tokens: int) -> None:
        """Write the KV cache pages of `tokens` tokens.

        Linux maps all unwritten memory to a single page of zeros. Without this function, all reads would hit this page.
        """
        pages = -(-tokens // PAGE)
        cache_LPXE = self.executor.cache_LPXE
        if not self._written:
            cache_LPXE[:, :1].normal_()
            self._written = 1
        if pages > self._written:
            cache_LPXE[:, self._written : pages] = cache_LPXE[:, :1]
            self._written = pages

    def milliseconds(self, batch: int, context: int, *, steps: int) -> float:
        """Return the median milliseconds of a step with `batch` sequences, which have `context` tokens each."""
        plan = decode_plan(batch, context, self.executor.vocab_size)
        taken = []
        for _ in range(steps + 1):
            begun = time.perf_counter()
            model, cache_LPXE = self.executor.model, self.executor.cache_LPXE
            assert model is not None
            forward(model, plan, cache_LPXE).sampled_logits()
            taken.append(time.perf_counter() - begun)
        return statistics.median(taken[1:]) * 1000


def _rss_mib() -> float:
    return psutil.Process().memory_info().rss / (1 << 20)


def decode_plan(batch: int, context: int, vocabulary: int) -> StepPlan:
    """Return the plan of a step that computes the last of the `context` tokens of each sequence."""
    pages = -(-context // PAGE)
    tables = np.arange(batch * pages, dtype=np.int32).reshape(batch, pages)
    return StepPlan(
        token_ids=np.random.default_rng(batch).integers(0, vocabulary, batch).astype(np.int32),
        positions=np.full(batch, context - 1, dtype=np.int32),
        query_lengths=np.ones(batch, dtype=np.int32),
        context_lengths=np.full(batch, context, dtype=np.int32),
        block_tables=tables,
        slot_mapping=tables[:, -1].astype(np.int64) * PAGE + (context - 1) % PAGE,
        needs_sample=np.ones(batch, dtype=bool),
        sampling=SimpleNamespace(prompt_targets={}),  # type: ignore[arg-type]
    )


def _slope(points: list[tuple[float, float]]) -> float | None:
    if len({x for x, _ in points}) < 2:
        return None
    return float(np.polyfit(*zip(*points, strict=True), 1)[0])


def fit(cells: list[Cell], *, token_bytes: int, weight_bytes: int, bandwidth: float) -> dict[str, Any]:
    """Return the cost of one more sequence and of one more cached token, as measured and as a lower bound."""
    shortest = min(cell.context for cell in cells)
    by_tokens = {
        batch: _slope([(cell.tokens, cell.ms) for cell in cells if cell.batch == batch])
        for batch in sorted({cell.batch for cell in cells})
    }
    kilobytes = _slope([(cell.tokens, cell.rss_mib * 1024) for cell in cells])
    return {
        "weights_read_ms": round(weight_bytes / bandwidth * 1000, 3),
        "ms_per_sequence": _slope([(cell.batch, cell.ms) for cell in cells if cell.context == shortest]),
        "ms_per_sequence_bound": shortest * token_bytes / bandwidth * 1000,
        "us_per_cached_token": {batch: slope * 1000 for batch, slope in by_tokens.items() if slope is not None},
        "us_per_cached_token_bound": token_bytes / bandwidth * 1e6,
        "kib_per_cached_token": kilobytes,
        "kib_per_cached_token_bound": token_bytes / 1024,
    }


def table(document: dict[str, Any]) -> str:
    """Return Markdown tables of the time and memory by batch and context, and of the results of fit()."""
    fitted, which = document["fitted"], f"{document['model']}, {document['dtype']}"
    shortest = min(cell["context"] for cell in document["cells"])
    lines = [
        f"# A decode step by batch and context\n\n{which}, on {document['machine']['processor']}, "
        f"{document['machine']['threads']} threads, memory read at {document['machine']['memory_gb_per_s']} GB/s.\n",
        "Milliseconds, and in brackets the least time to read the weights and the cache.\n",
        *_grid(document, "ms", "bound_ms", digits=1),
        "\nMemory of the process in MiB, and in brackets the sum of the memory before the load, weights and cache.\n",
        *_grid(document, "rss_mib", "bound_mib", digits=0),
        "\n| cost of one more | measured | bound |",
        "|---|---|---|",
    ]
    if (slope := fitted["ms_per_sequence"]) is not None:
        bound = f"{fitted['ms_per_sequence_bound']:.2f} ms, its cache; and arithmetic"
        lines.append(f"| sequence, at {shortest} tokens | {slope:.2f} ms | {bound} |")
    bound = f"{fitted['us_per_cached_token_bound']:.2f} µs"
    for batch, slope in fitted["us_per_cached_token"].items():
        lines.append(f"| cached token, at batch {batch} | {slope:.2f} µs | {bound} |")
    if (kib := fitted["kib_per_cached_token"]) is not None:
        bound = f"{fitted['kib_per_cached_token_bound']:.1f} KiB"
        lines.append(f"| cached token, of memory | {kib:.1f} KiB | {bound} |")
    return "\n".join(lines) + "\n"


def _grid(document: dict[str, Any], value: str, bound: str, *, digits: int) -> list[str]:
    cells = {(cell["batch"], cell["context"]): cell for cell in document["cells"]}
    batches, contexts = (sorted({key[place] for key in cells}) for place in (0, 1))
    lines = [
        "| context | " + " | ".join(f"batch {batch}" for batch in batches) + " |",
        "|---" * (len(batches) + 1) + "|",
    ]
    for context in contexts:
        row = [cells.get((batch, context)) for batch in batches]
        shown = ("" if cell is None else f"{cell[value]:.{digits}f} ({cell[bound]:.{digits}f})" for cell in row)
        lines.append(f"| {context} | " + " | ".join(shown) + " |")
    return lines


def plot(document: dict[str, Any]) -> str:
    """Return an SVG plot of time and memory against context, on logarithmic scales, with one line per batch size.

    Dashed lines are the bounds.
    """
    cells, which = document["cells"], document["dtype"]
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * _PANEL}" height="390" font-family="sans-serif" '
            'font-size="12">',
            *_panel(cells, "ms", "bound_ms", left=0, title=f"ms of a decode step against context; {which}"),
            *_panel(cells, "rss_mib", "bound_mib", left=_PANEL, title="MiB of the process; dashes: the bound"),
            "</svg>\n",
        ]
    )


def _panel(cells: list[dict[str, Any]], value: str, bound: str, *, left: int, title: str) -> list[str]:
    contexts = sorted({cell["context"] for cell in cells})
    values = [cell[name] for cell in cells for name in (value, bound)]
    low, high = np.log2(min(values)), np.log2(max(values)) + 0.1
    width = max(np.log2(contexts[-1] / contexts[0]), 1)

    def place(context: int, height: float) -> tuple[int, int]:
        x = left + _LEFT + (_RIGHT - _LEFT) * np.log2(context / contexts[0]) / width
        y = _BOTTOM - (_BOTTOM - _TOP) * (np.log2(height) - low) / (high - low)
        return round(x), round(y)

    lines = [f'<text x="{left + 8}" y="18">{title}</text>']
    for context in contexts:
        x, _ = place(context, values[0])
        lines.append(f'<text x="{x}" y="362" text-anchor="middle">{context}</text>')
    for shown in (min(values), max(values)):
        _, y = place(contexts[0], shown)
        lines.append(f'<text x="{left + _LEFT - 8}" y="{y}" text-anchor="end">{shown:.0f}</text>')
    for batch in sorted({cell["batch"] for cell in cells}):
        own = [cell for cell in cells if cell["batch"] == batch]
        for name, colour, dashes in ((bound, "#999", ' stroke-dasharray="3"'), (value, "#26a", "")):
            points = [place(cell["context"], cell[name]) for cell in own]
            joined = " ".join(f"{x},{y}" for x, y in points)
            lines.append(f'<polyline points="{joined}" fill="none" stroke="{colour}"{dashes}/>')
        x, y = points[-1]
        lines.append(f'<text x="{x + 6}" y="{y}">batch {batch}</text>')
    return lines


@click.command()
@click.option("--model", default="builtin:smollm2-135m", show_default=True)
@click.option("--dtype", default="auto", show_default=True)
@click.option("--threads", type=click.IntRange(min=1), default=2, show_default=True)
@click.option("--steps", type=click.IntRange(min=1), default=15, show_default=True, help="Number of steps per cell.")
@click.option("--batches", type=COUNTS, default="1,2,4,8,16,32,64", show_default=True)
@click.option("--contexts", type=COUNTS, default="128,512,2048,8192", show_default=True)
@click.option(
    "--max-tokens",
    type=click.IntRange(min=1),
    default=1 << 16,
    show_default=True,
    help="Skip cells whose KV cache would hold more tokens.",
)
@click.option("--json", "path", type=click.Path(dir_okay=False, path_type=Path), default="build/scaling.json")
def main(
    *,
    model: str,
    dtype: str,
    threads: int,
    steps: int,
    batches: tuple[int, ...],
    contexts: tuple[int, ...],
    max_tokens: int,
    path: Path,
) -> None:
    """Measure decode steps, and write figures, a table and a plot."""
    torch.set_num_threads(threads)
    bandwidth = memory_bandwidth()
    # Ascending by size, because resident memory never shrinks.
    sizes = sorted(itertools.product(batches, contexts), key=lambda size: size[0] * size[1])
    sizes = [(batch, context) for batch, context in sizes if batch * context <= max_tokens]
    # Each sequence has one more page, because a context need not be a multiple of a page.
    capacity = max(batch * (context + PAGE) for batch, context in sizes)
    bench = Bench(model, dtype=dtype, threads=threads, max_tokens=capacity)
    cells = []
    for batch, context in sizes:
        bench.write_cache(batch * (context + PAGE))
        bound = (bench.executor.weight_bytes + batch * context * bench.token_bytes) / bandwidth * 1000
        taken = bench.milliseconds(batch, context, steps=steps)
        memory = _rss_mib()
        minimum = bench.bare_mib + (bench.executor.weight_bytes + batch * context * bench.token_bytes) / (1 << 20)
        figures = (taken, bound, memory, minimum)
        cells.append(Cell(batch, context, *(round(figure, 5) for figure in figures)))
        click.echo(f"batch {batch:3} context {context:5}: {taken:8.2f} ms, at least {bound:8.2f}; {memory:.0f} MiB")
    document = {
        "machine": machine() | {"memory_gb_per_s": round(bandwidth / 1e9, 1), "threads": threads},
        "model": model,
        "dtype": dtype,
        "cells": [asdict(cell) for cell in sorted(cells, key=lambda cell: (cell.batch, cell.context))],
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
