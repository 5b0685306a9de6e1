"""JSON for request bodies, answers and events of the server, without NaN and infinities.

The rules are the same as in `protocol.strict_json`. The functions in this module call pydantic, which is four times as
fast.
"""

from __future__ import annotations

from typing import Any

import pydantic_core
from starlette.responses import Response


def to_json(value: Any) -> bytes:
    """Return `value` as JSON. Non-finite numbers become null."""
    return pydantic_core.to_json(value, inf_nan_mode="null")


def from_json(text: str) -> Any:
    """Return the value of a JSON text. Raises ValueError for invalid JSON, including NaN and Infinity."""
    return pydantic_core.from_json(text, allow_inf_nan=False)


class JsonResponse(Response):
    """A response that sends a value as JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return to_json(content)
