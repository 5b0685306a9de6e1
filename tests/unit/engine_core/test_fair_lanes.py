"""Fair lanes: the order of jobs and the budget of keys, with simulated time and with threads."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from typing import Any

import pytest
from eventually import LONG_SECONDS
from hypothesis import given
from hypothesis import strategies as st

from megatron_runtime.engine.output_stage import error_map
from megatron_runtime.process.fair_lanes import (
    FREE_SECONDS,
    Budget,
    BudgetExceededError,
    FairLanes,
    FairQueue,
    FairThreads,
)
from megatron_runtime.protocol.headers import ErrorCode
from megatron_runtime.server.errors import from_reply_error


def order(queue: FairQueue[str], *, count: int) -> list[str]:
    """Run jobs one at a time."""
    begun = []
    for _ in range(count):
        taken = queue.take()
        assert taken is not None
        begun.append(taken[1])
        queue.release(taken[0])
    return begun


def test_keys_take_turns_however_many_jobs_of_one_wait() -> None:
    queue = FairQueue[str](workers=1)
    for number in range(30):
        queue.add("a", f"a{number}")
    assert order(queue, count=2) == ["a0", "a1"]
    queue.add("b", "b0")
    queue.add("b", "b1")
    queue.add("c", "c0")
    assert order(queue, count=7) == ["b0", "c0", "a2", "b1", "a3", "a4", "a5"]


def test_a_key_whose_jobs_never_wait_together_gains_nothing() -> None:
    """Its next job arrives when the last one has begun."""
    queue = FairQueue[str](workers=1)
    for number in range(3):
        queue.add("many", f"many{number}")
    begun = []
    for number in range(6):
        queue.add("single", f"single{number}")
        begun += order(queue, count=1)
    assert Counter(job.rstrip("0123456789") for job in begun) == {"many": 3, "single": 3}


def test_a_key_has_one_job_at_a_time_while_another_waits() -> None:
    queue = FairQueue[str](workers=3)
    for number in range(9):
        queue.add("a", f"a{number}")
    queue.add("b", "b0")
    assert [queue.take(), queue.take(), queue.take()] == [("a", "a0"), ("b", "b0"), ("a", "a1")]
    assert queue.take() is None
    queue.add("c", "c0")
    queue.add("b", "b1")
    queue.release("a")
    assert queue.take() == ("c", "c0")
    queue.release("b")
    assert queue.take() == ("b", "b1")
    queue.remove("a", "a2")
    queue.remove("a", "a2")
    queue.release("c")
    assert queue.take() == ("a", "a3")


KEYS = "abcd"


@given(steps=st.lists(st.sampled_from([*KEYS, *KEYS, "take", "release"]), max_size=200), workers=st.integers(1, 3))
def test_no_key_waits_for_more_than_two_jobs_of_another(steps: list[str], workers: int) -> None:
    """While a key waits, each other key begins at most one job more than it does."""
    queue, running, waiting = FairQueue[str](workers=workers), list[str](), Counter[str]()
    begun = {key: Counter[str]() for key in KEYS}
    for step in steps:
        if step in KEYS:
            queue.add(step, step)
            if not waiting[step]:
                begun[step].clear()
            waiting[step] += 1
        elif step == "release" and running:
            queue.release(running.pop())
        elif step == "take":
            taken = queue.take()
            assert (taken is None) == (len(running) == workers or not waiting.total())
            if taken is not None:
                running.append(taken[0])
                waiting[taken[0]] -= 1
                for counts in begun.values():
                    counts[taken[0]] += 1
        for key in KEYS:
            if waiting[key]:
                assert all(begun[key][other] <= begun[key][key] + 2 for other in KEYS)
    assert len(queue) == waiting.total()


def test_a_budget_is_seconds_per_minute() -> None:
    budget, job = Budget(30), FREE_SECONDS + 6
    for number in range(5):
        assert budget.wait("a", now=number) == 0
        budget.charge("a", job, now=number)
    assert budget.wait("a", now=5) == 0
    budget.charge("a", job, now=5)
    assert budget.wait("a", now=6) == pytest.approx(6)  # 36 s in 6 s: 3 s have drained, and 3 s more must
    assert budget.wait("b", now=6) == 0
    assert budget.wait("a", now=12) == 0
    begun, now = 0, 12.0
    while now < 612:
        if wait := budget.wait("a", now=now):
            now += wait
        else:
            budget.charge("a", job, now=now)
            now, begun = now + job, begun + 1
    assert begun * 6 == pytest.approx(300, abs=10), "30 s a minute for ten minutes"


def test_ordinary_jobs_are_not_charged() -> None:
    budget = Budget(1)
    for _ in range(10_000):
        budget.charge("a", FREE_SECONDS, now=0)
    assert budget.wait("a", now=0) == 0


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


async def test_a_key_beyond_its_budget_is_rejected_with_the_time_to_try_again() -> None:
    clock = Clock()
    lanes = FairLanes({"one": 1, "two": 1}, what="Compiling", seconds_per_minute=30, clock=clock)

    def job() -> str:
        clock.now += 20
        return "done"

    results = await asyncio.gather(*(lanes.run("one", "a", job) for _ in range(6)), return_exceptions=True)
    assert results[:3] == ["done"] * 3
    rejected = [error for error in results[3:] if isinstance(error, BudgetExceededError)]
    assert len(rejected) == 3
    assert rejected[0].retry_after_seconds == pytest.approx((60 - 3 * FREE_SECONDS - 2 * 10 - 30) * 2)
    assert "Compiling" in str(rejected[0])
    assert await lanes.run("one", "b", job) == "done"
    assert await asyncio.gather(*(lanes.run("one", "", job, is_metered=False) for _ in range(10))) == ["done"] * 10
    assert await lanes.run("one", "a", job) == "done", "its budget is back"
    lanes.close()


def test_threads_take_the_jobs_of_keys_in_turns() -> None:
    threads, begun, hold = FairThreads(1, "test"), list[str](), threading.Event()
    held = threads.submit("a", lambda: hold.wait(LONG_SECONDS))
    jobs = [threads.submit(name[0], lambda name=name: begun.append(name)) for name in ("a1", "a2", "b1", "a3", "b2")]
    failing = threads.submit("c", lambda: 1 / 0)
    hold.set()
    assert held.result(LONG_SECONDS)
    with pytest.raises(ZeroDivisionError):
        failing.result(LONG_SECONDS)
    for job in jobs:
        job.result(LONG_SECONDS)
    assert begun == ["b1", "a1", "b2", "a2", "a3"]
    threads.close()


async def test_lanes_share_a_budget_and_no_threads() -> None:
    clock, begun, hold = Clock(), threading.Event(), threading.Event()
    lanes = FairLanes({"one": 1, "two": 1}, what="Work", seconds_per_minute=1, clock=clock)
    held = asyncio.create_task(lanes.run("one", "a", lambda: begun.set() or hold.wait(LONG_SECONDS)))
    await asyncio.to_thread(begun.wait, LONG_SECONDS)

    def long() -> None:
        clock.now += 10

    await lanes.run("two", "a", long)
    with pytest.raises(BudgetExceededError):
        await lanes.run("two", "a", long)
    waiting = asyncio.create_task(lanes.run("one", "b", lambda: pytest.fail("it was cancelled")))
    await asyncio.sleep(0)
    waiting.cancel()
    hold.set()
    await held

    def fails() -> Any:
        raise ValueError("of the work")

    with pytest.raises(ValueError, match="of the work"):
        await lanes.run("one", "b", fails)
    lanes.close()


def test_the_error_of_a_reply_says_when_to_try_again() -> None:
    error = BudgetExceededError("Compiling grammars took too long", retry_after_seconds=12.5)
    reply = error_map(ErrorCode.QUEUE_FULL, error)
    assert reply == {
        "code": 429,
        "type": "BudgetExceededError",
        "message": "Compiling grammars took too long",
        "request_id": None,
        "is_transient": True,
        "retry_after_seconds": 12.5,
    }
    answer = from_reply_error(reply, field_names={})
    assert (answer.status, answer.code, answer.headers["Retry-After"]) == (429, "rate_limit_exceeded", "13")
