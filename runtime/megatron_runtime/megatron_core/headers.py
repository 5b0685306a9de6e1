"""Megatron-Core names: `Headers`, the integers that come first in messages, and their lookup."""

from typing import Any

from megatron_runtime.protocol.headers import Header as Headers

__all__ = ["KV_HANDOFF_COMPLETE", "SEND_KV", "Headers", "UnknownHeaderError", "decode_header"]

KV_HANDOFF_COMPLETE, SEND_KV = "KV_HANDOFF_COMPLETE", "SEND_KV"
"""Messages between the processes of engines of Megatron-Core that hand over KV. They have no number here:
decode_header() rejects them by name."""


class UnknownHeaderError(Exception):
    """No header has this integer."""

    def __init__(self, header: object) -> None:
        super().__init__(f"header {header!r}: want one of Headers")


def decode_header(value: Any) -> Headers:
    """Return the header of the integer `value`. Raises UnknownHeaderError."""
    try:
        return Headers(value)
    except ValueError:
        raise UnknownHeaderError(value) from None
