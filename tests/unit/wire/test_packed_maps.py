"""Maps, lists and token ids that are extended, split and forwarded without being unpacked."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_runtime.protocol.codec import (
    MAX_TOKEN,
    MalformedMessageError,
    extended_map,
    joined_list,
    pack,
    split_list,
    token_list_from_bytes,
    unpack,
    unpack_tokens,
)

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
MAPS = st.dictionaries(st.text(max_size=40), VALUES, max_size=40)


@given(st.lists(VALUES, max_size=20))
def test_the_elements_of_a_list_make_the_list_again(values: list[Any]) -> None:
    elements = split_list(pack(values))
    assert [unpack(element) for element in elements] == values
    assert unpack(joined_list(elements)) == values


@given(MAPS, MAPS)
def test_an_extended_map_has_the_entries_of_both(one: dict[str, Any], other: dict[str, Any]) -> None:
    other = {f"other {name}": value for name, value in other.items()}
    entries = b"".join(pack(name) + pack(value) for name, value in other.items())
    found = unpack(extended_map(pack(one), entries, len(other)))
    assert list(found.items()) == list({**one, **other}.items())


@given(st.binary(max_size=64) | st.lists(VALUES, max_size=2).map(lambda values: pack(values)[:-1]))
def test_bytes_that_are_no_list_are_malformed(data: bytes) -> None:
    for read in (split_list, unpack_tokens):
        with contextlib.suppress(MalformedMessageError):
            read(data)


def test_bytes_after_a_list_are_malformed() -> None:
    with pytest.raises(MalformedMessageError, match="1 of them follow its list"):
        split_list(pack([1, 2]) + b"\x01")


@given(st.lists(st.integers(0, MAX_TOKEN)))
def test_packed_tokens_become_int32(tokens: list[int]) -> None:
    assert token_list_from_bytes(unpack_tokens(pack(tokens))) == tokens


@pytest.mark.parametrize("wrong", [-1, MAX_TOKEN + 1, 1 << 40, -(1 << 40), 1.0, "1", b"1", None, [1], {1: 1}])
def test_a_token_that_is_none_is_malformed(wrong: Any) -> None:
    with pytest.raises(MalformedMessageError, match="token"):
        unpack_tokens(pack([1, wrong, 2]))
