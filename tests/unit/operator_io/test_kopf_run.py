"""However kopf ends, or does not, the operator goes on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from kubernetes.aio.client import Configuration

from megatron_operator.controller import kopf_run
from megatron_operator.controller.kopf_run import KopfRun, WatchesEndedError
from megatron_operator.controller.task import TaskSupervisor


def no_task(*_: Any) -> Any:
    raise AssertionError("no resource is there")


@pytest.fixture
async def make_run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., KopfRun]:
    """make_run(operator): a run of something in place of kopf."""
    monkeypatch.setattr(kopf_run, "END_SECONDS", 0.05)

    def make(operator: Callable[..., Any]) -> KopfRun:
        monkeypatch.setattr(kopf_run.kopf, "operator", operator)
        return KopfRun(
            Configuration(),
            TaskSupervisor(no_task),
            namespaces=("a",),
            watch_seconds=40,
            show=no_task,
            started=lambda: None,
        )

    return make


async def until_stopped(*, stop_flag: asyncio.Event, **_: Any) -> None:
    await stop_flag.wait()


async def test_sigterm_ends_the_operator(make_run: Any) -> None:
    run = make_run(until_stopped)
    running = asyncio.create_task(run.run())
    await asyncio.sleep(0)
    assert not running.done()
    run.end()
    await running


async def test_a_deleted_crd_ends_the_operator_cleanly(make_run: Any) -> None:
    run = make_run(until_stopped)
    run.watches.vanished.set()
    with pytest.raises(WatchesEndedError, match="no longer serves"):
        await run.run()


async def test_the_cause_of_a_failure_is_logged(make_run: Any) -> None:
    async def fail(**_: Any) -> None:
        raise ValueError("the watch said 500")

    with pytest.raises(WatchesEndedError, match="the watch said 500"):
        await make_run(fail).run()


async def test_a_stuck_shutdown_is_abandoned(make_run: Any) -> None:
    stuck = asyncio.Event()

    async def hang(*, stop_flag: asyncio.Event, **_: Any) -> None:
        stop_flag.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            await stuck.wait()

    with pytest.raises(WatchesEndedError, match="has not stopped within"):
        await make_run(hang).run()
    stuck.set()
