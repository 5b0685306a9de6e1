"""The results of bench/peers.py, as a JSON document with a plot next to it."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import psutil
from peer_bench.cells import CELLS, DECODE, HTTP, MEMORY, OURS, PREFILL, READY, Cell, Engine
from peer_bench.weights import DTYPES, BenchModel

from megatron_runtime.protocol import strict_json as json

_BARS, _BAR_WIDTH = 210, 420
_STEADY = 1.07
"""Maximum ratio of the highest to the lowest memory bandwidth before and after the turns of two engines.

Up to this ratio, the bandwidths count as equal.
"""
_MIN_TURNS = 3
"""Minimum number of turns at equal bandwidths.

If there are fewer such turns, all turns are counted, because the median of one or two turns is not meaningful.
"""


@dataclass(frozen=True, slots=True)
class Part:
    """The engines or servers on weights of one kind, measured in one run.

    own: for servers, the figures of our engine.
    """

    weights: str
    kind: Literal["engines", "servers"]
    engines: list[Engine]
    own: Engine | None = None


@dataclass(slots=True)
class Report:
    """The JSON document at `path`, which has the results of this run and of earlier runs. Each round rewrites it.

    A part has the results of all engines, or of all servers, on weights of one type. A part of this run replaces the
    same part of earlier runs. Each part has the machine and the commit of its own run. The document's `machine`
    describes the last run.

    machine:   description of the machine.
    bandwidth: memory bandwidth in bytes per second.
    compute:   rate of float32 operations per second.
    """

    path: Path
    machine: dict[str, Any]
    bandwidth: float
    compute: float
    model: BenchModel
    parts: list[Part] = field(default_factory=list)
    _times: Any = field(default_factory=psutil.cpu_times)

    def write(self) -> None:
        """Write the document and its plot."""
        earlier = json.loads(self.path.read_text()) if self.path.exists() else {"rows": [], "parts": []}
        mine = {(part.weights, part.kind) for part in self.parts}
        rows = [row for row in earlier["rows"] if (row["weights"], row["kind"]) not in mine]
        parts = [part for part in earlier["parts"] if (part["weights"], part["kind"]) not in mine]
        rows += [row for part in self.parts for row in self._rows(part)]
        parts += [self._document(part) for part in self.parts]
        document = {"machine": self.machine, "rows": sorted(rows, key=_order), "parts": sorted(parts, key=_order)}
        self.path.write_text(json.dumps(document, indent=2) + "\n")
        self.path.with_suffix(".svg").write_text(plot(document["rows"]))

    def table(self) -> list[tuple[str, ...]]:
        """Return the rows of this run as text, for a table in the terminal."""
        keys = ("weights", "cell", "ours", "best_peer", "peer", "ratio")
        rows = [row for part in self.parts for row in self._rows(part)]
        return [tuple("" if row[key] is None else str(row[key]) for key in keys) for row in rows]

    def _document(self, part: Part) -> dict[str, Any]:
        return {
            "weights": part.weights,
            "kind": part.kind,
            "machine": self.machine | {"percent_taken_by_its_host": _rounded(100 * self._stolen())},
            "participants": [_participant(engine) for engine in part.engines],
        }

    def _stolen(self) -> float:
        """Return the share of CPU time since the start of the run that the hypervisor gave to other machines."""
        spent = [now - before for now, before in zip(psutil.cpu_times(), self._times, strict=True)]
        return spent[self._times._fields.index("steal")] / max(sum(spent), 1e-9)

    def _rows(self, part: Part) -> Iterable[dict[str, Any]]:
        """Yield a row for each cell, with our figure, the best peer's figure, and their ratio.

        A ratio above 1 means that our engine is better.
        """
        ours = next(engine for engine in part.engines if engine.name == OURS)
        for cell in CELLS:
            if cell.name not in ours.figures:
                continue
            measured = [engine for engine in part.engines if cell.name in engine.figures]
            entries = {engine.name: _entry(cell, ours, engine) for engine in measured}
            peers = [name for name in entries if name != OURS]
            best = min(peers, key=lambda name: entries[name]["ratio"], default=None)
            yield {
                "weights": part.weights,
                "kind": part.kind,
                "cell": cell.name,
                "ours": entries[OURS]["median"],
                "best_peer": None if best is None else entries[best]["median"],
                "peer": best,
                "ratio": None if best is None else entries[best]["ratio"],
                **self._of_bound(part, cell, ours),
                "all": entries,
            }

    def _of_bound(self, part: Part, cell: Cell, ours: Engine) -> dict[str, float]:
        figures = ours.figures[cell.name]
        median = statistics.median(figures)
        if cell in DECODE:
            rates = [statistics.mean(rates) for rates in ours.rates[cell.name]]
            read = self.model.step_bytes(part.weights) / cell.batch
            reached = statistics.median(read * figure / rate for figure, rate in zip(figures, rates, strict=True))
            return {
                "percent_of_memory_bound": _rounded(100 * reached),
                "memory_gb_per_s": _rounded(statistics.median(rates) / 1e9),
            }
        if cell is PREFILL:
            reached = median * 2 * self.model.layer_parameters / self.compute
            return {"percent_of_float32_compute": _rounded(100 * reached)}
        if cell is MEMORY:
            return {"above_mib": _rounded(ours.start["platform_rss_mib"])}
        if cell in HTTP and part.own is not None and cell.name in part.own.figures:
            alone = statistics.median(part.own.figures[cell.name])
            return {"own_engine": _rounded(alone), "ratio_to_own_engine": round(median / alone, 2)}
        if cell is READY and part.own is not None:
            return {"of_it_import_torch": round(part.own.start.get("platform_seconds", 0.0), 2)}
        return {}


def _entry(cell: Cell, ours: Engine, engine: Engine) -> dict[str, Any]:
    """Return the figures of an engine. For a peer, also return how many times better our engine is.

    This ratio is the median of the ratios of the turns. The memory bandwidth of a virtual machine can change. So if
    both engines had the same bandwidth in _MIN_TURNS turns or more, only these turns are counted.
    """
    values = engine.figures[cell.name]
    entry: dict[str, Any] = {
        "median": _rounded(statistics.median(values)),
        "min": _rounded(min(values)),
        "max": _rounded(max(values)),
        "turns": len(values),
        "figures": [_rounded(value) for value in values],
    }
    if engine is ours:
        return entry
    pairs = list(zip(ours.figures[cell.name], values, strict=False))
    rates = zip(ours.rates.get(cell.name, []), engine.rates.get(cell.name, []), strict=False)
    is_equal = [max(*own, *other) <= _STEADY * min(*own, *other) for own, other in rates]
    equal = list(itertools.compress(pairs, is_equal))
    counted = equal if len(equal) >= _MIN_TURNS else pairs
    ratio = statistics.median(other / own if cell.is_less else own / other for own, other in counted)
    turns = {"turns_at_equal_memory_rates": len(equal)} if is_equal else {}
    return entry | {"ratio": round(ratio, 2)} | turns


def _order(entry: dict[str, Any]) -> tuple[int, str]:
    """Return the sort key of a row or part of the report: first by type of weights, then engines before servers."""
    return list(DTYPES).index(entry["weights"]), entry["kind"]


def plot(rows: list[dict[str, Any]]) -> str:
    """Return an SVG bar chart of the ratio of each row, which is above 1 if our engine is better than the best peer."""
    shown = [row for row in rows if row["ratio"]]
    height, maximum = 22 * len(shown) + 40, max((row["ratio"] for row in shown), default=1.0)
    scale = _BAR_WIDTH / max(maximum, 1.2)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="780" height="{height}" font-family="sans-serif" '
        'font-size="12">',
        '<text x="8" y="18">ahead of the best peer at equal weights, as a ratio; the line is 1.0</text>',
    ]
    for number, row in enumerate(shown):
        y, width = 30 + 22 * number, row["ratio"] * scale
        colour = "#2a7" if row["ratio"] >= 1 else "#c63"
        lines += [
            f'<text x="8" y="{y + 12}">{row["weights"]}, {row["cell"]}</text>',
            f'<rect x="{_BARS}" y="{y}" width="{width:.0f}" height="16" fill="{colour}"/>',
            f'<text x="{_BARS + 4 + width:.0f}" y="{y + 12}">{row["ratio"]} ({row["peer"]})</text>',
        ]
    lines += [f'<path d="M{_BARS + scale:.0f} 26 V{height - 12}" stroke="black" stroke-dasharray="3"/>', "</svg>"]
    return "\n".join(lines) + "\n"


def _participant(engine: Engine) -> dict[str, Any]:
    start = {name: round(value, 2) for name, value in engine.start.items()}
    retried = {} if engine.retries is None else {"retried_requests": engine.retries}
    return {"engine": engine.name, "start": start, **retried, "failure": engine.failure or None}


def _rounded(value: float) -> float:
    return round(value, 1 if value >= 10 else 2)
