"""What a benchmark found, as a table for people and as JSON for programs."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

import megatron_runtime


@dataclass(frozen=True, slots=True)
class Figure:
    """One measured number. key: its name in the JSON. goal: what is aimed at, as a reader would write it."""

    key: str
    what: str
    value: float
    unit: str
    goal: str = ""


class Counts(click.ParamType["tuple[int, ...]"]):
    """Numbers from 1 up: `1,8,32`."""

    name = "n,n,…"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = str(value).split(",")
        if not all(part.isdecimal() and int(part) for part in parts):
            self.fail(f"{value!r}: want numbers from 1 up with commas between, such as 1,8,32.", param, ctx)
        return tuple(map(int, parts))


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that `percent` of them do not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(len(ordered) * percent / 100))]


def machine() -> dict[str, Any]:
    return {
        "processor": _processor_name(),
        "cpus": os.cpu_count(),
        "load_average": os.getloadavg()[0],
        "python": platform.python_version(),
        "megatron": megatron_runtime.__version__,
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _processor_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def print_table(title: str, figures: Iterable[Figure]) -> None:
    table = Table(title=title, title_justify="left")
    table.add_column("measured")
    table.add_column("", justify="right")
    table.add_column("unit")
    table.add_column("goal")
    for figure in figures:
        table.add_row(figure.what, f"{figure.value:,.4g}", figure.unit, figure.goal)
    Console().print(table)


def write_json(path: Path, *, benchmark: str, options: dict[str, Any], figures: Iterable[Figure]) -> None:
    document = {
        "benchmark": benchmark,
        "machine": machine(),
        "options": options,
        "figures": {figure.key: figure.value for figure in figures},
    }
    path.write_text(json.dumps(document, indent=2) + "\n")
