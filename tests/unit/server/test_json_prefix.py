"""A text in parts becomes a JSON object, and keeps what was written."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jiter import from_json

from megatron_runtime.server.json_prefix import JsonPrefix

WHOLE = {"a": [1, -2.5e3, {"b": 'x \\ " é 🗼', "c": None}, [], {}], "d": True, "": "\t"}


def passed(parts: list[str]) -> list[str]:
    prefix = JsonPrefix()
    return [*(prefix.feed(part) for part in parts), prefix.finish()]


def parts_of(text: str, cuts: list[int]) -> list[str]:
    places = sorted(cut % (len(text) + 1) for cut in cuts)
    return [text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True)]


@given(cuts=st.lists(st.integers(0, 1000), max_size=8), indent=st.sampled_from([None, 2]))
def test_an_object_is_passed_on_unchanged(cuts: list[int], indent: int | None) -> None:
    text = json.dumps(WHOLE, indent=indent)
    found = passed(parts_of(text, cuts))
    assert "".join(found) == text
    assert passed(list(text))[5] == text[5], "while it is written"


@given(
    place=st.integers(0, 200),
    rest=st.text(alphabet='\\x01{}[]",:\\u0tre1- ', max_size=8),
    cuts=st.lists(st.integers(0, 1000), max_size=4),
)
def test_any_text_becomes_an_object_that_has_it(place: int, rest: str, cuts: list[int]) -> None:
    text = json.dumps(WHOLE)[:place] + rest
    found = "".join(passed(parts_of(text, cuts)))
    assert found == "".join(passed([text])), "however it is divided"
    try:
        value = json.loads(found)
    except ValueError:
        assert text.lstrip().startswith(found), "it may still become an object"
        return
    assert isinstance(value, dict)
    if found.strip() != text.strip():
        assert value["arguments"] == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "hello",
        "{",
        '{"a": 1} and more',
        '{"a": 1, "b": [1, {"c": \x01',
        '{"a" 1}',
        '{"a": [1, 2}',
        "[1]",
        '{"a": tru, }',
    ],
)
def test_the_sdk_parses_every_part(text: str) -> None:
    buffer = ""
    for part in passed(list(text)):
        buffer += part
        if buffer:
            value: Any = from_json(buffer.encode(), partial_mode=True)
            assert isinstance(value, dict)
    if text not in ("", "{"):
        assert value["arguments"] == text
