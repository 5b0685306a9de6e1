"""The wording check (tools/check_prose.py) finds what its glossary rejects, and nothing inside an exception."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
_spec = importlib.util.spec_from_file_location("check_prose", ROOT / "tools" / "check_prose.py")
assert _spec is not None
assert _spec.loader is not None
check_prose = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(check_prose)


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
