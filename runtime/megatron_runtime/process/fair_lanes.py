"""Shares a few threads fairly between keys, by round robin and with a budget of seconds per minute.

A key is the tenant that submits the work. `FairQueue` and `Budget` contain the rules, without clock and threads.
`FairThreads` runs jobs in the order of a queue. `FairLanes` runs the jobs of an event loop. Each of its lanes has its
own threads, and all lanes share one budget.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Generic, TypeVar

FREE_SECONDS = 0.05
"""Time of each job that is not charged. Ordinary jobs take less time, so a budget limits only expensive jobs."""

_T = TypeVar("_T")
_Job = TypeVar("_Job")


class BudgetExceededError(Exception):
    """A key has used up its budget. retry_after_seconds: seconds until it may start another job."""

    def __init__(self, message: str, *, retry_after_seconds: float) -> None:
        super().__init__(message)
        self.retry_after_seconds = retry_after_seconds


class Budget:
    """The seconds of work that each key may use per minute. Each key has a leaky bucket.

    The running jobs of a key can exceed its budget, because the duration of a job is known only at its end.
    """

    def __init__(self, seconds_per_minute: float) -> None:
        self.seconds_per_minute = seconds_per_minute
        self._empty_at: dict[str, float] = {}
        """Time at which the bucket of each key will be empty. Keys with an empty bucket are removed."""

    def charge(self, key: str, seconds: float, *, now: float) -> None:
        """Add the duration of a finished job of `key`, in seconds, to the used part of the key's budget."""
        self._empty_at = {other: at for other, at in self._empty_at.items() if at > now}
        if seconds > FREE_SECONDS:
            drains_in = (seconds - FREE_SECONDS) * 60 / self.seconds_per_minute
            self._empty_at[key] = self._empty_at.get(key, now) + drains_in

    def wait(self, key: str, *, now: float) -> float:
        """Return the seconds until the key may start a job, or 0 if it may start a job now."""
        return max(0.0, self._empty_at.get(key, now) - now - 60)


class FairQueue(Generic[_Job]):
    """A queue of jobs for a number of workers, round robin over keys.

    The next job to start belongs to the waiting key with the fewest running jobs. Among keys with equally few running
    jobs, it belongs to the key with the lowest turn number. A key's turn number increases by one when a job of the key
    starts. When a job is added to a key that has no waiting job, the key's turn number becomes at least the highest
    turn number at which a job has started. A key therefore has one running job at a time while another key waits, and
    waits for at most one further job of each other key. The jobs of a key keep their order.
    """

    def __init__(self, *, workers: int) -> None:
        self._workers = workers
        self._waiting: dict[str, deque[_Job]] = {}
        self._running: Counter[str] = Counter()
        self._turn = 0
        self._next_turn: dict[str, int] = {}
        """Turn number of the next job of each key. While no job waits, only numbers above `_turn` are kept."""

    def __len__(self) -> int:
        return sum(map(len, self._waiting.values()))

    def add(self, key: str, job: _Job) -> None:
        if key not in self._waiting:
            self._waiting[key] = deque()
            self._next_turn[key] = max(self._turn, self._next_turn.get(key, 0))
        self._waiting[key].append(job)

    def remove(self, key: str, job: _Job) -> None:
        """Remove a waiting job. Do nothing if the job is not waiting."""
        jobs = self._waiting.get(key, deque())
        with contextlib.suppress(ValueError):
            jobs.remove(job)
            if not jobs:
                del self._waiting[key]

    def take(self) -> tuple[str, _Job] | None:
        """Return the next job and its key, as (key, job). Returns None if no job waits or no worker is free.

        The job counts as running until release() is called.
        """
        if not self._waiting or self._running.total() >= self._workers:
            return None
        key = min(self._waiting, key=lambda key: (self._running[key], self._next_turn[key]))
        jobs = self._waiting.pop(key)
        job = jobs.popleft()
        if jobs:
            self._waiting[key] = jobs  # move the key behind other keys of the same turn
        self._running[key] += 1
        self._turn = max(self._turn, self._next_turn[key])
        self._next_turn[key] += 1
        return key, job

    def release(self, key: str) -> None:
        """Record that a running job of `key` has ended."""
        self._running[key] -= 1
        if not self._running[key]:
            del self._running[key]
        if not self._waiting:
            self._next_turn = {other: turn for other, turn in self._next_turn.items() if turn > self._turn}


class FairThreads:
    """Threads that run jobs in the order of a FairQueue. Thread-safe."""

    def __init__(self, threads: int, name: str) -> None:
        self._queue = FairQueue[tuple[Future[Any], Callable[[], Any]]](workers=threads)
        self._lock = threading.Lock()
        self._threads = ThreadPoolExecutor(threads, name)

    def submit(self, key: str, call: Callable[[], _T]) -> Future[_T]:
        """Queue `call`, which a thread runs when the queue selects it. Return a future for the result.

        Cancelling the future removes a call that waits. A call that runs continues, and its result is discarded.
        """
        future: Future[_T] = Future()
        job = future, call
        future.add_done_callback(lambda done: self._remove(key, job) if done.cancelled() else None)
        with self._lock:
            self._queue.add(key, job)
            self._begin()
        return future

    def close(self) -> None:
        """Stop the threads when the running calls have ended. Waiting calls fail with RuntimeError."""
        self._threads.shutdown(wait=False)

    def _remove(self, key: str, job: tuple[Future[Any], Callable[[], Any]]) -> None:
        with self._lock:
            self._queue.remove(key, job)

    def _begin(self) -> None:
        while (taken := self._queue.take()) is not None:
            key, (future, call) = taken
            if not future.set_running_or_notify_cancel():
                self._queue.release(key)
                continue
            try:
                self._threads.submit(self._perform, key, future, call)
            except RuntimeError as error:  # the threads are closed
                self._queue.release(key)
                future.set_exception(error)

    def _perform(self, key: str, future: Future[Any], call: Callable[[], Any]) -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)
        with self._lock:
            self._queue.release(key)
            self._begin()


class FairLanes:
    """Runs blocking calls for an event loop in named lanes. Each lane has its own threads and its own queue.

    lanes:              number of threads by lane.
    what:               name of the work, for the error of a key that has used up its budget.
    seconds_per_minute: budget of each key over all lanes.
    clock:              returns monotonic seconds.
    """

    def __init__(
        self,
        lanes: Mapping[str, int],
        *,
        what: str,
        seconds_per_minute: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._what = what
        self._budget = Budget(seconds_per_minute)
        self._lock = threading.Lock()
        """Protects the budget."""
        self._clock = clock
        self._threads = {lane: FairThreads(threads, f"lane-{lane}") for lane, threads in lanes.items()}

    async def run(self, lane: str, key: str, call: Callable[[], _T], *, is_metered: bool = True) -> _T:
        """Run `call` in a thread of `lane`, and return its result.

        If the caller is cancelled, a call that waits is removed. A call that runs continues, and its result is
        discarded.

        is_metered: whether the duration of the call counts against the budget of `key`.

        Raises BudgetExceededError, and the errors of `call`.
        """
        work = partial(self._metered, key, call) if is_metered else call
        return await asyncio.wrap_future(self._threads[lane].submit(key, work))

    def close(self) -> None:
        """Stop the threads when the running calls have ended. Waiting calls fail with RuntimeError."""
        for threads in self._threads.values():
            threads.close()

    def _metered(self, key: str, call: Callable[[], _T]) -> _T:
        with self._lock:
            wait = self._budget.wait(key, now=self._clock())
        if wait:
            raise BudgetExceededError(
                f"{self._what} of this client took more than {self._budget.seconds_per_minute:g} s in a minute, the "
                f"most allowed: try again in {math.ceil(wait)} s, with less of it",
                retry_after_seconds=wait,
            )
        began = self._clock()
        try:
            return call()
        finally:
            with self._lock:
                now = self._clock()
                self._budget.charge(key, now - began, now=now)
