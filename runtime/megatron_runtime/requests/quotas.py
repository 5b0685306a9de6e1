"""Limits of requests and tokens per minute for each tenant. All servers of one coordinator share these limits.

A limit applies to windows of one minute. A window begins with the first request that no window covers. Usage beyond
the limit is counted in the following windows. In the long run, a tenant therefore never uses more than its limit.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from itertools import count
from typing import Any, Literal, TypeAlias

from megatron_runtime.protocol.messages import Charge, Quota, Reserve

WINDOW_SECONDS = 60.0
MAX_WINDOWS = 65_536
"""Maximum number of windows (one per tenant and kind) that are kept. Beyond it, the oldest window is dropped."""
MAX_RESERVATIONS = 65_536
"""Maximum number of accepted reservations that are remembered, so that a repeated reservation counts only once."""
_MAX_SECONDS = 86_400.0

Kind: TypeAlias = Literal["requests", "tokens"]


@dataclass(slots=True)
class _Window:
    """The usage of a tenant in one minute.

    number: unique number of the window.
    limit:  the limit that a server has sent most recently.
    used:   number of requests or tokens counted in the window. Charges can exceed the limit.
    """

    number: int
    ends: float
    limit: int
    used: int = 0


class Quotas:
    """The usage of all tenants, counted in windows of one minute.

    A tenant has at most one window for requests and one for tokens. A window is removed when its minute ends. If its
    usage exceeds the limit, a new window takes its place and counts the excess.

    first_window: number of the first window; each later window gets the next number. Each start of a coordinator must
                  pass a different number, so that a charge for a window from before the start matches no new window.
    """

    def __init__(self, *, first_window: int = 0) -> None:
        self._numbers = count(first_window)
        self._windows: OrderedDict[tuple[str, Kind], _Window] = OrderedDict()
        self._reservations: OrderedDict[bytes, int] = OrderedDict()
        """Number of the window in which the tokens of a reservation were counted, by the uid of the reservation."""

    def __len__(self) -> int:
        return len(self._windows)

    def reserve(self, now: float, asked: Reserve) -> Quota:
        """Count the requests and tokens in `asked` if both fit their limits, and return the result.

        The limits in `asked` replace earlier limits.
        """
        self._forget_old(now)
        number = self._reservations.get(asked.uid)
        if number is not None or not (asked.requests or asked.tokens):
            return self._answer(now, asked, number=number or 0)
        limited = _limited(asked)
        wait = max((self._wait(now, asked.tenant, *each) for each in limited), default=0.0)
        if wait:
            return self._answer(now, asked, retry_after=wait)
        number = 0
        for kind, limit, amount in limited:
            if amount:
                number = self._count(now, asked.tenant, kind, limit, amount).number
        self._reservations[asked.uid] = number
        if len(self._reservations) > MAX_RESERVATIONS:
            self._reservations.popitem(last=False)
        return self._answer(now, asked, number=number)

    def charge(self, now: float, charge: Charge) -> None:
        """Add `charge.tokens` to the tenant's usage, even beyond the limit.

        Negative tokens reduce the usage, unless the window in which they were counted has ended.
        """
        self._forget_old(now)
        if charge.tokens > 0:
            self._count(now, charge.tenant, "tokens", charge.tokens_per_minute, charge.tokens)
            return
        window = self._current(now, charge.tenant, "tokens")
        if window is not None and window.number == charge.window:
            window.used = max(0, window.used + charge.tokens)

    def _count(self, now: float, tenant: str, kind: Kind, limit: int, amount: int) -> _Window:
        window = self._current(now, tenant, kind)
        if window is None:
            window = self._windows[tenant, kind] = _Window(next(self._numbers), now + WINDOW_SECONDS, limit)
            if len(self._windows) > MAX_WINDOWS:
                self._windows.popitem(last=False)
        window.limit = limit
        window.used += amount
        return window

    def _current(self, now: float, tenant: str, kind: Kind) -> _Window | None:
        """Return the tenant's current window, with the excess usage of earlier windows; None if there is no usage."""
        window = self._windows.get((tenant, kind))
        if window is None or now < window.ends:
            return window
        minutes = int((now - window.ends) // WINDOW_SECONDS) + 1
        window.used -= minutes * window.limit
        if window.used <= 0:
            del self._windows[tenant, kind]
            return None
        window.ends += minutes * WINDOW_SECONDS
        window.number = next(self._numbers)
        self._windows.move_to_end((tenant, kind))
        return window

    def _wait(self, now: float, tenant: str, kind: Kind, limit: int, amount: int) -> float:
        """Return the seconds until the tenant may use `amount` requests or tokens; 0 if it may use them now.

        For an amount of 0 tokens, return the seconds until the tenant has at least 1 token left.
        """
        if kind == "requests" and not amount:
            return 0.0
        window = self._current(now, tenant, kind)
        used, ends = (0, now + WINDOW_SECONDS) if window is None else (window.used, window.ends)
        excess = used + max(amount, 1) - limit
        return ends - now + (excess - 1) // limit * WINDOW_SECONDS if excess > 0 else 0.0

    def _answer(self, now: float, asked: Reserve, *, number: int = 0, retry_after: float | None = None) -> Quota:
        fields: dict[str, Any] = {"uid": asked.uid, "accepted": retry_after is None, "window": number}
        if retry_after is not None:
            fields["retry_after_seconds"] = min(retry_after, _MAX_SECONDS)
        for kind, limit, _ in _limited(asked):
            window = self._current(now, asked.tenant, kind)
            used = 0 if window is None else window.used
            fields[f"{kind}_left"] = max(0, limit - used)
            if window is not None and used:
                seconds = window.ends - now + (used - 1) // limit * WINDOW_SECONDS
                fields[f"{kind}_reset_seconds"] = min(seconds, _MAX_SECONDS)
        return Quota(**fields)

    def _forget_old(self, now: float) -> None:
        """Remove the windows that have ended. Excess usage continues in a new window."""
        while self._windows:
            key, window = next(iter(self._windows.items()))
            if now < window.ends:
                return
            self._current(now, *key)


def _limited(asked: Reserve) -> list[tuple[Kind, int, int]]:
    """Return (kind, limit, requested amount) for each kind of usage, requests or tokens, that has a limit."""
    kinds: tuple[tuple[Kind, int | None, int], ...] = (
        ("requests", asked.requests_per_minute, asked.requests),
        ("tokens", asked.tokens_per_minute, asked.tokens),
    )
    return [(kind, limit, amount) for kind, limit, amount in kinds if limit is not None]
