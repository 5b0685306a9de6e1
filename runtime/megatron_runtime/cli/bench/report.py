"""Prints the figures of a benchmark as a table, and writes them to a JSON file."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.table import Column, Table

import megatron_runtime
from megatron_runtime.cli.options import NEW_FILE
from megatron_runtime.protocol import strict_json as json

MAX_WIDTH = 1000
"""Maximum number of characters per line in a table that is written to a file or a pipe."""
json_file = click.option("--json", "json_file", type=NEW_FILE, help="Write the results to this JSON file.")


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number. key: name in the JSON file. what: name in the table. goal: target value in the table."""

    key: str
    what: str
    value: float
    unit: str
    goal: str = ""


def percentiles(key: str, what: str, seconds: Sequence[float], *, goals: Sequence[str] = ("", "")) -> list[Figure]:
    """Return the median and the 99th percentile of `seconds` as Figures in milliseconds, without interpolation."""
    values = 1000 * np.percentile(seconds, (50, 99), method="higher")
    return [
        Figure(f"{key}_p{percent}_ms", f"{what}, p{percent}", float(value), "ms", goal)
        for percent, value, goal in zip((50, 99), values, goals, strict=True)
    ]


def machine() -> dict[str, Any]:
    """Return a description of this machine and of the software versions, for the JSON file."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    flags = next((line.partition(":")[2].split() for line in lines if line.startswith("flags")), [])
    return {
        "processor": names[0] if names else platform.machine(),
        "instruction_sets": sorted(flag for flag in flags if flag.startswith(("avx", "amx"))),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "megatron": megatron_runtime.__version__,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def report(benchmark: str, title: str, options: dict[str, Any], figures: Sequence[Figure], path: Path | None) -> None:
    """Print the figures as a table. If `path` is set, also write them with write_figures()."""
    table = Table("measured", Column(justify="right"), "unit", "goal", title=title, title_justify="left")
    for figure in figures:
        table.add_row(figure.what, f"{figure.value:,.4g}", figure.unit, figure.goal)
    print_table(table)
    if path is not None:
        write_figures(benchmark, options, {figure.key: figure.value for figure in figures}, path)


def print_table(table: Table) -> None:
    """Print a table. On a terminal, it is at most as wide as the terminal. Otherwise, it is as wide as its content."""
    console = Console()
    if not console.is_terminal:
        console.width = MAX_WIDTH
    console.print(table)


def write_figures(benchmark: str, options: dict[str, Any], figures: dict[str, Any], path: Path) -> None:
    """Write the figures, the machine and the options as JSON to `path`."""
    document = {"benchmark": benchmark, "machine": machine(), "options": options, "figures": figures}
    path.write_text(json.dumps(document, indent=2) + "\n")
