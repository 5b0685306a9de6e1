"""Mutations of valid inputs: of bytes, and of JSON documents."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Sequence
from typing import Any

from hypothesis import assume
from hypothesis import strategies as st

NUMBERS = (0, 1, 2, 127, 128, 255, 256, 65535, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40)
LARGE_NUMBERS = (*NUMBERS, (1 << 61) - 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
MUTATIONS = ("flip", "number", "delete", "insert", "repeat", "splice", "cut", "token")

MAX_BYTES = 4 << 20
"""Limit of a document's size: the server's limit for a body."""
DEEP = "deeply nested"
"""Placeholder for a document of thousands of levels, which json.dumps() cannot write."""
VALUES: tuple[Any, ...] = (
    None,
    True,
    False,
    *(0, -1, 1, 2, 3, 1 << 20, 10**9, 1 << 31, 1 << 40, 1 << 63, 1 << 64, 10**40, -(1 << 63)),
    *(0.0, -0.5, 1.5, 1e-300, 1e308, float("inf"), float("nan")),
    *("", "x", "../../x", "/etc/passwd", "a\0b", "\ud800", "x" * 3000, DEEP),
    *([], [[]], [0], [None] * 3, ["x", 1], {}, {"a": {}}, {"": None}),
)


@st.composite
def mutated(draw: st.DrawFn, seeds: Sequence[bytes], tokens: Sequence[bytes] = ()) -> bytes:
    """Generate one of `seeds` with a few changes. tokens: byte strings with a meaning for the parser."""
    data = bytearray(draw(st.sampled_from(seeds)))
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(MUTATIONS))
        at = draw(st.integers(0, len(data)))
        count = draw(st.integers(1, 16))
        if kind == "flip" and at < len(data):
            data[at] ^= 1 << draw(st.integers(0, 7))
        elif kind == "number":
            width = draw(st.sampled_from((1, 2, 4, 8)))
            value = draw(st.sampled_from(LARGE_NUMBERS)) % (1 << 8 * width)
            data[at : at + width] = value.to_bytes(width, draw(st.sampled_from(("little", "big"))))
        elif kind == "delete":
            del data[at : at + count]
        elif kind == "insert":
            data[at:at] = draw(st.binary(min_size=1, max_size=16))
        elif kind == "repeat":
            data[at:at] = data[at : at + count] * draw(st.sampled_from((1, 2, 100, 2000)))
        elif kind == "splice":
            other = draw(st.sampled_from(seeds))
            data[at : at + count] = other[at : at + draw(st.integers(0, 64))]
        elif kind == "cut":
            del data[at:]
        elif tokens:
            data[at:at] = draw(st.sampled_from(tokens)) * draw(st.sampled_from((1, 1, 1, 3, 3000)))
    return bytes(data[: 1 << 18])


def mutated_json(seeds: Sequence[bytes], values: Sequence[Any] = VALUES) -> st.SearchStrategy[bytes]:
    """Generate one of the JSON documents in `seeds` with a few values replaced, removed, added or repeated."""
    documents = []
    for seed in seeds:
        with contextlib.suppress(ValueError, RecursionError):
            documents.append(json.loads(seed))
    return _changed(documents, values)


@st.composite
def _changed(draw: st.DrawFn, documents: Sequence[Any], values: Sequence[Any]) -> bytes:
    document = copy.deepcopy(documents[draw(st.integers(0, len(documents) - 1))])
    repeats = [2, 3, 1000]
    for _ in range(draw(st.integers(1, 4))):
        places = list(_places(document))
        if not places:
            break
        container, key = places[draw(st.integers(0, len(places) - 1))]
        kind = draw(st.sampled_from(("replace", "replace", "replace", "remove", "add", "repeat")))
        if kind == "replace":
            container[key] = copy.deepcopy(values[draw(st.integers(0, len(values) - 1))])
        elif kind == "remove":
            del container[key]
        elif kind == "add" and isinstance(container, dict):
            name = draw(st.sampled_from(("", "x", "__metadata__", "../x", "\ud800")))
            container[name] = copy.deepcopy(container[key])
        elif isinstance(container[key], list):
            times = draw(st.sampled_from(repeats))
            container[key] = container[key] * times
            if times == 1000:  # a second time would allocate gigabytes in the strategy itself
                repeats.remove(times)
        elif isinstance(container, list):
            container.append(copy.deepcopy(container[key]))
    text = json.dumps(document)
    assume(len(text) + 8000 * text.count(DEEP) < MAX_BYTES)  # memory allocated here counts as the parser's
    return text.replace(f'"{DEEP}"', "[" * 4000 + "]" * 4000).encode()


def _places(value: Any) -> Any:
    """Yield every (container, key) of a document, of lists only the first 50 items."""
    if isinstance(value, dict | list):
        items = list(value.items()) if isinstance(value, dict) else list(enumerate(value[:50]))
        for key, below in items:
            yield value, key
            yield from _places(below)
