"""Escapes untrusted text for a status, an Event, a log or a terminal."""

from __future__ import annotations

from typing import Any

from megatron_runtime.protocol.text import printable

__all__ = ["printable", "printable_data"]


def printable_data(value: Any, *, limit: int) -> Any:
    """Return plain data, such as a status, with every string escaped and limited to `limit` characters."""
    if isinstance(value, str):
        return printable(value)[:limit]
    if isinstance(value, dict):
        return {key: printable_data(each, limit=limit) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [printable_data(each, limit=limit) for each in value]
    return value
