"""Limits of requests and tokens per minute for each API key of this server process.

A window of one minute begins with the first request in it. Prompt tokens count when a request is accepted, generated
tokens when its answer ends: an answer may exceed the limit, and the next request waits for it.
"""

from __future__ import annotations

import math
import time
from typing import Literal, TypeAlias

from limits import RateLimitItem, RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import FixedWindowRateLimiter

from megatron_runtime.server.auth import ApiKey
from megatron_runtime.server.errors import ApiError

Kind: TypeAlias = Literal["requests", "tokens"]


class RateLimits:
    """The windows of all keys. A key without a limit has none and costs nothing."""

    def __init__(self) -> None:
        self._storage = MemoryStorage()  # the limiter holds a weak reference
        self._limiter = FixedWindowRateLimiter(self._storage)

    def take_request(self, key: ApiKey) -> None:
        """Count one request. Raises ApiError 429 if the minute has no more."""
        item = _item(key, "requests")
        if item is not None and not self._limiter.hit(item, "requests", key.tenant):
            raise self._exceeded(key, "requests", item, needed=1)

    def take_prompt(self, key: ApiKey, tokens: int) -> None:
        """Count the prompt tokens of one request. Raises ApiError 429 if the minute has fewer left."""
        item = _item(key, "tokens")
        if item is None:
            return
        if tokens > item.amount:
            message = (
                f"The prompts have {tokens} tokens, and the API key {key.name} may use {item.amount} per minute: "
                "shorten them."
            )
            raise ApiError(429, message, code="rate_limit_exceeded", is_final=True)
        if not self._limiter.test(item, "tokens", key.tenant, cost=tokens):
            raise self._exceeded(key, "tokens", item, needed=tokens)
        self._limiter.hit(item, "tokens", key.tenant, cost=tokens)

    def add_generated(self, key: ApiKey, tokens: int) -> None:
        """Count generated tokens, also beyond the limit."""
        item = _item(key, "tokens")
        if item is not None and tokens:
            self._limiter.hit(item, "tokens", key.tenant, cost=tokens)

    def headers(self, key: ApiKey) -> list[tuple[bytes, bytes]]:
        """Return the x-ratelimit headers of an answer, for the limits that the key has."""
        found = []
        for kind in ("requests", "tokens"):
            item = _item(key, kind)
            if item is not None:
                remaining, seconds = self._window(key, kind, item)
                values = {"limit": item.amount, "remaining": remaining, "reset": f"{seconds:.3f}s"}
                found += [(f"x-ratelimit-{name}-{kind}".encode(), str(values[name]).encode()) for name in values]
        return found

    def _window(self, key: ApiKey, kind: Kind, item: RateLimitItem) -> tuple[int, float]:
        """Return what is left of a window, and the seconds to its end."""
        ends, remaining = self._limiter.get_window_stats(item, kind, key.tenant)
        return remaining, 0.0 if remaining == item.amount else max(0.0, ends - time.time())

    def _exceeded(self, key: ApiKey, kind: Kind, item: RateLimitItem, *, needed: int) -> ApiError:
        remaining, seconds = self._window(key, kind, item)
        message = (
            f"Rate limit reached for the API key {key.name}: {item.amount} {kind} per minute, {remaining} left, "
            f"{needed} needed. Try again in {math.ceil(seconds)} s."
        )
        return ApiError(429, message, code="rate_limit_exceeded", retry_after_seconds=seconds)


def _item(key: ApiKey, kind: Kind) -> RateLimitItem | None:
    amount = key.requests_per_minute if kind == "requests" else key.tokens_per_minute
    return None if amount is None else RateLimitItemPerMinute(amount)
