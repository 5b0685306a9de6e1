"""`megatron bench coordinator`."""

from __future__ import annotations

import asyncio
import gc
from dataclasses import asdict
from pathlib import Path

import click
import uvloop

from megatron_runtime.cli.bench.coordinator_load import LoadOptions, run
from megatron_runtime.cli.bench.report import print_table, write_json
from megatron_runtime.cli.options import readable_errors

_COUNT = click.IntRange(min=1)


@click.command()
@click.option("--clients", type=_COUNT, default=8, show_default=True, help="At once.")
@click.option("--engines", type=_COUNT, default=4, show_default=True, help="They answer at once, with one token.")
@click.option("--requests", type=_COUNT, default=10_000, show_default=True, help="Of each part.")
@click.option("--prompt-tokens", type=click.IntRange(min=2), default=1024, show_default=True)
@click.option("--rate", type=_COUNT, default=1000, show_default=True, help="Requests/s where latency is measured.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures there.")
@readable_errors
def command(*, json_file: Path | None, **values: int) -> None:
    """What a request costs in the coordinator.

    A coordinator in a process of its own, longest-prefix routing on; clients and engines that do next to nothing, in
    this one. Its processor time is its own, of all its threads.
    """
    options = LoadOptions(**values)
    # The load shares the machine with what it measures: it must not be what is slow.
    gc.freeze()
    gc.set_threshold(50_000, 50, 100)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        figures = runner.run(run(options))
    print_table("Coordinator", figures)
    if json_file is not None:
        write_json(json_file, benchmark="coordinator", options=asdict(options), figures=figures)
