"""A permission or namespace that is missing degrades what needs it, and nothing else, until it is back."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from eventually import eventually

from megatron_operator.install import RESOURCE_RULES, Rule

from .conftest import BINDING, NAMESPACE, ROLE, Resource, condition

pytestmark = pytest.mark.cluster

WATCH = ("--watch-seconds", "2")
"""The API server checks permissions when a watch begins."""


def rules_without(*resources: str) -> list[Rule]:
    """Return the rules of resources without permission for these API resources."""
    kept = [
        {**rule, "resources": [name for name in rule["resources"] if name not in resources]} for rule in RESOURCE_RULES
    ]
    return [rule for rule in kept if rule["resources"]]


async def unready(operator: Any, *words: str) -> None:
    """Wait until readiness and metrics name what is missing."""

    async def named() -> bool:
        page, metrics = await operator._get("/readyz"), await operator._get("/metrics")
        return all(word in page for word in words) and f'watch_denied{{namespace="{words[1]}"' in metrics

    await eventually(named, what=f"/readyz names {words}")


async def ready(operator: Any) -> None:
    async def nothing_missing() -> bool:
        return "cannot watch" not in await operator._get("/readyz")

    await eventually(nothing_missing, what="/readyz is complete")


@pytest.fixture
async def grant(api: Any, namespace: str, make_operator: Any) -> Callable[..., Any]:
    """grant(rules): the operator's permissions in the namespace of the test, next to those of its home."""
    home = (await api.get(ROLE, namespace, "megatron-operator"))["rules"][len(RESOURCE_RULES) :]

    async def give(rules: list[Rule]) -> None:
        await api.merge_patch(ROLE, namespace, "megatron-operator", {"rules": [*rules, *home]}, manager="test")

    return give


async def test_a_kind_that_may_not_be_read_degrades_what_needs_it_until_it_may(
    resource: Any, make_operator: Any, node: Any, api: Any, namespace: str, grant: Any
) -> None:
    operator = make_operator(*WATCH)
    await operator.start()
    await resource.create()
    await resource.settled("Running")

    await grant(rules_without("configmaps"))
    await unready(operator, "configmaps", namespace)
    status = await resource.until(lambda status: condition(status, "Degraded")["reason"] == "WatchDenied")
    assert "ConfigMap" in condition(status, "Degraded")["message"]
    assert condition(status, "Ready")["status"] == "True"
    await resource.patch(desiredState="Paused")
    await resource.settled("Paused")
    operator.kill()
    await operator.start()  # it has never seen the ConfigMaps
    await unready(operator, "configmaps", namespace)
    await resource.patch(desiredState="Running")
    await resource.settled("Running")
    assert "apply ConfigMap" not in await operator.writes()

    await grant(rules_without("pods"))
    await unready(operator, "pods", namespace)
    # The reason alone is in the status since the ConfigMaps.
    status = await resource.until(lambda status: condition(status, "Ready")["status"] == "Unknown")
    assert (status["state"], condition(status, "Ready")["reason"]) == ("Unknown", "WatchDenied")

    await grant(list(RESOURCE_RULES))
    await ready(operator)
    status = await resource.settled("Running")
    await resource.until(lambda status: condition(status, "Degraded")["status"] == "False")


@pytest.fixture
async def second(api: Any, namespace: str, operator_kubeconfig: Any) -> AsyncIterator[str]:
    """Another namespace that the operator serves."""
    name = f"t-{secrets.token_hex(4)}"
    await api.request("POST", NAMESPACE.path(None), body={"metadata": {"name": name}})
    await let(api, name, home=namespace)
    yield name
    if await api.get(NAMESPACE, None, name) is not None:
        await api.request("DELETE", NAMESPACE.path(None, name))


async def let(api: Any, namespace: str, *, home: str) -> None:
    """Grant the operator's account the permissions of a namespace with resources."""
    meta = {"name": "megatron-operator-resources", "namespace": namespace}
    subject = {"kind": "ServiceAccount", "name": "megatron-operator", "namespace": home}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": meta["name"]}
    await api.create(ROLE, {"metadata": meta, "rules": RESOURCE_RULES}, manager="test")
    await api.create(BINDING, {"metadata": meta, "roleRef": role, "subjects": [subject]}, manager="test")


async def test_a_deleted_namespace_stops_no_other(
    resource: Any, make_operator: Any, node: Any, api: Any, namespace: str, second: str
) -> None:
    operator = make_operator(*WATCH, "--namespace", second)
    await operator.start()
    await Resource(api, second, "gone").create()
    await resource.create()
    await resource.settled("Running")

    await api.request("DELETE", NAMESPACE.path(None, second))
    await unready(operator, "megatroninferences", second)
    await resource.patch(desiredState="Paused")
    await resource.settled("Paused")
    operator.kill()
    await operator.start()
    await unready(operator, "megatroninferences", second)
    await resource.patch(desiredState="Running")
    await resource.settled("Running")

    async def is_gone() -> bool:
        return await api.get(NAMESPACE, None, second) is None

    await eventually(is_gone, what="the namespace is gone")
    await api.request("POST", NAMESPACE.path(None), body={"metadata": {"name": second}})
    await let(api, second, home=namespace)
    await ready(operator)
    again = Resource(api, second, "again")
    await again.create()
    await again.until(lambda status: bool(status.get("conditions")))
