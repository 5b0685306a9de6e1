"""The previous version of the chart, upgraded to the current one, uninstalled and installed again."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from .earlier_release import CHART, REMEDY, REPOSITORY, git, unpack

pytestmark = pytest.mark.cluster

GUIDE = REPOSITORY / "docs/guides/upgrade.md"
LIMITED = "app.kubernetes.io/instance=limited"


@pytest.fixture(scope="session")
def earlier_chart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The chart before its last change, from the repository's history."""
    commits = git("log", "-n2", "--format=%H", "--", CHART).decode().split()
    if len(commits) < 2:
        pytest.fail(f"the history has no earlier commit of {CHART}. {REMEDY}", pytrace=False)
    return unpack(commits[1], CHART, into=tmp_path_factory.mktemp("earlier")) / CHART


async def test_upgrade_and_uninstall_do_not_interrupt_serving(
    resource: Any, operator: Any, node: Any, helm: Callable[..., None], earlier_chart: Path, kubectl: Any
) -> None:
    # The chart's operator pods never start on a control plane: the test's operator process, which is the current one,
    # reconciles with the current CRD. The release has another name than the test's operator, so uninstalling it does
    # not delete that operator's account.
    release = ("limited", "--take-ownership", "--set", "operator.image.tag=test")
    namespaces = ("--set", f"operator.namespaces={{{resource.namespace}}}")
    earlier = (str(earlier_chart), *release[1:], *namespaces, "--set", "crd.install=false")
    await asyncio.to_thread(helm, "upgrade", "--install", *release[:1], *earlier)
    await resource.create(replicas=2)
    await resource.settled("Running")
    before = await serving(resource, node)

    (documented,) = re.findall(r"^helm upgrade .*?[^\\]$", GUIDE.read_text(), re.M | re.S)
    keeps = [part for part in documented.split() if part.endswith("-values")]
    settings = (*keeps, *release[1:], "--set", "crd.install=true")
    await asyncio.to_thread(helm, "upgrade", *release[:1], str(REPOSITORY / CHART), *settings)
    (deployment,) = json.loads(kubectl("get", "deployment", "-l", LIMITED, "-o", "json").stdout)["items"]
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["args"][container["args"].index("--namespace") + 1] == resource.namespace
    roles = json.loads(kubectl("get", "clusterrole", "-l", LIMITED, "-o", "json").stdout)["items"]
    readers = [role["metadata"]["name"] for role in roles if "secrets" in json.dumps(role["rules"])]
    assert readers == [], "values were dropped"
    await resource.patch(desiredState="Paused")
    await resource.settled("Paused")

    await asyncio.to_thread(helm, "uninstall", "limited")
    assert (await resource.get()) is not None, "uninstalling the chart must keep the CRD and its resources"
    await resource.patch(desiredState="Running")
    await resource.settled("Running")
    assert await serving(resource, node) == before
    await asyncio.to_thread(helm, "upgrade", "--install", *release[:1], str(REPOSITORY / CHART), *release[1:])
    await asyncio.to_thread(helm, "uninstall", "limited")


async def serving(resource: Any, node: Any) -> tuple[str, set[str]]:
    """Return the revision, and the pods of engines and coordinator."""
    pods = {uid for uid, container in node.containers.items() if container.process is not None}
    return (await resource.status())["revision"], pods
