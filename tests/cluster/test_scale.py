"""Many resources under one operator: what it costs to apply, to react and to be idle. Figures are printed, not judged.

`MEGATRON_SOAK=1` runs the size that the documentation quotes.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from eventually import eventually
from operator_process import OperatorProcess
from played_fleet import PlayedFleet

from megatron_operator.cluster.api import KubeApi
from megatron_operator.cluster.kinds import RESOURCE, SERVICE, kind_of
from megatron_operator.render.context import FIELD_MANAGER

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

RESOURCES, IDLE_SECONDS = (200, 120.0) if os.environ.get("MEGATRON_SOAK") else (12, 10.0)
ENGINES = 4
REACTIONS = 40
LOOK_SECONDS = 0.05
SETS = kind_of("apps/v1", "StatefulSet")


@pytest.fixture
async def fleet(api: KubeApi, namespace: str, tmp_path: Path) -> AsyncIterator[PlayedFleet]:
    played = PlayedFleet(api, namespace=namespace, folder=tmp_path)
    played.start()
    yield played
    await played.stop()


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


async def create(api: KubeApi, namespace: str, name: str) -> float:
    """Seconds from the creation until the last engine's StatefulSet exists."""
    body = {
        "apiVersion": RESOURCE.api_version,
        "kind": RESOURCE.kind,
        "metadata": {"name": name, "namespace": namespace},
        "spec": {"model": {"source": {"builtin": "smollm2-135m"}}, "replicas": ENGINES},
    }
    began = time.monotonic()
    await api.create(RESOURCE, body, manager="test")

    async def applied() -> bool:
        return await api.get(SETS, namespace, f"{name}-engine-{ENGINES - 1}") is not None

    await eventually(applied, seconds=60, what=f"the children of {name}", look_seconds=LOOK_SECONDS)
    return time.monotonic() - began


async def test_many_resources_are_applied_watched_and_left_alone(
    api: KubeApi, namespace: str, fleet: PlayedFleet, make_operator: Callable[..., OperatorProcess], tmp_path: Path
) -> None:
    operator = make_operator("--no-security", "--coordinator-address", fleet.address_template)
    await operator.start()
    names = [f"r{number:03}" for number in range(RESOURCES)]
    applied: list[float] = []
    for name in names:
        fleet.coordinator(name, engines=ENGINES)
        taken = await create(api, namespace, name)
        applied.append(taken)
        await asyncio.sleep(max(0.0, 1.0 - taken))

    async def all_serve() -> bool:
        found = await api.list(RESOURCE, namespace)
        return sum(item.get("status", {}).get("ready") == f"{ENGINES}/{ENGINES}" for item in found) == RESOURCES

    await eventually(all_serve, seconds=300, what="every resource serves")
    reactions = [await restored(api, namespace, names[number % RESOURCES]) for number in range(REACTIONS)]
    before = await settled_writes(operator)
    versions = await written(api, namespace)
    await asyncio.sleep(IDLE_SECONDS)
    idle_writes = sum((await operator.writes()).values()) - sum(before.values())
    print(
        f"\n{RESOURCES} resources x {ENGINES} engines: applied p50 {percentile(applied, 0.5):.3f} s, "
        f"p99 {percentile(applied, 0.99):.3f} s; "
        f"a deleted child is back p50 {percentile(reactions, 0.5) * 1000:.0f} ms, "
        f"p99 {percentile(reactions, 0.99) * 1000:.0f} ms; memory {operator.rss_mib():.0f} MiB; "
        f"{IDLE_SECONDS:.0f} s idle: {idle_writes:.0f} writes"
    )
    assert await operator.writes() == before
    assert await written(api, namespace) == versions


async def restored(api: KubeApi, namespace: str, name: str) -> float:
    """Seconds until a front Service that somebody deleted is there again."""
    found = await api.get(SERVICE, namespace, name)
    assert found is not None
    uid = found["metadata"]["uid"]
    await api.delete(SERVICE, namespace, name, uid=uid)

    async def back() -> bool:
        made = await api.get(SERVICE, namespace, name)
        return made is not None and made["metadata"]["uid"] != uid

    began = time.monotonic()
    await eventually(back, seconds=60, what=f"Service {name} is back", look_seconds=LOOK_SECONDS)
    return time.monotonic() - began


async def settled_writes(operator: OperatorProcess) -> dict[str, float]:
    """The writes once two looks a second apart agree."""
    last: dict[str, float] = {}

    async def same() -> bool:
        nonlocal last
        now = await operator.writes()
        agree, last = now == last, now
        await asyncio.sleep(1)
        return agree

    await eventually(same, seconds=60, what="the operator is done")
    return last


async def written(api: KubeApi, namespace: str) -> dict[str, Any]:
    """What the operator wrote of every resource, and when."""
    return {
        item["metadata"]["name"]: [
            entry for entry in item["metadata"]["managedFields"] if entry["manager"] == FIELD_MANAGER
        ]
        for item in await api.list(RESOURCE, namespace)
    }
