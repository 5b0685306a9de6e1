"""EventLoopManager: a background loop without deadlocks that stops completely."""

import asyncio
import concurrent.futures
import inspect
import signal
import sys
import threading
import time
import types
from collections.abc import Iterator

import pytest
import torch
from eventually import LONG_SECONDS

from megatron_runtime.in_process.event_loop import EventLoopManager


@pytest.fixture
def manager() -> Iterator[EventLoopManager]:
    manager = EventLoopManager()
    manager.start()
    yield manager
    manager.stop()


async def where() -> threading.Thread:
    return threading.current_thread()


def test_there_is_no_loop_before_start_and_after_stop() -> None:
    manager = EventLoopManager()
    with pytest.raises(RuntimeError, match="call start"):
        _ = manager.loop
    with pytest.raises(RuntimeError, match="call start"):
        manager.submit(where())
    manager.start()
    assert manager.loop.is_running()
    manager.stop()
    with pytest.raises(RuntimeError, match="call start"):
        manager.run_sync(where())


def test_start_and_stop_are_idempotent_and_join_the_thread(manager) -> None:
    thread = manager.run_sync(where())
    loop = manager.loop
    manager.start()
    assert manager.loop is loop
    assert thread.daemon
    assert thread is not threading.current_thread()
    manager.stop()
    manager.stop()
    assert not thread.is_alive()
    assert loop.is_closed()


def test_submit_gives_a_future_and_run_sync_its_result(manager) -> None:
    assert manager.submit(where()).result() is manager.run_sync(where())

    async def fail() -> None:
        raise LookupError("on purpose")

    with pytest.raises(LookupError, match="on purpose"):
        manager.run_sync(fail())


def test_a_rejected_coroutine_is_closed(manager) -> None:
    manager.stop()
    rejected = where()
    with pytest.raises(RuntimeError, match="call start"):
        manager.submit(rejected)
    assert inspect.getcoroutinestate(rejected) == inspect.CORO_CLOSED


class Waiting:
    """A coroutine that waits for ever, with events for its start and its cancellation."""

    def __init__(self) -> None:
        self.begun, self.cancelled = threading.Event(), threading.Event()

    async def wait(self) -> None:
        self.begun.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise


def test_an_interrupt_of_run_sync_cancels_the_coroutine(manager) -> None:
    waiting = Waiting()

    main = threading.main_thread().ident

    def interrupt() -> None:
        waiting.begun.wait()
        while sys._current_frames()[main].f_code is not threading.Condition.wait.__code__:
            time.sleep(0.01)  # until the main thread waits: its coroutine runs in another thread and may start first
        signal.pthread_kill(main, signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        manager.run_sync(waiting.wait())
    thread.join()
    assert waiting.cancelled.wait(LONG_SECONDS)


def test_run_sync_on_its_own_loop_is_an_error_instead_of_a_deadlock(manager) -> None:
    async def inside() -> None:
        manager.run_sync(where())

    with pytest.raises(RuntimeError, match="background loop"):
        manager.run_sync(inside())

    async def stop_inside() -> None:
        manager.stop()

    with pytest.raises(RuntimeError, match="background loop"):
        manager.run_sync(stop_inside())


async def test_run_sync_from_another_running_loop_is_allowed(manager) -> None:
    assert manager.run_sync(where()) is not threading.current_thread()


async def test_run_async_from_any_loop(manager) -> None:
    thread = await manager.run_async(where())
    assert thread is not threading.current_thread()

    async def nested() -> threading.Thread:
        return await manager.run_async(where())

    assert await manager.run_async(nested()) is thread


async def test_cancelling_run_async_cancels_the_coroutine(manager) -> None:
    waiting = Waiting()
    task = asyncio.create_task(manager.run_async(waiting.wait()))
    await asyncio.to_thread(waiting.begun.wait)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await asyncio.to_thread(waiting.cancelled.wait, 20)


def test_stop_cancels_running_coroutines_and_their_futures(manager) -> None:
    future = manager.submit(asyncio.Event().wait())
    manager.stop()
    with pytest.raises(concurrent.futures.CancelledError):
        future.result(timeout=LONG_SECONDS)


def test_the_thread_uses_the_callers_device_when_start_returns(monkeypatch) -> None:
    devices: list[tuple[int, threading.Thread]] = []
    cuda = types.SimpleNamespace(
        is_available=lambda: True,
        current_device=lambda: 3,
        set_device=lambda device: devices.append((device, threading.current_thread())),
    )
    monkeypatch.setattr(torch, "cuda", cuda)
    manager = EventLoopManager()
    manager.start()
    assert [device for device, _ in devices] == [3]
    assert manager.run_sync(where()) is devices[0][1]
    manager.stop()


def test_start_fails_if_the_device_cannot_be_set(monkeypatch) -> None:
    def reject(device: int) -> None:
        raise RuntimeError(f"no device {device}")

    cuda = types.SimpleNamespace(is_available=lambda: True, current_device=lambda: 9, set_device=reject)
    monkeypatch.setattr(torch, "cuda", cuda)
    manager = EventLoopManager()
    with pytest.raises(RuntimeError, match="no device 9"):
        manager.start()
    manager.stop()
