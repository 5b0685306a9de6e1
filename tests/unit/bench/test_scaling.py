"""The cost of one more sequence and of one more cached token, from the times of steps."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner
from random_checkpoint import LLAMA, random_tensors, write_model
from scaling import Cell, fit, main, table

CELLS = [
    # 3 ms, 0.5 ms per sequence, 2 µs per token; 24 KiB per token.
    Cell(batch, context, 3 + 0.5 * batch + 0.002 * batch * context, 1.0, 700 + batch * context * 24 / 1024, 700)
    for batch in (1, 8, 32)
    for context in (128, 512, 2048)
]


def test_the_slopes_are_those_of_the_steps() -> None:
    fitted = fit(CELLS, token_bytes=24 * 1024, weight_bytes=10**8, bandwidth=1e10)
    assert fitted["us_per_cached_token"] == pytest.approx({1: 2, 8: 2, 32: 2})
    assert fitted["ms_per_sequence"] == pytest.approx(0.5 + 0.002 * 128)
    assert fitted["kib_per_cached_token"] == pytest.approx(24)
    assert fitted["weights_read_ms"] == 10
    assert fitted["us_per_cached_token_bound"] == pytest.approx(2.4576)


def test_a_small_model_is_measured_and_shown(tmp_path: Path) -> None:
    write_model(tmp_path / "model", LLAMA, random_tensors(LLAMA))
    path = tmp_path / "scaling.json"
    options = ("--dtype", "float32", "--threads", "1", "--steps", "1", "--batches", "1,3", "--contexts", "16,40")
    arguments = ["--model", str(tmp_path / "model"), *options, "--max-tokens", "100", "--json", str(path)]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    document = json.loads(path.read_text())
    assert [(cell["batch"], cell["context"]) for cell in document["cells"]] == [(1, 16), (1, 40), (3, 16)]
    assert path.with_suffix(".md").read_text() == table(document)
    assert table(document).count("| 40 |") == 2
    assert min(cell["bound_mib"] for cell in document["cells"]) > 1
    assert path.with_suffix(".svg").read_text().count("polyline") == 2 * 2 * 2
