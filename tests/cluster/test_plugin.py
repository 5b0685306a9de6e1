"""The commands of `kubectl megatron` with kubectl itself, a real API server, operator, coordinator and engines."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.cluster


async def test_commands_from_a_list_to_a_scaled_resource(
    resource: Any, operator: Any, node: Any, plugin: Any, namespace: str
) -> None:
    empty = await plugin("list", "-n", namespace)
    assert (empty.returncode, empty.stdout, empty.stderr) == (0, "", f"no resources in namespace {namespace}\n")
    await resource.create()
    done = await plugin("rollout", "status", "demo", "-n", namespace, "--timeout", "120")
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "demo: done, 1 of 1 engines updated, 1/1 ready"

    header, row = (await plugin("list", "-n", namespace)).stdout.splitlines()
    assert header.split() == ["NAME", "STATE", "READY", "MODEL", "REASON", "AGE"]
    assert row.split()[:3] == ["demo", "Running", "1/1"]
    everywhere = json.loads((await plugin("list", "-A", "-o", "json")).stdout)
    assert (namespace, "demo") in {(each["namespace"], each["name"]) for each in everywhere}

    paused = await plugin("pause", "demo", "-n", namespace)
    assert (paused.returncode, paused.stdout) == (0, "demo: Paused\n")
    later = await plugin("scale", "demo", "--replicas", "2", "-n", namespace)
    assert later.stdout == "demo: 2 engines as soon as it runs; it is Paused as requested\n"
    assert (await plugin("resume", "demo", "-n", namespace)).returncode == 0
    scaled = await plugin("scale", "demo", "--replicas", "2", "-n", namespace)
    assert scaled.stdout.splitlines()[-1] == "demo: done, 2 of 2 engines updated, 2/2 ready"
    status = json.loads((await plugin("status", "demo", "-n", namespace, "-o", "json")).stdout)
    assert (status["operatorProblem"], len(status["status"]["engines"])) == (None, 2)
    explained = json.loads((await plugin("explain", "demo", "-n", namespace, "-o", "json")).stdout)
    assert any("2/2 engines ready" in line for line in explained["explanation"])
    missing = await plugin("scale", "nope", "--replicas", "1", "-n", namespace)
    assert missing.returncode == 1
    assert f"{namespace}/nope: no such resource" in missing.stderr


async def test_a_rollout_that_cannot_end_and_one_of_a_deleted_resource_are_errors(
    resource: Any, operator: Any, plugin: Any, namespace: str
) -> None:
    """No node runs the pods."""
    await resource.create()
    await resource.until(lambda status: "coordinator" in status.get("plan", {}).get("waitingOn", ""))
    late = await plugin("rollout", "status", "demo", "-n", namespace, "--timeout", "3")
    assert late.returncode == 1
    assert "demo: not done after 3 s: 1 of 1 engines updated, 0/1 ready; waiting for the coordinator" in late.stderr
    waiting = asyncio.create_task(plugin("rollout", "status", "demo", "-n", namespace, "--timeout", "60"))
    await resource.delete()
    done = await waiting
    assert done.returncode == 1
    assert "demo: was deleted" in done.stderr or "no such resource" in done.stderr


async def test_permissions_of_the_user_decide(plugin: Any, operator_kubeconfig: Path) -> None:
    """The operator's own account may not read resources of other namespaces."""
    denied = await plugin("list", "-n", "kube-system", kubeconfig=operator_kubeconfig)
    assert denied.returncode == 1
    assert "megatroninferences.inference.megatron.dev in namespace kube-system: 403 Forbidden: " in denied.stderr
