"""A resource with prefill and decode engines under long prompts: every answer is that of an undisturbed engine."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import httpx
import pytest
from eventually import eventually
from prometheus_client.parser import text_string_to_metric_families

from megatron_operator.cluster.api import KubeApi
from megatron_operator.cluster.kinds import POD
from megatron_operator.resource.names import COORDINATOR

from .client_load import CoordinatorLoad, client_load
from .conftest import condition
from .fake_node import FakeNode

pytestmark = pytest.mark.cluster

PROMPT_TOKENS = 600
BATCHING = {"blockSizeTokens": 16}


class LongPrompts(CoordinatorLoad):
    """Clients whose prompts are longer than the one chunk that a decode engine computes itself."""

    def prompt(self, number: int, sequence: int) -> list[int]:
        return [number, sequence, *range(2, PROMPT_TOKENS)]


async def imports(node: FakeNode) -> float:
    """Return how many prompts decode engines have imported, by the coordinator's counter."""
    (coordinator,) = [each for each in node.containers.values() if each.component == COORDINATOR]
    async with httpx.AsyncClient(trust_env=False) as http:
        page = await http.get(f"http://127.0.0.1:{coordinator.health_port}/metrics")
    families = {family.name: family for family in text_string_to_metric_families(page.text)}
    return sum(sample.value for sample in families["megatron_coordinator_kv_imports"].samples)


async def until_imported(node: FakeNode) -> None:
    before = await imports(node)

    async def more() -> bool:
        return await imports(node) > before

    await eventually(more, what="a decode engine imports a prompt")


def counts(status: dict[str, Any]) -> dict[str, tuple[int, int, int]]:
    """Return the desired, ready and updated engines by role."""
    return {each["name"]: (each["desired"], each["ready"], each["updated"]) for each in status.get("roles", ())}


def serves(decode: int, prefill: int, missing: str = "AllWell") -> Callable[[dict[str, Any]], bool]:
    """Return whether a status has these engines, all ready, and this reason of RoleMissing."""

    def holds(status: dict[str, Any]) -> bool:
        wanted = {"decode": (decode,) * 3, "prefill": (prefill,) * 3}
        found = condition(status, "RoleMissing")
        right = found.get("reason") == missing and found["status"] == ("False" if missing == "AllWell" else "True")
        settled = condition(status, "Progressing")["status"] == "False"
        return counts(status) == wanted and right and settled and condition(status, "Ready")["status"] == "True"

    return holds


def prefill(replicas: int) -> dict[str, Any]:
    return {"roles": {"prefill": {"replicas": replicas}}}


@pytest.fixture
def node(node: FakeNode) -> FakeNode:
    """Its engines take longer to compute a prompt than to transfer its blocks."""
    node.engine_arguments = ("--echo-step-seconds", "0.02", "--echo-token-seconds", "0.001")
    return node


async def test_both_roles_are_scaled_rolled_out_and_lost_under_long_prompts(
    api: KubeApi, resource: Any, operator: Any, node: FakeNode, kubectl: Any
) -> None:
    def scale(replicas: int) -> None:
        done = kubectl("scale", "mi/demo", f"--replicas={replicas}")
        assert done.returncode == 0, done.stderr

    await resource.create(replicas=1, engine={"batching": BATCHING, **prefill(1)})
    status = await resource.until(serves(1, 1))
    revision = status["revision"]
    async with client_load(LongPrompts(node, "demo")) as load:
        await until_imported(node)

        scale(2)
        await resource.until(serves(2, 1))
        subresource = json.loads(kubectl("get", "mi", "demo", "--subresource=scale", "-o", "json").stdout)
        assert subresource["status"]["replicas"] == 2
        pods = await api.list(POD, resource.namespace, selector=subresource["status"]["selector"])
        assert {pod["metadata"]["name"] for pod in pods} == {"demo-engine-0-0", "demo-engine-1-0"}

        scale(0)
        await resource.until(serves(0, 1, "NoDecodeEngine"))
        await load.answered()
        scale(1)
        await resource.until(serves(1, 1))
        await until_imported(node)

        await resource.patch(engine=prefill(0))
        await resource.until(serves(1, 0, "NoPrefillEngine"))
        await load.answered()
        await resource.patch(engine=prefill(1))
        await resource.until(serves(1, 1))
        await until_imported(node)

        await resource.patch(engine={"batching": {**BATCHING, "maxRequests": 7}}, rollout={"maxSurge": 1})
        status = await resource.until(lambda status: serves(1, 1)(status) and status["revision"] != revision)
        assert {entry["revision"] for entry in status["engines"]} == {status["revision"]}
        await until_imported(node)

        lost = node.engine("demo-prefill-0").pod
        await api.request("DELETE", POD.path(resource.namespace, lost["metadata"]["name"]), body={})

        async def returned() -> bool:
            return await node.runs("demo-prefill-0", unlike=lost)

        await eventually(returned, what="the prefill engine has another pod")
        await resource.until(serves(1, 1))
        await until_imported(node)


async def test_verbs_act_on_both_roles(resource: Any, operator: Any, node: FakeNode) -> None:
    await resource.create(replicas=1, engine=prefill(1))
    await resource.until(serves(1, 1))
    for state in ("Paused", "Suspended", "Stopped"):
        await resource.patch(desiredState=state)
        status = await resource.settled(state)
        states = {entry["name"]: entry["state"] for entry in status["engines"]}
        assert set(states) == {"demo-engine-0", "demo-prefill-0"}
        assert len(set(states.values())) == 1
        await resource.patch(desiredState="Running")
        await resource.until(serves(1, 1))
