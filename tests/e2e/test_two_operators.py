"""Two operators on a real node: the leader is frozen during a verb and resumes when the other one leads."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from coordinator_questions import ask_at
from eventually import eventually
from soak import SOAK

from localcluster import installation
from localcluster.kubectl import Kubectl
from localcluster.progress import Steps
from megatron_runtime.protocol.headers import Header
from megatron_runtime.protocol.messages import StatusReply

from .conftest import Platform, deploy

FROZEN_SECONDS = 30.0
LEASE = "megatron-operator"


@pytest.fixture
def system(platform: Platform) -> Iterator[Kubectl]:
    """kubectl in the operator's namespace, with two replicas."""

    def install(replicas: int) -> None:
        installation.install_operator(platform.kube, platform.helm, Steps(), values=[f"operator.replicas={replicas}"])

    install(2)
    yield platform.kube.in_namespace(installation.OPERATOR_NAMESPACE)
    install(1)


def leader(system: Kubectl) -> dict[str, Any]:
    """Return the pod that holds the Lease."""
    holder = system.json("lease", LEASE)["spec"]["holderIdentity"]
    name, _, uid = holder.rpartition("_")
    pod: dict[str, Any] = system.json("pod", name)
    assert pod["metadata"]["uid"] == uid
    return pod


def process_of(pod: dict[str, Any]) -> int:
    """Return the pid of the operator in a pod. This machine is the node."""
    uid = pod["metadata"]["uid"]
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            groups, command = (entry / "cgroup").read_text(), (entry / "cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if uid in groups.replace("_", "-") and b"megatron-operator" in command:
            return int(entry.name)
    raise AssertionError(f"no process of pod {pod['metadata']['name']} on this machine")


async def ask(kube: Kubectl, system: Kubectl) -> StatusReply:
    return await ask_at(
        f"tcp://{kube.cluster_ip('demo-coordinator')}:5557",
        admin=system.json("secret", "megatron-operator-admin"),
        keys=kube.json("secret", "demo-keys"),
    )


@pytest.mark.skipif(not SOAK, reason="`make test-cluster` shows it without a node; `make soak` runs it")
async def test_a_frozen_leader_is_replaced_and_changes_nothing_when_it_resumes(kube: Kubectl, system: Kubectl) -> None:
    deploy(kube)
    first = leader(system)
    pid = process_of(first)

    kube.patch_spec("demo", desiredState="Paused")
    os.kill(pid, signal.SIGSTOP)
    frozen = time.monotonic()
    try:

        async def another_leads() -> bool:
            return system.json("lease", LEASE)["spec"]["holderIdentity"].split("_")[0] != first["metadata"]["name"]

        await eventually(another_leads, seconds=60, what="another leads")
        failover = time.monotonic() - frozen
        kube.wait_state("demo", "Paused")
        kube.patch_spec("demo", desiredState="Running")
        kube.wait_state("demo", "Running")
        await asyncio.sleep(max(0.0, frozen + FROZEN_SECONDS - time.monotonic()))
        before = await ask(kube, system)
    finally:
        os.kill(pid, signal.SIGCONT)

    async def restarted() -> bool:
        pod = system.json("pod", first["metadata"]["name"])
        return bool(pod["status"]["containerStatuses"][0]["lastState"])

    await eventually(restarted, seconds=60, what="the first operator exits")
    ended = system.json("pod", first["metadata"]["name"])["status"]["containerStatuses"][0]["lastState"]["terminated"]
    assert ended["exitCode"] == 1
    kube.patch_spec("demo", desiredState="Paused")
    kube.wait_state("demo", "Paused")

    reply = await ask(kube, system)
    wanted = [Header.PAUSE, Header.UNPAUSE, Header.PAUSE]
    assert [(done.signal, done.phase) for done in reply.operations] == [(signal, "Confirmed") for signal in wanted]
    assert [done.operation_id for done in reply.operations[:2]] == [done.operation_id for done in before.operations]
    assert reply.fence == before.fence, "the first operator led again"
    print(f"\nfailover took {failover:.1f} s, the freeze {FROZEN_SECONDS:g} s; 0 stale commands were accepted")
