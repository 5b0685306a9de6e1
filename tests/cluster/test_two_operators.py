"""Two operators serve one namespace: one manages a resource, the other one changes nothing and shows it."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
from eventually import eventually

from megatron_operator.install import HOME_RULES

from .conftest import BINDING, NAMESPACE, ROLE
from .operator_process import OperatorProcess

pytestmark = pytest.mark.cluster

LEASE_SECONDS = 10


@pytest.fixture
async def other_home(api: Any, namespace: str, operator_kubeconfig: Path) -> AsyncIterator[str]:
    """The namespace of a second operator with the same account."""
    name = f"t-{secrets.token_hex(4)}"
    meta = {"name": "megatron-operator", "namespace": name}
    subject = {"kind": "ServiceAccount", "name": "megatron-operator", "namespace": namespace}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": "megatron-operator"}
    await api.request("POST", NAMESPACE.path(None), body={"metadata": {"name": name}})
    await api.create(ROLE, {"metadata": meta, "rules": HOME_RULES}, manager="test")
    await api.create(BINDING, {"metadata": meta, "roleRef": role, "subjects": [subject]}, manager="test")
    yield name
    await api.request("DELETE", NAMESPACE.path(None, name))


async def leaves_alone(operator: OperatorProcess, lease: str) -> None:
    async def shown() -> bool:
        return f'managed_elsewhere{{lease="{lease}"' in await operator._get("/metrics")

    await eventually(shown, what=f"the operator leaves the resource to {lease}")


async def test_the_second_operator_writes_nothing_until_the_first_is_gone(
    resource: Any, make_operator: Callable[..., OperatorProcess], node: Any, namespace: str, other_home: str
) -> None:
    lease = ("--lease-seconds", str(LEASE_SECONDS))
    first = make_operator(*lease, "--lease-name", "first", "--resync-seconds", "1", pod="first-0")
    second = make_operator(
        *lease, "--lease-name", "second", "--operator-namespace", other_home, "--resync-seconds", "1", pod="second-0"
    )
    await first.start()
    await resource.create()
    await resource.settled("Running")
    assert (await resource.status())["manager"] == f"{namespace}/first"
    await second.start()
    await leaves_alone(second, f"{namespace}/first")
    await resource.patch(desiredState="Paused")
    await resource.settled("Paused")
    await resource.until(lambda status: "plan" not in status)
    await first.passed(await first.passes() + 2)  # the last Events and conditions are written
    version, before = (await resource.get())["metadata"]["resourceVersion"], await first.writes()
    await first.passed(await first.passes() + 3)
    await second.passed(await second.passes() + 3)
    assert await first.writes() == before, "it writes although nothing changes"
    assert await second.writes() == {"create Secret": 1.0}, "nothing but its admin key"
    assert (await resource.get())["metadata"]["resourceVersion"] == version

    first.kill()
    await resource.until(lambda status: status.get("manager") == f"{other_home}/second")
    await resource.patch(desiredState="Running")
    await resource.settled("Running")
    await first.start()
    await leaves_alone(first, f"{other_home}/second")
    assert await first.writes() == {}
