"""The bytes of every message are fixed: other implementations are written against docs/reference/protocol.md."""

from pathlib import Path

import pytest
from vectors import VECTORS, as_markdown

from megatron_runtime.protocol.headers import Header
from megatron_runtime.protocol.messages import Control, Plain, decode, unpack

PROTOCOL = Path(__file__).parents[3] / "docs" / "reference" / "protocol.md"


def test_the_page_carries_every_vector_byte_for_byte() -> None:
    assert PROTOCOL.read_text().endswith(as_markdown())


@pytest.mark.parametrize("name", VECTORS)
def test_a_vector_reads_back_as_the_message_it_came_from(name: str) -> None:
    message = VECTORS[name]
    decoded = decode(message.to_frames())
    if name == "PAUSE, plain":
        assert decoded == Control(kind=Header.PAUSE)
    elif isinstance(decoded, Plain):
        assert decoded.items == (unpack(message.to_frames()[0]) if message.to_frames()[0] else [])
    else:
        assert decoded == message


def test_every_header_has_a_vector() -> None:
    shown = {unpack(frames[0])[0] for frames in (m.to_frames() for m in VECTORS.values()) if frames[0]}
    assert shown >= {int(header) for header in Header}
