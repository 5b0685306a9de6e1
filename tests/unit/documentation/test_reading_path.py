"""The reading path names files that exist, each once."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_the_reading_path_names_files_that_exist() -> None:
    page = ROOT / "docs" / "development" / "reading-path.md"
    files = re.findall(r"^\| `([^`]+)` \|", page.read_text(), re.MULTILINE)
    assert len(files) > 20
    assert len(set(files)) == len(files)
    assert [file for file in files if not (file.endswith(".py") and (ROOT / file).is_file())] == []
