"""Runs an event loop in a background thread of a program."""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import torch

T = TypeVar("T")


class EventLoopManager:
    """A daemon thread with an event loop, on which synchronous and asynchronous callers run coroutines.

    The thread uses the CUDA device that is current in the thread that calls start().
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the thread and wait until its loop runs. This method is idempotent."""
        with self._lock:
            if self._thread is not None:
                return
            ready: concurrent.futures.Future[asyncio.AbstractEventLoop] = concurrent.futures.Future()
            device = torch.cuda.current_device() if torch.cuda.is_available() else None
            self._thread = threading.Thread(
                target=_run_loop, args=(device, ready), name="megatron-llm-loop", daemon=True
            )
            self._thread.start()
            try:
                self._loop = ready.result()
            except BaseException:
                self._thread.join()
                self._thread = None
                raise

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The background loop. Raises RuntimeError before start() and after stop()."""
        if self._loop is None:
            raise RuntimeError("the background loop is not running: call start() first")
        return self._loop

    def submit(self, coro: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        """Schedule `coro` on the background loop, and return its future.

        To wait for the result, call `.result()` on the future, or pass the future to asyncio.wrap_future() on another
        loop.
        """
        try:
            with self._lock:
                return asyncio.run_coroutine_threadsafe(coro, self.loop)
        except RuntimeError:
            coro.close()
            raise

    def run_sync(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run `coro` on the background loop, block until it has completed, and return its result.

        If the caller runs an event loop, this call also blocks that loop.

        Raises RuntimeError on the background loop itself, where the call would deadlock.
        """
        if self._is_own_thread():
            coro.close()
            raise RuntimeError("run_sync() on the background loop would deadlock: await the coroutine instead")
        future = self.submit(coro)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def run_async(self, coro: Coroutine[Any, Any, T]) -> T:
        """Run `coro` on the background loop, and return its result. May be awaited on any loop.

        Cancelling the caller cancels `coro`.
        """
        if self._is_own_thread():
            return await coro
        return await asyncio.wrap_future(self.submit(coro))

    def require_other_thread(self, what: str) -> None:
        """Raise RuntimeError if the caller runs on the background loop, where a blocking call would deadlock.

        what: name of the call, for the message.
        """
        if self._is_own_thread():
            raise RuntimeError(f"{what} on the background loop would deadlock: await a coroutine instead")

    def end(self, closing: Coroutine[Any, Any, object]) -> None:
        """Run `closing` on the loop, then stop the loop. Do nothing if the loop has ended.

        This method does not wait and takes no lock.
        """
        loop = self._loop

        async def close() -> None:
            try:
                await closing
            finally:
                asyncio.get_running_loop().stop()

        def begin() -> None:
            self._closing = asyncio.ensure_future(close())

        try:
            if loop is None:
                raise RuntimeError("the loop has ended")
            loop.call_soon_threadsafe(begin)
        except RuntimeError:
            closing.close()

    def join(self, seconds: float | None = None) -> None:
        """Wait until the loop has ended, for at most `seconds`. Call it after end()."""
        thread = self._thread
        if thread is not None and not self._is_own_thread():
            thread.join(seconds)

    def stop(self) -> None:
        """Cancel open coroutines, stop the loop and join the thread. This method is idempotent."""
        if self._is_own_thread():
            raise RuntimeError("stop() on the background loop would deadlock: call it from another thread")
        with self._lock:
            thread, self._thread = self._thread, None
            loop, self._loop = self._loop, None
            if thread is None or loop is None:
                return
            with contextlib.suppress(RuntimeError):  # end() has closed the loop
                loop.call_soon_threadsafe(loop.stop)
        thread.join()

    def _is_own_thread(self) -> bool:
        return self._thread is not None and threading.current_thread() is self._thread


def _run_loop(device: int | None, ready: concurrent.futures.Future[asyncio.AbstractEventLoop]) -> None:
    """Run an event loop in this thread until it is stopped. ready: receives the loop."""
    # At the end, the runner cancels open tasks and closes async generators and the default executor.
    with asyncio.Runner() as runner:
        try:
            if device is not None:
                torch.cuda.set_device(device)
        except BaseException as error:
            ready.set_exception(error)
            return
        loop = runner.get_loop()
        loop.call_soon(ready.set_result, loop)
        loop.run_forever()
