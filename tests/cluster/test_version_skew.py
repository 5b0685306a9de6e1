"""Upgrade and rollback of the operator under load: the earlier one also meets the current CRD."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from eventually import eventually
from soak import size

from megatron_operator.cluster.kinds import kind_of

from .client_load import PACE, ClientLoad, CoordinatorLoad, client_load, every_status
from .earlier_release import CHART, REPOSITORY, unpack
from .operator_process import OperatorProcess

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

EARLIER = "37bc7bc7e4976118a8e38b96bad1ae132681f8c3"
"""The first commit whose operator serves v1beta1 and knows every field that has a default in the CRD: see
`tests/unit/operator/crd-defaults.json`, which no later field joins. It runs with the present dependencies."""
SOURCES = ("operator", "runtime", "kernels")
RELEASE = "megatron-operator"
DEPLOYMENT = kind_of("apps/v1", "Deployment")


@pytest.fixture(scope="session")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources and the chart of the earlier release."""
    return unpack(EARLIER, *SOURCES, CHART, into=tmp_path_factory.mktemp("earlier"))


@pytest.fixture
def release(
    helm: Callable[..., None], operator_kubeconfig: Path, namespace: str, earlier: Path
) -> Iterator[Callable[..., Any]]:
    """release(command, chart): install or upgrade the permissions of the operator's account from a chart, or roll back.

    The CRD stays the current one, as the guide says of a way back. The chart's pods do not start: the test runs
    the operator as a process.
    """

    async def call(command: str, *arguments: str) -> None:
        settings = () if command == "rollback" else ("--take-ownership", "--set", "crd.install=false", *flags)
        await asyncio.to_thread(helm, command, RELEASE, *arguments, *settings)

    flags = ("--set", f"operator.namespaces={{{namespace}}}")
    yield call
    helm("uninstall", RELEASE)


def images(tag: str) -> tuple[str, ...]:
    """Return the flags that the chart passes if the images have a registry of the user, as in the guide."""
    flags = {"runtime-image": "runtime", "vllm-runtime-image": "runtime-vllm", "coordinator-image": "operator"}
    return tuple(
        part for flag, image in flags.items() for part in (f"--{flag}", f"registry.example/megatron-{image}:{tag}")
    )


async def heals_and_obeys(resource: Any, api: Any, load: ClientLoad) -> None:
    """Check that a verb acts, that a deleted coordinator is created again, and that requests are answered."""
    await resource.settled("Running")
    for state in ("Paused", "Running"):
        await resource.patch(desiredState=state)
        await resource.settled(state)
    lost = await api.get(DEPLOYMENT, resource.namespace, "demo-coordinator")
    await api.delete(DEPLOYMENT, resource.namespace, "demo-coordinator", uid=lost["metadata"]["uid"])

    async def is_back() -> bool:
        found = await api.get(DEPLOYMENT, resource.namespace, "demo-coordinator")
        return found is not None and found["metadata"]["uid"] != lost["metadata"]["uid"]

    await eventually(is_back, what="the coordinator is created again")
    await load.answered()
    await resource.settled("Running")


async def test_upgrade_and_rollback_under_load(
    resource: Any, make_operator: Callable[..., OperatorProcess], node: Any, api: Any, earlier: Path, release: Any
) -> None:
    before = make_operator(*images("0.1.0"), pod="earlier-0", sources=[earlier / folder for folder in SOURCES])
    now = make_operator(*images("0.2.0"), pod="current-0")
    upgrade = (before, now, ("upgrade", str(REPOSITORY / CHART)))
    rollback = (now, before, ("rollback", "1"))
    node.engine_arguments = PACE
    await release("upgrade", "--install", str(earlier / CHART))
    await before.start()
    await resource.create(replicas=2)
    await resource.settled("Running")
    async with (
        every_status(api, resource.namespace, "demo") as statuses,
        client_load(CoordinatorLoad(node, "demo")) as load,
    ):
        await heals_and_obeys(resource, api, load)
        for operator, successor, change in (upgrade, rollback, *size((), soak=(upgrade,))):
            await release(*change)
            assert operator.stop() == 0
            await successor.start()
            await heals_and_obeys(resource, api, load)
    reasons = {entry["reason"] for _, status in statuses for entry in status.get("conditions", ())}
    assert "InvalidSpec" not in reasons
    assert "InvalidSpec" not in {event["reason"] for event in await resource.events()}
    print(f"\n{load.answers} requests, 0 failed; the slowest took {load.longest:.1f} s")
