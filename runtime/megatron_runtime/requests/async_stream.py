"""Streams of answers. A client of the coordinator adds items, and the client's caller iterates over the items."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
from collections import deque
from collections.abc import AsyncGenerator, Callable
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, Self, TypeVar

MAX_UNREAD_ITEMS = 64
"""Maximum number of unread items. To save memory, further items are merged into the last unread item."""


class AsyncStream:
    """A stream that an asynchronous reader iterates over. It yields items in the order of put().

    After the last item, the iteration ends, or raises the exception that was passed to finish().

    cancel: called at most once, if the reader closes the stream before its end. Called with the request id if the
    function has a parameter.
    loop:   the reader's event loop. If set, other threads can call put() and finish().
    merge:  called with the last unread item and a new item if MAX_UNREAD_ITEMS items are unread. The function adds the
            new item to the last item and returns True, or returns False if the items cannot be merged.
    """

    def __init__(
        self,
        request_id: Any,
        cancel: Callable[..., object],
        loop: asyncio.AbstractEventLoop | None = None,
        merge: Callable[[Any, Any], bool] | None = None,
    ) -> None:
        self.request_id = request_id
        self._cancel = partial(cancel, request_id) if _takes_an_argument(cancel) else cancel
        self._loop = loop
        self._merge = merge
        self._items: deque[Any] = deque()
        self._error: BaseException | type[BaseException] | None = None
        self._finished = False
        self._waiter: asyncio.Future[None] | None = None

    @property
    def finished(self) -> bool:
        """Whether the stream accepts no more items."""
        return self._finished

    def put(self, item: Any) -> None:
        """Add an item. Do nothing after finish()."""
        if self._is_foreign():
            self._call_reader(self.put, item)
        elif not self._finished:
            is_behind = len(self._items) >= MAX_UNREAD_ITEMS
            if not (is_behind and self._merge is not None and self._merge(self._items[-1], item)):
                self._items.append(item)
            self._wake()

    def finish(self, error: Any = None) -> None:
        """End the stream.

        If `error` is an exception or its class, the iteration raises it after the last item. Idempotent.
        """
        if self._is_foreign():
            self._call_reader(self.finish, error)
        elif not self._finished:
            self._finished = True
            if isinstance(error, BaseException) or (isinstance(error, type) and issubclass(error, BaseException)):
                self._error = error
            self._wake()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        while True:
            if self._items:
                return self._items.popleft()
            if self._finished:
                error, self._error = self._error, None
                if error is not None:
                    raise error
                raise StopAsyncIteration
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter

    async def generator(self) -> AsyncGenerator[Any]:
        """Yield the items. Closing the generator early cancels the request and raises asyncio.CancelledError."""
        try:
            async for item in self:
                yield item
        except GeneratorExit:
            await self.aclose()
            raise asyncio.CancelledError from None

    async def aclose(self) -> None:
        """Abort the request if it is open, drop unread items, and wake up the reader. Idempotent."""
        self.close()

    def close(self) -> None:
        """Abort the request if it is open, drop unread items, and wake up the reader. Idempotent.

        Call this on the reader's event loop, or in any thread if nothing reads the stream.
        """
        self._items.clear()
        self._error = None
        if not self._finished:
            self._finished = True
            self._cancel()
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    def _call_reader(self, method: Callable[[Any], None], argument: Any) -> None:
        assert self._loop is not None
        try:
            self._loop.call_soon_threadsafe(method, argument)
        except RuntimeError:
            if not self._loop.is_closed():  # no reader runs on a closed loop
                raise

    def _is_foreign(self) -> bool:
        """Return whether the caller runs outside the reader's event loop."""
        if self._loop is None:
            return False
        try:
            return asyncio.get_running_loop() is not self._loop
        except RuntimeError:
            return self._loop.is_running() or self._loop.is_closed()


class BlockingStream:
    """A stream like AsyncStream, for a reader that blocks its thread. Any thread can call all methods.

    No method acquires a lock, so close() is safe in a finalizer.

    cancel: called at most once, if the reader closes the stream before its end.
    """

    def __init__(self, cancel: Callable[[], object]) -> None:
        self._cancel = cancel
        self._items: SimpleQueue[Any] = SimpleQueue()
        self._finished = False

    @property
    def finished(self) -> bool:
        """Whether the stream accepts no more items."""
        return self._finished

    def put(self, item: Any) -> None:
        """Add an item. Do nothing after finish()."""
        if not self._finished:
            self._items.put(item)

    def finish(self, error: BaseException | None = None) -> None:
        """End the stream. If `error` is set, the iteration raises it after the last item. Idempotent."""
        if not self._finished:
            self._finished = True
            self._items.put(_End(error))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Any:
        item = self._items.get()
        if not isinstance(item, _End):
            return item
        self._items.put(_End(None))  # every later call must also see the end
        if item.error is not None:
            raise item.error
        raise StopIteration

    def close(self) -> None:
        """Abort the request if it is open, drop unread items, and wake up the reader. Idempotent."""
        was_finished, self._finished = self._finished, True
        with contextlib.suppress(Empty):
            while True:
                self._items.get_nowait()
        self._items.put(_End(None))
        if not was_finished:
            self._cancel()


AnyStream = TypeVar("AnyStream", AsyncStream, BlockingStream)


class _End:
    """The last item of a BlockingStream, with the error that the iteration raises; None if it raises no error."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException | None) -> None:
        self.error = error


def _takes_an_argument(function: Callable[..., object]) -> bool:
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # a C function has no signature
        return True
    return True
