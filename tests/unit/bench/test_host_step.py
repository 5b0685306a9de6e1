"""bench/host_step.py measures every kind of request, with a device that computes nothing."""

from __future__ import annotations

from pathlib import Path

from click.testing import CliRunner

from bench.host_step import REQUESTS, main
from megatron_runtime.protocol import strict_json as json


def test_it_measures_every_kind_of_request(tmp_path: Path) -> None:
    path = tmp_path / "host.json"
    result = CliRunner().invoke(main, ["--rows", "1,3", "--steps", "2", "--json", str(path)])
    assert result.exit_code == 0, result.output
    cells = json.loads(path.read_text())["cells"]
    expected = [(rows, name) for rows in (1, 3) for name in REQUESTS]
    assert [(cell["rows"], cell["requests"]) for cell in cells] == expected
    assert all(cell["median_us"] > 0 for cell in cells)
