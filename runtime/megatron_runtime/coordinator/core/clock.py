"""Time as the coordinator sees it: an event loop has it, and a test may have its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol


class Timer(Protocol):
    def cancel(self) -> None: ...


class Clock(Protocol):
    """What is used of an asyncio event loop."""

    def time(self) -> float: ...

    def call_at(self, when: float, callback: Callable[..., Any], /, *args: Any) -> Timer: ...
