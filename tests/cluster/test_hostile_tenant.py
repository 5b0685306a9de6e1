"""Two tenants in two namespaces under one operator. One tenant's coordinator answers garbage and the highest fences."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from eventually import eventually
from hostile_coordinator import HIGHEST, HostileCoordinator

from megatron_operator.cluster.api import KubeApi

from .conftest import NAMESPACE, Resource, condition
from .in_process_fleet import InProcessFleet
from .operator_process import OperatorProcess

pytestmark = pytest.mark.cluster

ROUND = ("Running", "Paused", "Running", "Suspended", "Running")


@pytest.fixture
async def attacker_namespace(api: KubeApi, namespace: str) -> AsyncIterator[str]:
    name = f"t-{secrets.token_hex(4)}"
    await api.request("POST", NAMESPACE.path(None), body={"metadata": {"name": name}})
    yield name
    await api.request("DELETE", NAMESPACE.path(None, name))


@pytest.fixture
async def fleets(
    api: KubeApi, namespace: str, attacker_namespace: str, tmp_path: Path
) -> AsyncIterator[tuple[InProcessFleet, InProcessFleet]]:
    """The pods of the tenant and of the attacker. Both use the same folder for the coordinators' sockets."""
    made = tuple(InProcessFleet(api, namespace=name, folder=tmp_path) for name in (namespace, attacker_namespace))
    for fleet in made:
        fleet.start()
    yield made[0], made[1]
    for fleet in made:
        await fleet.stop()


@pytest.fixture
async def hostile(tmp_path: Path) -> AsyncIterator[HostileCoordinator]:
    made = HostileCoordinator(path=tmp_path / "attacker.sock")
    yield made
    await made.close()


async def test_a_hostile_tenant_does_not_affect_the_verbs_of_another(
    api: KubeApi,
    namespace: str,
    attacker_namespace: str,
    cluster_wide: None,
    fleets: tuple[InProcessFleet, InProcessFleet],
    hostile: HostileCoordinator,
    make_operator: Callable[..., OperatorProcess],
) -> None:
    fleet = fleets[0]
    fleet.coordinator("demo")
    operator = make_operator("--no-security", "--coordinator-address", fleet.address_template, everywhere=True)
    await operator.start()
    tenant, attacker = Resource(api, namespace), Resource(api, attacker_namespace, "attacker")
    await attacker.create()

    async def answered() -> bool:
        return hostile.round.is_set()

    def names_the_fence(status: dict[str, Any]) -> bool:
        return condition(status, "Degraded").get("reason") == "StaleFence"

    await attacker.until(names_the_fence)
    await tenant.create()
    for state in ROUND:
        await tenant.patch(desiredState=state)
        await attacker.patch(desiredState=state)
        await tenant.settled(state)
    await eventually(answered, what="the attacker's coordinator gave each of its answers")
    await attacker.until(names_the_fence)
    # The last hostile answers may have come after the tenant's last verb: one more round.
    for state in ("Paused", "Running"):
        await tenant.patch(desiredState=state)
        await tenant.settled(state)
    status = await tenant.status()
    assert "fenceOffset" not in status["lifecycle"]
    assert str(HIGHEST) not in str(status)
    assert (await fleet.ask("demo")).fence == status["lifecycle"]["fence"] < 100
    assert operator.running
