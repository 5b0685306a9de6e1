"""Terminal clients against a hostile server."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from typing import Any

import click
import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from soak import size

from megatron_runtime.cli.api_client import (
    MAX_ERROR_BYTES,
    MAX_EVENT_BYTES,
    ApiClient,
    EventReader,
    StreamFormatError,
    parts_of,
    terminal_text,
)

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["choices", "delta", "content", "text", "error", "message", "usage"]), inner, max_size=3
        )
    ),
    max_leaves=8,
)
LINES = st.one_of(
    JSON.map(lambda value: b"data: " + json.dumps(value).encode()),
    st.binary(max_size=30),
    st.sampled_from([b"data: [DONE]", b"data:", b": keep-alive", b"data: " + b"[" * 100_000, b"event: x", b"\r"]),
)


CLIENT = ApiClient("http://server.invalid", api_key=None)


def client_of(content: Iterator[bytes], *, status: int = 200) -> ApiClient:
    transport = httpx.MockTransport(lambda _: httpx.Response(status, content=content))
    CLIENT._http = httpx.Client(transport=transport, verify=False)
    return CLIENT


def test_any_stream_ends_as_text_or_as_a_readable_error() -> None:
    @settings(max_examples=size(25, soak=50_000))
    @given(st.lists(LINES, max_size=6), st.sampled_from([200, 200, 400, 500]))
    def check(lines: list[bytes], status: int) -> None:
        client = client_of(iter([b"\n".join(lines)]), status=status)
        with contextlib.suppress(click.ClickException):
            for part in client.stream("completions", {}):
                assert isinstance(part.text, str)
                assert isinstance(part.reasoning, str)
        with pytest.raises(click.ClickException):
            client_of(iter([b"\n".join(lines)]), status=status).first_model()

    check()


def test_chunks_may_be_split_anywhere() -> None:
    events: list[dict[str, Any]] = [
        {"choices": [{"delta": {"content": "a\N{LINE SEPARATOR}b\r"}}]},
        {"choices": [{"delta": {"role": "assistant", "content": None}}]},
        {"choices": []},
        {"choices": [{"text": "é"}, {"text": ""}]},
    ]
    lines = [b"data: " + json.dumps(event, ensure_ascii=False).encode() + b"\r\n\n" for event in events]
    stream = b": hello\n\n".join(lines) + b"data: [DONE]\n\ndata: ignored"

    @given(st.lists(st.integers(1, 30), min_size=1, max_size=40))
    def check(cuts: list[int]) -> None:
        reader, rest, read = EventReader(), stream, []
        while rest and not reader.is_done:
            cut = cuts[len(rest) % len(cuts)]
            read += list(reader.feed(rest[:cut]))
            rest = rest[cut:]
        assert read == events
        assert reader.is_done

    check()
    assert [part.text for event in events for part in parts_of(event)] == ["a\N{LINE SEPARATOR}b\r", "", "é", ""]


def test_an_endless_line_is_not_buffered() -> None:
    reader = EventReader()
    for _ in range(MAX_EVENT_BYTES >> 20):
        assert list(reader.feed(b"x" * (1 << 20))) == []
    with pytest.raises(StreamFormatError, match="more than 16777216 bytes"):
        list(reader.feed(b"x"))


def test_an_endless_error_is_not_read_completely() -> None:
    sent = 0

    def endless() -> Iterator[bytes]:
        nonlocal sent
        while True:
            sent += 1 << 16
            yield b"\x1b[2J" * (1 << 14)

    with pytest.raises(click.ClickException, match=r"^\\x1b\[2J") as raised:
        list(client_of(endless(), status=500).stream("completions", {}))
    assert "\x1b" not in raised.value.message
    assert sent <= 2 * MAX_ERROR_BYTES


def test_a_terminal_gets_no_control_sequences() -> None:
    assert terminal_text("\x1b]0;title\x07\x9b31mred\r\n\ttab é 🦙") == "\\x1b]0;title\\x07\\x9b31mred\\x0d\n\ttab é 🦙"
