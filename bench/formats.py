"""Measures the decode speed of each number format on this CPU, by instruction set.

The choice of `dtype: auto` is based on the results.

    python bench/formats.py --instruction-sets amx,avx512,avx2 --json build/formats.json

One process loads the model in all formats for all instruction sets. Each round measures every cell, so that a change of
the machine's speed affects all cells. The figure of a cell is the fastest step of all rounds.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import torch
from scaling import PAGE, decode_plan

from megatron_kernels.cpu.library import instruction_sets, library
from megatron_runtime.checkpoints.checkpoint import open_checkpoint
from megatron_runtime.checkpoints.source import resolve
from megatron_runtime.cli.bench.report import machine
from megatron_runtime.cli.options import COUNTS
from megatron_runtime.models.cpp_decoder import CppDecoder, build_decoder
from megatron_runtime.models.layers.cpu import FORMATS, PackedLinears, select_numbers
from megatron_runtime.models.weights import load_weights
from megatron_runtime.protocol import strict_json as json

KEEPS = {"float32": ("float32",), "float16": ("float16", "float32"), "bfloat16": ("bfloat16", "float32")}
"""Map from the type of a checkpoint to the formats that keep its values."""


def load(model: str, names: list[str]) -> dict[tuple[str, str], CppDecoder]:
    """Return a decoder for each format and instruction set. Decoders with the same format share weights."""
    checkpoint, decoders = open_checkpoint(resolve(model)), {}
    for format in FORMATS:
        linears = PackedLinears(format)  # type: ignore[arg-type]
        if format == "int8":
            # Convert the blocks of a file to int8 instead of using them directly.
            linears.quantized_kinds = frozenset()
        weights = load_weights(checkpoint, torch.float32, linears=linears)
        for name in names:
            library().megatron_select(name.encode())
            decoder = build_decoder(checkpoint.config, weights)
            assert isinstance(decoder, CppDecoder)
            decoders[format, name] = decoder
    return decoders


@torch.inference_mode()
def measure(
    decoders: dict[tuple[str, str], CppDecoder], batches: list[int], *, context: int, rounds: int, steps: int
) -> dict[tuple[str, str, int], float]:
    """Return the seconds of the fastest step, by format, instruction set and batch."""
    config = next(iter(decoders.values())).config
    pages = max(batches) * -(-context // PAGE)
    shape = (config.num_layers, pages, PAGE, 2 * config.num_kv_heads * config.head_dim)
    caches = {dtype: torch.randn(shape).to(dtype) for dtype in {numbers.cache for numbers in FORMATS.values()}}
    plans = {batch: decode_plan(batch, context, config.vocab_size) for batch in batches}
    best: dict[tuple[str, str, int], float] = {}
    for _ in range(rounds):
        for (format, name), decoder in decoders.items():
            for batch, plan in plans.items():
                rows = np.arange(batch)
                for _ in range(steps):
                    begun = time.perf_counter()
                    decoder.run_plan(plan, caches[FORMATS[format].cache], rows)
                    took = time.perf_counter() - begun
                    best[format, name, batch] = min(took, best.get((format, name, batch), took))
    return best


def auto_ratios(rates: dict[tuple[str, str, int], float], name: str, batches: list[int]) -> dict[str, dict[str, Any]]:
    """Return, for each checkpoint type, the format that `dtype: auto` selects, and its relative speed by batch.

    The speed is relative to the fastest format that keeps the values of the type (see KEEPS).

    rates: speed by format, instruction set and batch.
    name:  name of the instruction set.
    """
    selections: dict[str, dict[str, Any]] = {}
    for stored, formats in KEEPS.items():
        chosen = select_numbers("auto", getattr(torch, stored)).weights
        ratios = {
            str(batch): round(rates[chosen, name, batch] / max(rates[format, name, batch] for format in formats), 3)
            for batch in batches
        }
        selections[stored] = {"chosen": chosen, "ratio": ratios}
    return selections


def table(rates: dict[tuple[str, str, int], float], names: list[str], batches: list[int]) -> str:
    head = "".join(f" {name}, batch {batch} |" for name in names for batch in batches)
    lines = [f"| format |{head}", "|---|" + "---|" * (len(names) * len(batches))]
    for format in FORMATS:
        cells = "".join(f" {rates[format, name, batch]:.1f} |" for name in names for batch in batches)
        lines.append(f"| `{format}` |{cells}")
    return "\n".join(lines) + "\n"


@click.command(help=__doc__, context_settings={"max_content_width": 120})
@click.option("--model", default="builtin:smollm2-135m", show_default=True)
@click.option(
    "--instruction-sets",
    "chosen",
    default="",
    help="Instruction sets to measure, with commas between. Default: every one that this CPU supports.",
)
@click.option("--batches", type=COUNTS, default="1,8,32", show_default=True)
@click.option("--context", type=int, default=128, show_default=True, help="Number of cached tokens per sequence.")
@click.option("--rounds", type=int, default=20, show_default=True)
@click.option("--steps", type=int, default=3, show_default=True, help="Number of steps per cell and round.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), required=True)
def main(model: str, chosen: str, batches: list[int], context: int, rounds: int, steps: int, json_path: Path) -> None:
    names = chosen.split(",") if chosen else list(instruction_sets())
    best = measure(load(model, names), batches, context=context, rounds=rounds, steps=steps)
    rates = {cell: cell[2] / seconds for cell, seconds in best.items()}
    document = {
        "machine": machine(),
        "model": model,
        "context": context,
        "rounds": rounds,
        "tokens_per_second": {
            name: {
                format: {str(batch): round(rates[format, name, batch], 1) for batch in batches} for format in FORMATS
            }
            for name in names
        },
        "auto": {name: auto_ratios(rates, name, batches) for name in names},
    }
    json_path.write_text(json.dumps(document, indent=2) + "\n")
    click.echo(table(rates, names, batches))
    click.echo(json.dumps(document["auto"], indent=1))


if __name__ == "__main__":
    main()
