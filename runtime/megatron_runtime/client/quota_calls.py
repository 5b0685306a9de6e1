"""Awaitable calls that reserve requests and tokens within a tenant's limits at the coordinator."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from megatron_runtime.protocol.messages import Charge, Frames, Quota, Reserve


class QuotaCalls:
    """The calls on one connection that reserve requests and tokens, and that the coordinator has not answered.

    After a new registration, the reservations are sent again. The uid of a reservation prevents double counting.

    is_connected: returns whether messages reach the coordinator.
    """

    def __init__(self, send: Callable[[Frames], object], *, is_connected: Callable[[], bool]) -> None:
        self._send = send
        self._is_connected = is_connected
        self._open: dict[bytes, tuple[Reserve, asyncio.Future[Quota]]] = {}

    def reserve(self, reserve: Reserve) -> asyncio.Future[Quota]:
        """Send a reservation, and return a future for the answer.

        If the future is cancelled, the client gives the reserved tokens back when the answer arrives.
        """
        future: asyncio.Future[Quota] = asyncio.get_running_loop().create_future()
        self._open[reserve.uid] = reserve, future
        future.add_done_callback(lambda _: self._forget_unsent(reserve.uid))
        self._send(reserve.to_frames())
        return future

    def _forget_unsent(self, uid: bytes) -> None:
        """Forget the call `uid` if it was cancelled while there is no connection, because no answer can arrive."""
        if not self._is_connected():
            self._open.pop(uid, None)

    def charge(self, charge: Charge) -> None:
        """Send a charge. The message is lost if there is no connection."""
        self._send(charge.to_frames())

    def registered(self, *, is_forgotten: bool) -> None:
        """Drop calls that their callers have cancelled. Call this after each registration at the coordinator.

        is_forgotten: whether the coordinator may have lost messages. If so, the remaining calls are sent again.
        """
        for uid, (reserve, future) in list(self._open.items()):
            if future.done():
                del self._open[uid]  # no caller waits for the answer, and the tokens return at the end of the minute
            elif is_forgotten:
                self._send(reserve.to_frames())

    def answered(self, quota: Quota) -> None:
        reserve, future = self._open.pop(quota.uid, (None, None))
        if reserve is None or future is None:
            return
        if not future.done():
            future.set_result(quota)
        elif quota.accepted and reserve.tokens and reserve.tokens_per_minute is not None:
            limit = reserve.tokens_per_minute
            self.charge(
                Charge(tenant=reserve.tenant, tokens_per_minute=limit, tokens=-reserve.tokens, window=quota.window)
            )

    def close(self) -> None:
        for _, future in self._open.values():
            future.cancel()
        self._open.clear()
