"""The reading path leads through few files, each short enough to be read in one sitting. Recipes name real files."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGES = ROOT / "docs" / "development"
FILES, RECIPES = (
    re.findall(r"^\| `([^`]+)` \|", (PAGES / page).read_text(), re.MULTILINE)
    for page in ("reading-path.md", "recipes.md")
)
MAX_FILES = 30
MAX_LINES = 640
USUAL_LINES = 450
SCREEN_LINES = 50


def test_the_path_has_few_files_each_once() -> None:
    assert 20 < len(FILES) <= MAX_FILES
    assert len(set(FILES)) == len(FILES)


def test_most_files_of_the_path_are_short() -> None:
    lines = [len((ROOT / file).read_text().splitlines()) for file in FILES]
    assert sum(count < USUAL_LINES for count in lines) > len(FILES) * 3 / 4


@pytest.mark.parametrize("file", FILES)
def test_a_file_of_the_path_is_read_in_one_sitting(file: str) -> None:
    source = (ROOT / file).read_text()
    assert len(source.splitlines()) <= MAX_LINES
    functions = [
        node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    lengths = {function.name: (function.end_lineno or 0) - function.lineno + 1 for function in functions}
    assert {name: length for name, length in lengths.items() if length > SCREEN_LINES} == {}


def test_recipes_name_files_that_exist() -> None:
    assert len(RECIPES) > 50
    assert [file for file in RECIPES if not (ROOT / file).is_file()] == []
