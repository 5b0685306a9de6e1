"""The simulation of cells: its figures, table and plot, and that a cell by prefix keeps prefixes together."""

import json
from pathlib import Path

from cells import AFFINE, ONE, ROTATION, SHARED, main, simulate, table
from click.testing import CliRunner


def test_all_layouts_are_simulated_and_shown(tmp_path: Path) -> None:
    path = tmp_path / "cells.json"
    arguments = ["--engines", "6", "--cell", "4", "--requests", "20", "--json", str(path)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    document = json.loads(path.read_text())
    layouts = [(entry["layout"], entry["engines"], entry["cells"]) for entry in document["results"]]
    assert layouts == [(ONE, 6, 1), (SHARED, 6, 1), (AFFINE, 6, 2), (ROTATION, 6, 2)]
    assert all(entry["submit_us"] > 0 and entry["max_open"] > 0 for entry in document["results"])
    assert document["bytes_per_block"] > 50
    assert path.with_suffix(".md").read_text() == table(document)
    assert path.with_suffix(".svg").read_text().count("polyline") == 2 * 4


def test_cells_by_prefix_find_cached_prefixes_that_a_rotation_misses() -> None:
    affine, rotation = (simulate(layout, 32, 4, 60, 1) for layout in (AFFINE, ROTATION))
    assert affine.hits > rotation.hits + 0.2
