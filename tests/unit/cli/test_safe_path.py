"""Children of the programs never import from the working directory, which may be that of a downloaded model."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile_directory import HostileDirectory

from megatron_runtime.coordinator.core.settings import CoordinatorSettings
from megatron_runtime.coordinator.spawn import spawn_coordinator
from megatron_runtime.process.children import child_environment, module_command

ROOT = Path(__file__).parents[3]
PACKAGES = ("runtime", "operator", "kernels", "localcluster", "bench")


def _commands(path: Path) -> Iterator[ast.AST]:
    """Lists, tuples and calls whose items include the argument -m."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Call(args=items):
                if any(isinstance(item, ast.Constant) and item.value == "-m" for item in items):
                    yield node


def test_one_module_starts_python_modules() -> None:
    """Of the product; benchmarks start other checkouts and peers, too."""
    places: dict[str, list[ast.AST]] = {}
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            if nodes := list(_commands(path)):
                places[str(path.relative_to(ROOT))] = nodes
    assert {place for place in places if not place.startswith("bench/")} == {
        "runtime/megatron_runtime/process/children.py"
    }, "start Python modules by process.children.module_command()"
    for place, nodes in places.items():
        for node in nodes:
            assert "'-P'" in ast.unparse(node), f"{place}:{node.lineno}"


def test_a_child_finds_modules_where_its_parent_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `pip install --target`, with the folder in sys.path; the working directory and '' are left out."""
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "only_there.py").write_text("import sys; print(*sys.argv[1:], sys.path)")
    hostile = HostileDirectory(tmp_path)
    monkeypatch.chdir(hostile.path)
    monkeypatch.setattr(sys, "path", ["", str(hostile.path), *sys.path, str(tmp_path / "target")])
    done = subprocess.run(
        module_command("only_there", "argument"), env=child_environment(), capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("argument [")
    assert str(hostile.path) not in done.stdout
    assert hostile.imported == []


def test_an_embedded_coordinator_imports_nothing_from_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = HostileDirectory(tmp_path)
    monkeypatch.chdir(hostile.path)
    spawn_coordinator(CoordinatorSettings(listen="127.0.0.1", client_port=0, single_port=True)).stop()
    assert hostile.imported == []
