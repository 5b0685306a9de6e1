"""A request for one engine alone, as the operator sends it after a rollout step, over the operator's own link."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from eventually import LONG_SECONDS

from megatron_operator.decision.actions import AskCanary
from megatron_operator.decision.coordinator_snapshot import CanaryReport
from megatron_operator.link.connection import CoordinatorLink, LinkTimings
from megatron_runtime.protocol.headers import Role

FAST = LinkTimings(hello_retry=0.05, status_interval=0.1, status_interval_busy=0.05)


@pytest.fixture
async def link(stage: Any) -> AsyncIterator[CoordinatorLink]:
    stage.coordinator()
    made = CoordinatorLink(on_change=lambda: None, timings=FAST)
    made.point_to((stage.address(Role.ADMIN),), None)
    await made.refresh(expected=True)
    yield made
    await made.close()


async def report(link: CoordinatorLink, engine: str) -> CanaryReport:
    """Ask, as often as a task would, until there is a verdict."""
    asked = AskCanary(engine, "r1", "builtin:x")
    async with asyncio.timeout(LONG_SECONDS):
        while engine not in link.snapshot.canaries:
            link.ask_canary(asked)
            await asyncio.sleep(0.02)
    return link.snapshot.canaries[engine]


async def test_a_canary_goes_to_the_engine_that_is_named_though_it_is_draining(stage: Any, link: Any) -> None:
    others = [await stage.engine(f"engine-{number}") for number in range(3)]
    stage.coordinators[-1].core.engines.named("engine-1").draining = True
    found = await report(link, "engine-1")
    assert found.supported
    assert found.revision == "r1"
    assert [engine.name for engine in others if engine.dispatches] == ["engine-1"]
    assert "log-probabilities" in found.message


async def test_an_unregistered_engine_reports_no_revision(stage: Any, link: Any) -> None:
    await stage.engine("engine-0")
    link.ask_canary(AskCanary("engine-9", "r1", "builtin:x"))
    await link.refresh()
    assert "engine-9" not in link.snapshot.canaries
    later = await stage.engine("engine-9")
    await report(link, "engine-9")
    assert later.dispatches


async def test_a_pinned_request_ends_with_its_engine_and_goes_nowhere_else(stage: Any, link: Any) -> None:
    leaving = await stage.engine("engine-0", step_seconds=None)
    staying = await stage.engine("engine-1")
    link.ask_canary(AskCanary("engine-0", "r1", "builtin:x"))
    await leaving.until(lambda: leaving.dispatches)
    leaving.leave()
    journal = stage.coordinators[-1].core.dispatcher.journal
    await stage.until(lambda: len(journal) == 0)
    assert not staying.dispatches
    assert "engine-0" not in link.snapshot.canaries


async def test_requests_of_users_do_not_come_by_the_admin_port(stage: Any, link: Any) -> None:
    engine = await stage.engine("engine-0")
    found = await report(link, "")
    assert not found.supported
    assert not engine.dispatches
