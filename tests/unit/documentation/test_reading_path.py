"""The reading path names files that exist, and stays short enough to be read."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_reading_path_is_short() -> None:
    page = ROOT / "docs" / "development" / "reading-path.md"
    files = [ROOT / path for path in re.findall(r"^\| `([^`]+\.py)` \|", page.read_text(), re.MULTILINE)]
    assert len(files) > 20
    assert sum(file.read_text().count("\n") for file in files) <= 8000
