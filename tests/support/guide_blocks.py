"""The fenced blocks of the guides, with their markers (see `unit/documentation/test_guides.py`)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(page for folder in ("get-started", "guides") for page in (ROOT / "docs" / folder).glob("*.md"))
KINDS = re.compile(r'run|soak|cluster|setup|background until "(?P<text>[^"]+)"|skip: \S.*')
BLOCK = re.compile(r"(?:^<!-- test: (?P<marker>[^\n]+) -->\n)?^```(?P<language>\w*)\n(?P<code>.*?)^```$", re.M | re.S)


@dataclass(frozen=True)
class Block:
    """A fenced block of a page. `marker` is empty where it has none."""

    page: Path
    language: str
    code: str
    marker: str

    @property
    def runs(self) -> bool:
        return self.marker in ("run", "soak") or self.ready_text is not None

    @property
    def ready_text(self) -> str | None:
        found = KINDS.fullmatch(self.marker)
        return found["text"] if found is not None else None

    @property
    def commands(self) -> list[str]:
        """The commands of a shell block, each on one line."""
        return [line for line in self.code.replace("\\\n", " ").splitlines() if line and not line.startswith("#")]


def blocks(page: Path) -> list[Block]:
    return [
        Block(page, found["language"], found["code"], found["marker"] or "")
        for found in BLOCK.finditer(page.read_text())
    ]
