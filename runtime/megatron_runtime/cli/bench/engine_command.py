"""`megatron bench engine`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from megatron_runtime.cli.bench.report import Counts, print_table, write_json
from megatron_runtime.cli.options import Memory, readable_errors

_COUNT = click.IntRange(min=1)


@click.command()
@click.option(
    "--model", default="builtin:smollm2-135m", show_default=True, help="builtin:NAME, a GGUF file or a directory."
)
@click.option(
    "--dtype", type=click.Choice(["auto", "float32", "bfloat16", "int8", "int4"]), default="auto", show_default=True
)
@click.option("--batch", type=Counts(), default="1,8,32", show_default=True, help="Requests at once, each size a run.")
@click.option("--prompt-tokens", type=_COUNT, default=64, show_default=True)
@click.option("--new-tokens", type=_COUNT, default=128, show_default=True)
@click.option("--threads", type=_COUNT, help="Torch threads.")
@click.option("--kv-cache-memory", type=Memory(), default="1Gi", show_default=True)
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures there.")
@readable_errors
def command(*, json_file: Path | None, **values: Any) -> None:
    """How fast one engine reads prompts and generates, and how near that is to the memory's bound."""
    from megatron_runtime.cli.bench.engine_load import LoadOptions, run

    options = LoadOptions(**values)
    figures = run(options)
    print_table(f"Engine, {options.model}, {options.dtype}", figures)
    if json_file is not None:
        write_json(json_file, benchmark="engine", options=asdict(options), figures=figures)
