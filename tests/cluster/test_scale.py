"""Many resources under one operator: the cost of applying, reacting, idling and restarting, with keys. The test prints
the figures.

`MEGATRON_SOAK=1` runs the size that the documentation quotes. The test fails if the idle operator writes anything but
its Lease, by the API server's audit log, while resyncs run, or if an operator that restarts writes anything else.
`MEGATRON_RESOURCES` sets another size, `MEGATRON_IDLE_SECONDS` the idle time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import Callable

import pytest
from eventually import eventually
from soak import size

from localcluster import LocalCluster
from megatron_operator.cluster.api import KubeApi
from megatron_operator.cluster.kinds import RESOURCE, SERVICE, kind_of

from .audit_log import AuditLog
from .conftest import percentile_ms
from .in_process_fleet import InProcessFleet
from .operator_process import OperatorProcess

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(1800)]

RESOURCES = int(os.environ.get("MEGATRON_RESOURCES") or size(2, soak=200))
IDLE_SECONDS = int(os.environ.get("MEGATRON_IDLE_SECONDS") or size(0, soak=120))
"""The minimum. The operator stays idle until it has renewed its Lease."""
RESYNC_SECONDS = size(1, soak=300)
IDLE_PASSES = size(2 * RESOURCES, soak=0)
"""Passes after which an operator has nothing left to write. In `make soak` resyncs are rare."""
ENGINES = 4
REACTIONS = size(2, soak=200)
LOOK_SECONDS = 0.02
SETS = kind_of("apps/v1", "StatefulSet")


async def create(api: KubeApi, namespace: str, name: str) -> float:
    """Return the seconds from the creation until the last engine's StatefulSet exists."""
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

    await eventually(applied, what=f"the children of {name}", look_seconds=LOOK_SECONDS)
    return time.monotonic() - began


async def test_many_resources_serve_and_cost_no_write_when_idle(
    api: KubeApi,
    namespace: str,
    fleet: InProcessFleet,
    make_operator: Callable[..., OperatorProcess],
    control_plane: LocalCluster,
) -> None:
    fleet.secure = True
    flags = ("--coordinator-address", fleet.address_template)
    operator = make_operator(*flags, "--resync-seconds", str(RESYNC_SECONDS), warm=False)  # its memory is measured
    await operator.start()
    names = [f"r{number:03}" for number in range(RESOURCES)]
    applied: list[float] = []
    for name in names:
        taken = await create(api, namespace, name)
        applied.append(taken)
        await asyncio.sleep(max(0.0, 1.0 - taken))

    async def all_serve() -> bool:
        found = await api.list(RESOURCE, namespace)
        return sum(item.get("status", {}).get("ready") == f"{ENGINES}/{ENGINES}" for item in found) == RESOURCES

    await eventually(all_serve, seconds=300, what="every resource serves")
    cpu_until_served = operator.cpu_seconds()
    reactions = [await restored(api, namespace, names[number % RESOURCES]) for number in range(REACTIONS)]
    before = await settled_writes(operator)
    log = AuditLog(control_plane.audit_log, user=f"system:serviceaccount:{namespace}:megatron-operator")
    passes, cpu_before_idle, idle_since = await operator.passes(), operator.cpu_seconds(), time.monotonic()
    await asyncio.sleep(IDLE_SECONDS)
    await operator.passed(passes + IDLE_PASSES)

    async def lease_renewed() -> bool:
        return any(request.resource == "leases" for request in log.writes())

    await eventually(lease_renewed, what="the operator renews its Lease")
    written = log.writes()
    figures = {
        "resources": RESOURCES,
        "engines_each": ENGINES,
        "applied_p50_ms": percentile_ms(applied, 0.5),
        "applied_p99_ms": percentile_ms(applied, 0.99),
        "reaction_p50_ms": percentile_ms(reactions, 0.5),
        "reaction_p99_ms": percentile_ms(reactions, 0.99),
        "memory_mib": round(operator.rss_mib()),
        "cpu_seconds_until_all_serve": cpu_until_served,
        "cpu_seconds_idle": round(operator.cpu_seconds() - cpu_before_idle, 2),
        "idle_seconds": round(time.monotonic() - idle_since),
        "idle_passes": await operator.passes() - passes,
        "idle_lease_writes": sum(request.resource == "leases" for request in written),
        "idle_other_writes": sum(request.resource != "leases" for request in written),
    }
    assert await operator.writes() == before
    restart = await restarted(operator)
    print(f"\n{json.dumps(figures | restart)}")
    assert await settled_writes(operator) == {}, "nothing differs after the restart"
    assert [str(request) for request in written if request.resource != "leases"] == []


async def restarted(operator: OperatorProcess) -> dict[str, float]:
    """Kill the operator and start it again. Return the time and memory until it has decided about all resources."""
    operator.kill()
    began = time.monotonic()
    operator.spawn()
    seconds: dict[str, float] = {}

    async def decided(count: int) -> bool:
        with contextlib.suppress(OSError):
            return await operator.decided() >= count
        return False

    for name, count in (("first_pass", 1), ("last_pass", RESOURCES)):
        await eventually(lambda count=count: decided(count), seconds=300, what=name, look_seconds=LOOK_SECONDS)
        seconds[f"restart_{name}_seconds"] = round(time.monotonic() - began, 1)
    await settled_writes(operator)
    return {
        **seconds,
        "restart_cpu_seconds": operator.cpu_seconds(),
        "restart_peak_mib": round(operator.rss_mib(peak=True)),
    }


async def restored(api: KubeApi, namespace: str, name: str) -> float:
    """Return the seconds until the operator has re-created a deleted front Service."""
    found = await api.get(SERVICE, namespace, name)
    assert found is not None
    uid = found["metadata"]["uid"]
    await api.delete(SERVICE, namespace, name, uid=uid)

    async def back() -> bool:
        made = await api.get(SERVICE, namespace, name)
        return made is not None and made["metadata"]["uid"] != uid

    began = time.monotonic()
    await eventually(back, what=f"Service {name} is back", look_seconds=LOOK_SECONDS)
    return time.monotonic() - began


async def settled_writes(operator: OperatorProcess) -> dict[str, float]:
    """Return the counts of writes once they stay the same for a second and IDLE_PASSES."""
    while True:
        last, passes = await operator.writes(), await operator.passes()
        await asyncio.sleep(1)
        await operator.passed(passes + IDLE_PASSES)
        if await operator.writes() == last:
            return last
