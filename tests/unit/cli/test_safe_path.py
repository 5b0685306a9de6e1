"""Children of the programs never import from the working directory, which may be that of a downloaded model."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from hostile_directory import HostileDirectory

from megatron_runtime.coordinator.core.settings import CoordinatorSettings
from megatron_runtime.coordinator.spawn import spawn_coordinator

ROOT = Path(__file__).parents[3]
PACKAGES = ("runtime", "operator", "kernels", "localcluster", "bench")


def _commands(path: Path) -> Iterator[ast.AST]:
    """Lists, tuples and calls whose items include the argument -m."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.List(elts=items) | ast.Tuple(elts=items) | ast.Call(args=items):
                if any(isinstance(item, ast.Constant) and item.value == "-m" for item in items):
                    yield node


def test_every_python_that_is_started_with_a_module_gets_the_flag() -> None:
    found = 0
    for package in PACKAGES:
        for path in (ROOT / package).rglob("*.py"):
            for node in _commands(path):
                found += 1
                assert "'-P'" in ast.unparse(node), f"{path}:{node.lineno}"
    assert found >= 7


def test_an_embedded_coordinator_imports_nothing_from_the_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hostile = HostileDirectory(tmp_path)
    monkeypatch.chdir(hostile.path)
    spawn_coordinator(CoordinatorSettings(listen="127.0.0.1", client_port=0, single_port=True)).stop()
    assert hostile.imported == []
