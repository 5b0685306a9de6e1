"""What was measured, as the document that docs/peers.json holds, and as a plot beside it."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peer_bench.cells import CELLS, DECODE, HTTP, MEMORY, OURS, PREFILL, READY, Cell, Engine
from peer_bench.weights import LAYER_PARAMETERS, STEP_BYTES

_BARS, _BAR_WIDTH = 210, 420


@dataclass(slots=True)
class Report:
    """machine: whatever says which; bandwidth: bytes/s; compute: float32 operations/s. Written anew after each round.

    engines, servers: all that took part; own: our engine by the weights, measured beside the servers.
    """

    path: Path
    machine: dict[str, Any]
    bandwidth: float
    compute: float
    engines: list[Engine] = field(default_factory=list)
    servers: list[Engine] = field(default_factory=list)
    own: list[Engine] = field(default_factory=list)

    def write(self) -> None:
        document = {
            "machine": self.machine,
            "rows": [row for weights in self._weights() for row in self._rows(weights)],
            "engines": [_participant(engine) for engine in (*self.engines, *self.servers)],
        }
        self.path.write_text(json.dumps(document, indent=2) + "\n")
        self.path.with_suffix(".svg").write_text(plot(document["rows"]))

    def table(self) -> list[tuple[str, ...]]:
        rows = [row for weights in self._weights() for row in self._rows(weights)]
        keys = ("weights", "cell", "ours", "best_peer", "peer", "ratio")
        return [tuple("" if row[key] is None else str(row[key]) for key in keys) for row in rows]

    def _weights(self) -> list[str]:
        return list(dict.fromkeys(engine.weights for engine in (*self.engines, *self.servers)))

    def _rows(self, weights: str) -> Iterable[dict[str, Any]]:
        """One for each cell: ours, the best peer, and by how much ours is ahead, whether more or less is better."""
        for cell in CELLS:
            group = self.servers if cell in HTTP or cell is READY else self.engines
            figures = {e.name: e.figures[cell.name] for e in group if e.weights == weights and cell.name in e.figures}
            medians = {name: statistics.median(values) for name, values in figures.items()}
            ours = medians.pop(OURS, None)
            if ours is None:
                continue
            # "Of llama.cpp's" is what the memory is to be compared with; no other is measured.
            best = (min if cell.is_less else max)(medians, key=lambda name: medians[name], default=None)
            ratio = None if best is None else medians[best] / ours if cell.is_less else ours / medians[best]
            yield {
                "weights": weights,
                "cell": cell.name,
                "ours": _rounded(ours),
                "best_peer": None if best is None else _rounded(medians[best]),
                "peer": best,
                "ratio": None if ratio is None else round(ratio, 2),
                **self._of_bound(weights, cell, ours),
                "all": {name: _spread(values) for name, values in figures.items()},
            }

    def _of_bound(self, weights: str, cell: Cell, ours: float) -> dict[str, float]:
        if cell in DECODE:
            return {"percent_of_memory_bound": _rounded(100 * ours / cell.batch * STEP_BYTES[weights] / self.bandwidth)}
        if cell is PREFILL:
            return {"percent_of_float32_compute": _rounded(100 * ours * 2 * LAYER_PARAMETERS / self.compute)}
        own = next((engine for engine in self.own if engine.weights == weights), None)
        if cell in HTTP and own is not None and cell.name in own.figures:
            engine = statistics.median(own.figures[cell.name])
            return {"own_engine": _rounded(engine), "ratio_to_own_engine": round(ours / engine, 2)}
        if cell is MEMORY:
            ours_started = next(e.start for e in self.engines if e.weights == weights and e.name == OURS)
            return {"above_mib": _rounded(ours_started["platform_rss_mib"])}
        if cell is READY and own is not None:
            return {"of_it_import_torch": round(own.start.get("platform_seconds", 0.0), 2)}
        return {}


def plot(rows: list[dict[str, Any]]) -> str:
    """Ratios as bars, one a row: an SVG, written by hand for want of more."""
    shown = [row for row in rows if row["ratio"]]
    height, most = 22 * len(shown) + 40, max((row["ratio"] for row in shown), default=1.0)
    scale = _BAR_WIDTH / max(most, 1.2)
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
    return {"engine": engine.name, "weights": engine.weights, "start": start, "failure": engine.failure or None}


def _spread(values: list[float]) -> dict[str, float]:
    return {
        "median": _rounded(statistics.median(values)),
        "min": _rounded(min(values)),
        "max": _rounded(max(values)),
        "rounds": len(values),
    }


def _rounded(value: float) -> float:
    return round(value, 1 if value >= 10 else 2)
