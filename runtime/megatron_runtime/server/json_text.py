"""JSON of the server's bodies and events, without numbers that are not finite.

The rules are the same as in `protocol.strict_json`. The functions are pydantic's, which take a quarter of the time.
"""

from __future__ import annotations

from typing import Any

import pydantic_core
from starlette.responses import Response


def to_json(value: Any) -> bytes:
    """Return `value` as JSON; numbers that are not finite become null."""
    return pydantic_core.to_json(value, inf_nan_mode="null")


def from_json(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError, also for NaN and Infinity."""
    return pydantic_core.from_json(text, allow_inf_nan=False)


class JsonResponse(Response):
    """A response whose content is a value of JSON's types."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)
