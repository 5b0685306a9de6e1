"""Megatron-Core names: `Headers`, the integers that come first in messages, and their lookup."""

from megatron_runtime.protocol.headers import Header as Headers

__all__ = ["Headers", "UnknownHeaderError", "decode_header"]


class UnknownHeaderError(Exception):
    """No header has this integer."""

    def __init__(self, header: object) -> None:
        super().__init__(f"header {header!r}: want one of Headers")


def decode_header(value: int) -> Headers:
    """Return the header of the integer `value`. Raises UnknownHeaderError."""
    try:
        return Headers(value)
    except ValueError:
        raise UnknownHeaderError(value) from None
