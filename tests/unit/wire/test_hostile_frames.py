"""The codec and frames of an attacker: any bytes are a message or malformed, and what they become is bounded:
elements, depth, text, and what is allocated on the way.
"""

from __future__ import annotations

import ast
import contextlib
import random
import tracemalloc
from pathlib import Path

import msgpack
import pytest
from hostile_frames import BOMBS, VALUES, HostileFrames
from hypothesis import example, given
from hypothesis import strategies as st
from vectors import VECTORS

from megatron_runtime.protocol.codec import (
    CONTROL,
    DETAILS,
    PARAMETERS,
    PLAIN,
    REQUEST,
    MalformedMessageError,
    UnpackLimits,
    header_of,
    pack,
    unpack,
)
from megatron_runtime.protocol.headers import Header
from megatron_runtime.protocol.messages import decode
from megatron_runtime.protocol.text import shown

ROOT = Path(__file__).parents[3]
SMALL = UnpackLimits(elements=2000, containers=500, depth=8, text_bytes=100)
BYTES_AN_ELEMENT = 200
"""An empty map in a list, with what the garbage collector adds, and some to spare."""


@pytest.mark.parametrize("limits", [CONTROL, PLAIN, PARAMETERS, REQUEST], ids=["control", "plain", "params", "request"])
@pytest.mark.parametrize("bomb", BOMBS)
def test_a_bomb_is_malformed_and_takes_no_more_memory_than_its_limits(bomb: str, limits: UnpackLimits) -> None:
    frame = BOMBS[bomb](8 << 20)
    tracemalloc.start()
    try:
        with pytest.raises(MalformedMessageError):
            unpack(frame, limits)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    # Lengths are allocated when they are read, and are no more than the frame has bytes.
    assert peak < 2 * len(frame) + 8 * len(frame) + limits.elements * 40 + limits.containers * BYTES_AN_ELEMENT


def test_lists_that_are_never_filled_are_not_allocated() -> None:
    """A kilobyte of it claimed 64 GiB."""
    for size in (1 << 10, 5 << 10, 1 << 20):
        frame = (b"\xdd" + size.to_bytes(4, "big")) * 1000 + bytes(size)
        tracemalloc.start()
        with pytest.raises(MalformedMessageError):
            unpack(frame, DETAILS)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 8 * 1024 * 1100 + 4 * len(frame)


@pytest.mark.parametrize(
    ("value", "is_read"),
    [
        ([0] * 2000, True),
        ([0] * 2001, False),
        ([[0] * 999, [0] * 999], True),
        ([[0] * 999, [0] * 1000], False),
        ([[]] * 499, True),
        ([[]] * 500, False),
        ({number: None for number in range(2000)}, True),
        ({number: None for number in range(2001)}, False),
        ("x" * 100, True),
        ("x" * 101, False),
        (b"x" * 101, False),
        ([[[[[[[[1]]]]]]]], True),
        ([[[[[[[[[1]]]]]]]]], False),
        ({"a": [{"b": [{"c": [{"d": {}}]}]}]}, True),
        ({"a": [{"b": [{"c": [{"d": {"e": {}}}]}]}]}, False),
        ([1, [2], {"a": [3]}, "x", b"y", None, 1.5, True], True),
    ],
    ids=lambda value: shown(value) if not isinstance(value, bool) else "",
)
def test_each_limit_is_exact(value: object, is_read: bool) -> None:
    with contextlib.nullcontext() if is_read else pytest.raises(MalformedMessageError, match=r"at most|limits"):
        assert unpack(msgpack.packb(value), SMALL) == value


def test_extension_types_are_read_where_they_are_asked_for_only() -> None:
    for value in (msgpack.ExtType(1, b"x"), msgpack.Timestamp(1, 2)):
        with pytest.raises(MalformedMessageError):
            unpack(msgpack.packb(value))
    assert unpack(msgpack.packb(msgpack.ExtType(1, b"x")), extension=lambda code, data: (code, data)) == (1, b"x")


@given(st.lists(st.binary(max_size=300), max_size=10))
@example([b"\x91" * 1100])
@example([b"\xdf\xff\xff\xff\xff"])
@example([b"\x81\x90\x01"])
def test_any_bytes_are_a_value_or_malformed(frames: list[bytes]) -> None:
    for data in frames:
        for limits in (SMALL, CONTROL, PLAIN):
            with contextlib.suppress(MalformedMessageError):
                unpack(data, limits)
        assert header_of(data) is None or isinstance(header_of(data), int)
    with contextlib.suppress(MalformedMessageError):
        decode(frames)


@given(st.sampled_from(list(Header)), st.lists(VALUES, max_size=5), st.lists(st.binary(max_size=40), max_size=4))
def test_any_content_of_a_header_is_a_message_or_malformed(
    header: Header, values: list[object], rest: list[bytes]
) -> None:
    for plain in (CONTROL, PLAIN):
        with contextlib.suppress(MalformedMessageError):
            decode([pack([int(header), *values]), *rest], plain=plain)


@given(st.randoms(use_true_random=False))
def test_damaged_messages_are_a_message_or_malformed(rng: random.Random) -> None:
    source = HostileFrames(rng)
    for _ in range(20):
        with contextlib.suppress(MalformedMessageError):
            decode(source.next())


@pytest.mark.parametrize("name", VECTORS)
def test_a_header_is_found_however_it_is_encoded(name: str) -> None:
    frame = VECTORS[name].to_frames()[0]
    if not frame:
        return
    wide = b"\xdc" + bytes((0, frame[0] & 15)) + b"\xcd\x00" + bytes((frame[1],)) + frame[2:]
    assert header_of(frame) == header_of(wide) == frame[1]
    assert decode([wide]) == decode([frame])


def test_an_error_shows_little_of_a_large_value() -> None:
    for value in ("x" * (8 << 20), b"\xff" * (8 << 20), [0] * 100_000, {"k": "x" * 10_000}, 1 << 63, None):
        assert len(shown(value)) < 200
    with pytest.raises(MalformedMessageError) as rejected:
        decode([pack([int(Header.HELLO), {"role": 1, "name": "x" * 60_000, "incarnation": 1}])])
    assert "field name" in str(rejected.value)
    assert len(str(rejected.value)) < 300


def test_only_the_codec_reads_msgpack() -> None:
    readers = {"unpackb", "unpack", "loads", "load", "Unpacker"}
    found = []
    for folder in ("runtime", "operator", "kernels", "localcluster"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                    if node.value.id == "msgpack" and node.attr in readers:
                        found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
                elif isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "msgpack":
                    found.append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {place.rsplit(":", 1)[0] for place in found} == {"runtime/megatron_runtime/protocol/codec.py"}, (
        f"read msgpack by codec.unpack, with limits: {found}"
    )
