"""One daemon thread with an event loop of its own, for coroutines that callers of any kind wait for."""

from __future__ import annotations

import asyncio
import concurrent.futures
import sys
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class _EventLoopManager:
    """Runs coroutines on a background loop; synchronous and asynchronous callers bridge to it.

    The thread works on the CUDA device that is current where start() is called.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    def start(self) -> None:
        """Spawn the thread and start the loop; both are ready on return. Idempotent."""
        with self._lock:
            if self._thread is not None:
                return
            ready: concurrent.futures.Future[None] = concurrent.futures.Future()
            device = _current_device()
            self._thread = threading.Thread(
                target=self._run, args=(device, ready), name="megatron-llm-loop", daemon=True
            )
            self._thread.start()
            try:
                ready.result()
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
        """Schedule `coro` on the background loop. The caller decides how to wait: `.result()`, or
        asyncio.wrap_future() on another loop.
        """
        try:
            with self._lock:
                return asyncio.run_coroutine_threadsafe(coro, self.loop)
        except RuntimeError:
            coro.close()
            raise

    def run_sync(self, coro: Coroutine[Any, Any, T]) -> T:
        """Schedule `coro` and block for its result.

        Raises RuntimeError on the background loop itself, which could never get to run `coro`. Another loop may call
        this; it stands still meanwhile.
        """
        if self._is_own_thread():
            coro.close()
            raise RuntimeError("run_sync() on the background loop would wait for itself: await the coroutine instead")
        future = self.submit(coro)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    async def run_async(self, coro: Coroutine[Any, Any, T]) -> T:
        """Schedule `coro` and await it, from any loop. Cancelling the caller cancels `coro`."""
        if self._is_own_thread():
            return await coro
        return await asyncio.wrap_future(self.submit(coro))

    def stop(self) -> None:
        """Cancel what still runs, stop the loop, join the thread. Idempotent."""
        if self._is_own_thread():
            raise RuntimeError("stop() on the background loop would wait for itself: call it from another thread")
        with self._lock:
            thread, self._thread = self._thread, None
            loop, self._loop = self._loop, None
            if thread is None or loop is None:
                return
            assert self._stop is not None
            loop.call_soon_threadsafe(self._stop.set)
        thread.join()

    def _is_own_thread(self) -> bool:
        return self._thread is not None and threading.current_thread() is self._thread

    def _run(self, device: int | None, ready: concurrent.futures.Future[None]) -> None:
        try:
            if device is not None:
                _set_device(device)
        except BaseException as error:
            ready.set_exception(error)
            return
        # asyncio.run cancels what is left and closes async generators and the default executor.
        asyncio.run(self._serve(ready))

    async def _serve(self, ready: concurrent.futures.Future[None]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = asyncio.Event()
        ready.set_result(None)
        await self._stop.wait()


def _current_device() -> int | None:
    """The CUDA device of this thread; None without torch or without a GPU. Loads nothing."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return None
    device: int = torch.cuda.current_device()
    return device


def _set_device(device: int) -> None:
    sys.modules["torch"].cuda.set_device(device)
