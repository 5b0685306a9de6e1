"""The checks of wording (tools/check_prose.py) and of docstrings (tools/check_docstrings.py) find what they reject."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[3]


def _tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


check_prose, check_docstrings = _tool("check_prose"), _tool("check_docstrings")


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("Release the memory.\nThe proc" + "essor is idle.", [2]),
        ("def test_no" + "body_is_woken() -> None:", [1]),
        ("class ChildRef" + "usal(Base):", [1]),
        ("A logits processor of the model.", []),
        ("dial tcp: connection refused", []),
        ("The processing of a request.", []),
    ],
)
def test_rejected_wording_is_found_in_prose_and_identifiers(text: str, matches: list[int]) -> None:
    assert [line for line, _ in check_prose.wording(text, check_prose.read_rules())] == matches


def test_only_prose_of_markdown_is_limited_to_100_columns() -> None:
    long = "word " * 30
    code = f"```sh\n{long}\n```"
    page = f"{long}\n\n| {long} |\n\n{code}\n\n[{'x' * 120}](https://example.com)\n"
    assert [line for line, _ in check_prose.long_lines(page)] == [1]


@pytest.mark.parametrize(
    ("code", "orphans"),
    [
        ('"""Module."""\nLIMIT = 1\n"""Its meaning."""\n', []),
        ('class Value:\n    """Class."""\n\n    name: str\n    """Field."""\n', []),
        ('async def run() -> None:\n    """Function."""\n', []),
        ('LIMIT = 1\n"""Its meaning."""\n"""A second one."""\n', [3]),
        ('import os\n"""Of an import."""\n', [2]),
        ('def run() -> None:\n    return\n    """After the end."""\n', [3]),
        ('if True:\n    """Of a branch."""\nelse:\n    """Of another."""\n', [2, 4]),
        ("try:\n    pass\nexcept OSError:\n    'Of a handler.'\n", [4]),
    ],
)
def test_a_string_that_documents_nothing_is_found(code: str, orphans: list[int]) -> None:
    assert sorted(check_docstrings.orphaned(ast.parse(code))) == orphans
