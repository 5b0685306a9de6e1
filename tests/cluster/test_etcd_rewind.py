"""etcd is restored from a backup: objects and statuses of the past, and processes of the present.

The operator notices it long before it lists everything again without a cause (300 s).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from coordinator_questions import ask_coordinator
from eventually import eventually

from localcluster import LocalCluster, processes
from megatron_operator.cluster.kinds import LEASE, kind_of

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(600)]

DEPLOYMENT = kind_of("apps/v1", "Deployment")


@pytest.fixture
def backup(control_plane: LocalCluster, tmp_path: Path) -> Iterator[Any]:
    """The functions backup.take() and backup.restore() of the control plane's etcd."""
    yield Backup(control_plane, tmp_path / "etcd-backup")
    control_plane.up()


class Backup:
    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self._cluster, self._folder = cluster, folder

    def _pid(self, name: str) -> int:
        record = processes.running(name, self._cluster.layout)
        assert record is not None
        return record.pid

    def take(self) -> None:
        """Copy the files of the stopped process, as a snapshot of its disk."""
        os.kill(self._pid("etcd"), signal.SIGSTOP)
        try:
            shutil.copytree(self._cluster.layout.etcd, self._folder)
        finally:
            os.kill(self._pid("etcd"), signal.SIGCONT)

    def restore(self) -> None:
        # The controllers of Kubernetes are started again, as its documentation says of a restore; the operator is not.
        names = ("kube-controller-manager", "kube-apiserver", "etcd")
        processes.terminate([self._pid(name) for name in names], grace=0)
        shutil.rmtree(self._cluster.layout.etcd)
        shutil.copytree(self._folder, self._cluster.layout.etcd)
        self._cluster.up()


async def test_the_operator_sees_the_objects_of_the_past_and_the_processes_of_the_present(
    resource: Any, make_operator: Any, node: Any, api: Any, namespace: str, backup: Backup
) -> None:
    operator = make_operator("--lease-seconds", "10")
    await operator.start()
    # It exits when etcd is away for longer than its Lease is valid.
    async with operator.kept_running():
        await resource.create(replicas=2, server={"replicas": 1})
        await resource.settled("Running")
        await resource.until(lambda status: "plan" not in status)
        await asyncio.to_thread(backup.take)
        lease = await api.get(LEASE, namespace, "megatron-operator")
        await resource.patch(desiredState="Paused")
        await resource.settled("Paused")

        async def renewed() -> bool:
            now = await api.get(LEASE, namespace, "megatron-operator")
            return bool(now["metadata"]["resourceVersion"] != lease["metadata"]["resourceVersion"])

        # The operator recognises a backup that is older than its last renewal.
        await eventually(renewed, what="the Lease is renewed")
        await asyncio.to_thread(backup.restore)
        assert (await resource.get())["spec"]["desiredState"] == "Running"

        async def runs() -> bool:
            return (await ask_coordinator(api, namespace, node.ports.admin)).state == "RUNNING"

        await eventually(runs, what="the coordinator runs as the restored spec says")
        await resource.settled("Running")
        # The watches, too, follow the present again.
        node.signal_engine("demo-engine-1", signal.SIGSTOP)
        await resource.until(lambda status: status["ready"] == "1/2")
        node.signal_engine("demo-engine-1", signal.SIGCONT)
        await api.merge_patch(DEPLOYMENT, namespace, "demo-server", {"spec": {"replicas": 3}}, manager="other")

        async def undone() -> bool:
            return bool((await api.get(DEPLOYMENT, namespace, "demo-server"))["spec"]["replicas"] == 1)

        await eventually(undone, what="a change of a child is undone")
        await resource.settled("Running")
