"""The navigation of the site has every page, and links of the pages outside the site lead somewhere.

`make docs` checks the links of the site.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
LISTED_ON_INDEX = ("decisions", "measurements")
"""Folders whose pages are listed on their index page, not in the navigation."""


def _targets(entry: Any) -> Iterator[str]:
    if isinstance(entry, str):
        yield entry
    elif isinstance(entry, dict):
        for value in entry.values():
            yield from _targets(value)
    else:
        for item in entry:
            yield from _targets(item)


def _links(page: Path) -> list[str]:
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if "://" not in link]


def _anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", title.lower()).strip() for title in titles]
    return {re.sub(r"\s+", "-", title) for title in plain}


def test_the_navigation_has_every_page() -> None:
    named = list(_targets(tomllib.loads((ROOT / "zensical.toml").read_text())["project"]["nav"]))
    assert len(named) == len(set(named))
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    listed = {page for page in pages if page.startswith(LISTED_ON_INDEX) and not page.endswith("index.md")}
    assert set(named) == pages - listed


@pytest.mark.parametrize("folder", LISTED_ON_INDEX)
def test_an_index_page_lists_its_folder(folder: str) -> None:
    index = DOCS / folder / "index.md"
    assert {page.name for page in index.parent.glob("*.md")} - {"index.md"} <= set(_links(index))


@pytest.mark.parametrize(
    "name", ["README.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md", "CODE_OF_CONDUCT.md", "tests/README.md"]
)
def test_links_of_pages_outside_the_site_lead_somewhere(name: str) -> None:
    page = ROOT / name
    for link in _links(page):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), f"{name}: {link}"
        assert not anchor or anchor in _anchors(target), f"{name}: {link}"
