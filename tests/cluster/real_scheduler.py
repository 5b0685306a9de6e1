"""A real kube-scheduler, and the nodes on which it places pods. No kubelet runs the pods."""

from __future__ import annotations

import asyncio
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from localcluster import LocalCluster
from megatron_operator.cluster.kinds import NODE
from megatron_operator.resource.text import stamp_seconds

RACK, PLACE = "example.com/rack", "example.com/place"
HEARTBEAT_SECONDS = 5.0
DEFAULT_PROFILE = {"schedulerName": "default-scheduler"}


class Nodes:
    """Node objects with devices, an extended resource. Their conditions are reported as by a kubelet."""

    def __init__(self, api: Any, namespace: str, *, resource: str) -> None:
        self._api, self._prefix, self._resource = api, f"node-{namespace}", resource
        self._devices: dict[str, int] = {}

    async def set(self, devices: int, **labels: str) -> str:
        """Set the number of devices of the node with these labels, create it if it does not exist, and return its
        name."""
        name = "-".join([self._prefix, *labels.values()])
        if name not in self._devices:
            keys = {"rack": RACK, "place": PLACE}
            found = {keys[key]: value for key, value in labels.items()}
            metadata = {"name": name, "labels": {"kubernetes.io/hostname": name, **found}}
            await self._api.request("POST", NODE.path(None), body={"metadata": metadata})
        self._devices[name] = devices
        await self._report(name)
        return name

    async def keep_ready(self) -> None:
        while True:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            for name in self._devices:
                await self._report(name)

    async def delete(self) -> None:
        for name in self._devices:
            await self._api.request("DELETE", NODE.path(None, name))

    async def _report(self, name: str) -> None:
        now = stamp_seconds(datetime.now(UTC))
        ready = {"type": "Ready", "status": "True", "lastHeartbeatTime": now, "lastTransitionTime": now}
        room = {"cpu": "64", "memory": "256Gi", "pods": "110", self._resource: str(self._devices[name])}
        await self._api.request(
            "PATCH",
            NODE.path(None, name, subresource="status"),
            body={"status": {"conditions": [ready], "capacity": room, "allocatable": room}},
            content_type="application/strategic-merge-patch+json",
        )


@contextmanager
def running_scheduler(
    cluster: LocalCluster, folder: Path, *, program: Path | None = None, profile: dict[str, Any] | None = None
) -> Iterator[None]:
    """Run a scheduler: that of Kubernetes with its defaults, unless a program and a profile are named."""
    configuration = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "leaderElection": {"leaderElect": False},
        "clientConnection": {"kubeconfig": str(cluster.kubeconfig)},
        "profiles": [profile or DEFAULT_PROFILE],
    }
    file, log = folder / "scheduler.yaml", folder / "scheduler.log"
    file.write_text(yaml.safe_dump(configuration))
    command = [program or cluster.program("kube-scheduler"), "--config", file, "--secure-port", "0"]
    with log.open("w") as output, subprocess.Popen(command, stderr=output) as process:
        try:
            yield
            assert process.poll() is None, log.read_text()[-2000:]
        finally:
            process.terminate()
