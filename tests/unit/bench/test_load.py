"""Figures of loads, computed from measured seconds."""

from pathlib import Path

from load import load, summary

ROOT = Path(__file__).parents[3]


def test_a_load_is_measured_in_a_new_process() -> None:
    found = load(ROOT, model="builtin:smollm2-135m", dtype="float32", threads=1)
    assert set(found) == {"import_torch", "import_own", "load", "total", "cpu", "tokenizer"}
    assert found["total"] >= found["import_own"] + found["load"] - 1e-6 > 0


def test_a_summary_has_median_minimum_and_maximum() -> None:
    assert summary([{"load": value} for value in (3.0, 1.0, 2.0)]) == {"load": [2.0, 1.0, 3.0]}
