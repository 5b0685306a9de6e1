"""`Headers`, the integers with which messages begin, and decode_header(). The module path is as in Megatron-Core."""

from typing import Any

from megatron_runtime.protocol.headers import Header as Headers

__all__ = ["KV_HANDOFF_COMPLETE", "SEND_KV", "Headers", "UnknownHeaderError", "decode_header"]

KV_HANDOFF_COMPLETE, SEND_KV = "KV_HANDOFF_COMPLETE", "SEND_KV"
"""Messages with which engine processes of Megatron-Core hand over KV. They have no number in this project, so
decode_header() rejects them by name.
"""


class UnknownHeaderError(Exception):
    """No message header has this number."""

    def __init__(self, header: object) -> None:
        super().__init__(f"header {header!r}: want one of Headers")


def decode_header(value: Any) -> Headers:
    """Return the header with the integer `value`. Raises UnknownHeaderError."""
    try:
        return Headers(value)
    except ValueError:
        raise UnknownHeaderError(value) from None
