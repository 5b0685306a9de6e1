"""Files stay short enough to be read in one go; ruff counts the statements of a function (PLR0915)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MOST_LINES = 720
"""A file beyond that holds more than one thing."""


@pytest.mark.parametrize("folder", ["operator", "runtime", "kernels", "localcluster", "bench"])
def test_no_file_is_too_long_to_be_read_in_one_go(folder: str) -> None:
    lines = {path: path.read_text().count("\n") for path in (ROOT / folder).rglob("*.py")}
    assert lines, f"{folder}/ has no Python files: the test looks in the wrong place"
    too_long = {str(path.relative_to(ROOT)): count for path, count in lines.items() if count > MOST_LINES}
    assert not too_long, f"longer than {MOST_LINES} lines; say it in two: {too_long}"


def test_the_reading_path_is_short() -> None:
    page = ROOT / "docs" / "development" / "reading-path.md"
    files = [ROOT / path for path in re.findall(r"^\| `([^`]+\.py)` \|", page.read_text(), re.MULTILINE)]
    assert len(files) > 20
    assert sum(file.read_text().count("\n") for file in files) <= 8000
