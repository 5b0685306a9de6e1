"""Limits of requests and tokens per minute for each API key. The coordinator counts the usage of all servers.

Before the server submits a request, it reserves the tokens of the prompts and some generated tokens for each choice.
Further generated tokens are charged while they are generated. When the request ends for any reason, the server returns
unused reserved tokens.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Awaitable
from dataclasses import dataclass
from typing import Protocol

from megatron_runtime.protocol import limits
from megatron_runtime.protocol.messages import Charge, Quota, Reserve
from megatron_runtime.requests.quotas import Kind
from megatron_runtime.server.auth import ApiKey
from megatron_runtime.server.errors import ApiError, try_again

COUNTED_TOKENS = 16
"""Tokens beyond a reservation are charged in portions of this number. The remainder is charged when the request ends.

If the API key has a token limit, a stream reports its tokens at least this often.
"""
_REFRESH_SECONDS = 1.0
"""Maximum seconds that an answer waits for the counts in its headers if it does not otherwise need the coordinator."""


@dataclass(eq=False)
class LimitReachedError(ApiError):
    """The request exceeds a limit of its API key. reason: the exceeded limit, "requests" or "tokens"."""

    reason: Kind = "tokens"


class Counter(Protocol):
    """The methods of CoordinatorClient that count requests and tokens."""

    @property
    def connected(self) -> bool: ...

    def reserve(self, reserve: Reserve) -> Awaitable[Quota]: ...

    def charge(self, charge: Charge) -> None: ...


@dataclass(slots=True)
class _Left:
    """The requests or tokens that remain of a limit, as the coordinator last reported to this server.

    full_at: time on the monotonic clock at which the full limit is available again.
    """

    amount: int
    full_at: float


class RateLimits:
    """Counts requests and tokens for the API keys of this server.

    An API key without limits causes no calls to the coordinator.

    reserved_tokens: maximum number of generated tokens that a request reserves for each choice.
    wait_seconds:    how long a request waits for an unreachable coordinator, in seconds.
    """

    def __init__(self, counter: Counter, *, reserved_tokens: int, wait_seconds: float) -> None:
        self._counter = counter
        self._reserved_tokens = reserved_tokens
        self._wait_seconds = wait_seconds
        self._left: dict[tuple[str, Kind], _Left] = {}

    async def take_request(self, key: ApiKey) -> None:
        """Count one request.

        Raises LimitReachedError if no request or no token is left in this minute, and ApiError 503 if the coordinator
        is unreachable.
        """
        await self._reserve(key, requests=1)

    async def reserve(self, key: ApiKey, *, prompt: int, choices: list[int | None]) -> Reservation:
        """Reserve the tokens of one request.

        prompt:  number of tokens in all prompts.
        choices: maximum number of tokens of each choice; None: no maximum.

        Raises LimitReachedError if too few tokens are left in this minute, and ApiError 503 if the coordinator is
        unreachable.
        """
        limit = key.tokens_per_minute
        assert limit is not None
        self.check_prompt(key, prompt)
        maximum = self._reserved_tokens
        generated = sum(maximum if choice is None else min(choice, maximum) for choice in choices)
        # A request larger than the limit reserves a whole minute.
        reserved = min(prompt + generated, limit)
        quota = await self._reserve(key, tokens=reserved)
        return Reservation(self, key, reserved - prompt, window=quota.window)

    def check_prompt(self, key: ApiKey, tokens: int) -> None:
        """Raise LimitReachedError if prompts with this number of tokens exceed the limit of a whole minute."""
        if key.tokens_per_minute is not None and tokens > key.tokens_per_minute:
            message = (
                f"The prompts have {tokens} tokens, and the API key {key.name} may use {key.tokens_per_minute} per "
                "minute: shorten them."
            )
            raise LimitReachedError(429, message, code="rate_limit_exceeded", is_final=True)

    def charge(self, key: ApiKey, tokens: int, *, window: int | None = None) -> None:
        """Count tokens of a key, even beyond its limit.

        A negative number returns unused tokens to the limit.

        window: number of the minute in which returned tokens were reserved; None if `tokens` is positive.
        """
        limit = key.tokens_per_minute
        if limit is None or not tokens:
            return
        window = window if tokens < 0 else None
        self._counter.charge(Charge(tenant=key.tenant, tokens_per_minute=limit, tokens=tokens, window=window))
        left = self._left.get((key.tenant, "tokens"))
        if left is not None:
            left.amount = min(max(0, left.amount - tokens), limit)
            now = time.monotonic()
            if left.amount < limit and left.full_at <= now:
                left.full_at = now + 60  # these tokens start a new minute

    async def refresh(self, key: ApiKey) -> None:
        """Fetch the key's remaining requests and tokens from the coordinator, for the headers of the next answer."""
        if key.is_limited and self._counter.connected:
            try:
                async with asyncio.timeout(_REFRESH_SECONDS):
                    await self._ask(key)
            except TimeoutError:
                pass  # the headers then contain the last reported amounts

    def headers(self, key: ApiKey) -> list[tuple[bytes, bytes]]:
        """Return the x-ratelimit headers of an answer, for the limits of its API key."""
        headers = []
        limits: tuple[tuple[Kind, int | None], ...] = (
            ("requests", key.requests_per_minute),
            ("tokens", key.tokens_per_minute),
        )
        for kind, limit in limits:
            if limit is not None:
                left, seconds = self._known(key, kind, limit)
                values = {"limit": limit, "remaining": left, "reset": f"{seconds:.3f}s"}
                headers += [(f"x-ratelimit-{name}-{kind}".encode(), str(values[name]).encode()) for name in values]
        return headers

    def _known(self, key: ApiKey, kind: Kind, limit: int) -> tuple[int, float]:
        """Return the remaining requests or tokens of a limit, and the seconds until the full limit is available."""
        left = self._left.get((key.tenant, kind))
        seconds = 0.0 if left is None else left.full_at - time.monotonic()
        return (limit, 0.0) if left is None or seconds <= 0 else (min(left.amount, limit), seconds)

    async def _reserve(self, key: ApiKey, *, requests: int = 0, tokens: int = 0) -> Quota:
        try:
            async with asyncio.timeout(self._wait_seconds):
                quota = await self._ask(key, requests=requests, tokens=tokens)
        except TimeoutError as error:
            message = f"The coordinator has not answered for {self._wait_seconds:g} s: try again."
            raise try_again(503, message, code="coordinator_unreachable", seconds=5) from error
        if not quota.accepted:
            raise self._exceeded(key, quota, requests=requests, tokens=tokens)
        return quota

    async def _ask(self, key: ApiKey, *, requests: int = 0, tokens: int = 0) -> Quota:
        asked = Reserve(
            uid=secrets.token_bytes(limits.UID_BYTES),
            tenant=key.tenant,
            requests_per_minute=key.requests_per_minute,
            tokens_per_minute=key.tokens_per_minute,
            requests=requests,
            tokens=tokens,
        )
        quota = await self._counter.reserve(asked)
        now = time.monotonic()
        if quota.requests_left is not None:
            self._left[key.tenant, "requests"] = _Left(quota.requests_left, now + quota.requests_reset_seconds)
        if quota.tokens_left is not None:
            self._left[key.tenant, "tokens"] = _Left(quota.tokens_left, now + quota.tokens_reset_seconds)
        return quota

    def _exceeded(self, key: ApiKey, quota: Quota, *, requests: int, tokens: int) -> LimitReachedError:
        kind: Kind
        if quota.requests_left is not None and quota.requests_left < requests:
            kind, limit, left, needed = "requests", key.requests_per_minute, quota.requests_left, requests
        else:
            kind, limit, left, needed = "tokens", key.tokens_per_minute, quota.tokens_left or 0, max(tokens, 1)
        seconds = quota.retry_after_seconds or 0.0
        message = (
            f"Rate limit reached for the API key {key.name}: {limit} {kind} per minute, {left} left, {needed} needed. "
            f"Try again in {math.ceil(seconds)} s."
        )
        return LimitReachedError(429, message, code="rate_limit_exceeded", retry_after_seconds=seconds, reason=kind)


class Reservation:
    """The tokens of an API key that one request has reserved.

    generated: number of tokens reserved for the generated tokens of all choices.
    """

    def __init__(self, counts: RateLimits, key: ApiKey, generated: int, *, window: int) -> None:
        self._counts = counts
        self._key = key
        self._window = window
        self._unused = generated
        """Number of reserved tokens left. If it is negative, this number of tokens must still be charged."""

    def add(self, tokens: int) -> None:
        """Count generated tokens. Charge the tokens beyond the reservation to the API key."""
        self._unused -= tokens
        if self._unused <= -COUNTED_TOKENS:
            self.settle()

    def settle(self) -> None:
        """Charge the generated tokens that are not charged yet, or return the unused reserved tokens to the limit.

        Call this method when the request ends.
        """
        unused, self._unused = self._unused, 0
        self._counts.charge(self._key, -unused, window=self._window)
