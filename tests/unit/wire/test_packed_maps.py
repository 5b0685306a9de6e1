"""Maps that are split, extended and forwarded without being unpacked."""

from __future__ import annotations

import contextlib
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_runtime.protocol.codec import MalformedMessageError, extended_map, pack, split_maps, unpack

NAMES = {name: len(pack(name)) for name in ("request_id", "tokens")}
VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False)
    | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=20), inner, max_size=4),
    max_leaves=8,
)
MAPS = st.dictionaries(st.text(max_size=40) | st.sampled_from(sorted(NAMES)), VALUES, max_size=40)


@given(st.lists(MAPS, max_size=3))
def test_the_parts_of_split_maps_are_those_of_the_maps(maps: list[dict[str, Any]]) -> None:
    parts = split_maps(pack([21, maps]), NAMES)
    assert [values for values, _ in parts] == [{k: v for k, v in one.items() if k in NAMES} for one in maps]
    assert [unpack(rest) for _, rest in parts] == [{k: v for k, v in one.items() if k not in NAMES} for one in maps]


@given(MAPS, MAPS, st.booleans())
def test_an_extended_map_has_the_entries_of_both(one: dict[str, Any], other: dict[str, Any], first: bool) -> None:
    other = {f"other {name}": value for name, value in other.items()}
    entries = b"".join(pack(name) + pack(value) for name, value in other.items())
    found = unpack(extended_map(pack(one), entries, len(other), first=first))
    assert list(found.items()) == list(({**other, **one} if first else {**one, **other}).items())


@given(st.binary(max_size=64) | st.lists(MAPS, max_size=2).map(lambda maps: pack([21, maps])[:-1]))
def test_bytes_that_are_no_maps_are_malformed(data: bytes) -> None:
    with contextlib.suppress(MalformedMessageError):
        split_maps(data, NAMES)


def test_a_name_that_is_not_packed_as_a_short_string_is_malformed() -> None:
    long = b"\xd9\x0arequest_id"
    assert msgpack.unpackb(long) == "request_id"
    with pytest.raises(MalformedMessageError, match="request_id"):
        split_maps(b"\x92\x15\x91\x81" + long + b"\x05", NAMES)
