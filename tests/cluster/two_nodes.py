"""Two fake nodes: pods are bound to them, kubelets restart what crashes, and one of the nodes can be lost."""

from __future__ import annotations

import contextlib
import signal
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from megatron_operator.cluster.api import KubeApiError
from megatron_operator.cluster.kinds import NODE, POD
from megatron_operator.resource.names import CHECK, COORDINATOR, ENGINE, LABEL_COMPONENT, SERVER
from megatron_operator.resource.text import stamp_seconds

from .fake_kubelet import PodState, label_of, uid_of
from .fake_node import Container, FakeNode, _end

HEARTBEAT_SECONDS = 3.0
"""Without heartbeats Kubernetes sets the condition Ready to Unknown."""


class TwoNodes(FakeNode):
    """Plays a scheduler and the kubelets of two nodes.

    frozen: containers whose processes a test has stopped.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.nodes = tuple(f"node-{letter}-{self._namespace}" for letter in "ab")
        self.lost: set[str] = set()
        self.frozen: set[str] = set()
        self._restarts: Counter[str] = Counter()
        self._reported_at = 0.0

    async def create(self) -> None:
        for name in self.nodes:
            await self._api.request("POST", NODE.path(None), body={"metadata": {"name": name}})
            await self.report(name, "True")

    async def stop(self) -> None:
        try:
            await super().stop()
        finally:
            for name in self.nodes:
                with contextlib.suppress(KubeApiError):
                    await self._api.request("DELETE", NODE.path(None, name))

    async def report(self, name: str, ready: str) -> None:
        """Write the condition Ready of a node, which is also its heartbeat."""
        now = stamp_seconds(datetime.now(UTC))
        condition = {"type": "Ready", "status": ready, "lastTransitionTime": now, "lastHeartbeatTime": now}
        await self._api.request(
            "PATCH",
            NODE.path(None, name, subresource="status"),
            body={"status": {"conditions": [condition]}},
            content_type="application/strategic-merge-patch+json",
        )

    async def lose(self, name: str) -> None:
        """Cut the power of a node: its processes are killed, and its pods are evicted."""
        self.lost.add(name)
        pods = [pod for pod in self._pods.values() if pod["spec"].get("nodeName") == name]
        for pod in pods:
            container = self.containers.get(uid_of(pod))
            if container is not None and container.process is not None:
                container.process.kill()
        await self.report(name, "Unknown")
        for pod in pods:
            with contextlib.suppress(KubeApiError):
                await self._api.request("DELETE", POD.path(self._namespace, pod["metadata"]["name"]))

    async def restore(self, name: str) -> None:
        """Start the node again: its kubelet finishes the deletion of its pods."""
        self.lost.discard(name)
        await self.report(name, "True")

    def serves(self, container: Container) -> bool:
        """Return whether the process of a container runs and is not stopped."""
        process = container.process
        return process is not None and process.poll() is None and uid_of(container.pod) not in self.frozen

    def serving(self, component: str) -> list[str]:
        """Return the engines (or the instances) whose container of this component can answer."""
        found = [container for container in self.containers.values() if container.component == component]
        return [container.engine or container.instance for container in found if self.serves(container)]

    def one(self, component: str, number: int = 0) -> Container:
        """Return a container of a component that runs."""
        found = [container for container in self.containers.values() if container.component == component]
        return sorted((entry for entry in found if self.serves(entry)), key=lambda entry: entry.engine)[number]

    def freeze(self, container: Container) -> None:
        assert container.process is not None
        self.frozen.add(uid_of(container.pod))
        container.process.send_signal(signal.SIGSTOP)

    def thaw(self, container: Container) -> None:
        assert container.process is not None
        container.process.send_signal(signal.SIGCONT)
        self.frozen.discard(uid_of(container.pod))

    async def run_pods(self, pods: Mapping[str, Mapping[str, Any]]) -> None:
        if time.monotonic() > self._reported_at + HEARTBEAT_SECONDS:
            self._reported_at = time.monotonic()
            for name in (name for name in self.nodes if name not in self.lost):
                await self.report(name, "True")
        for uid, pod in pods.items():
            name, on = pod["metadata"]["name"], pod["spec"].get("nodeName")
            if on in self.lost:
                continue
            with contextlib.suppress(KubeApiError):
                if on is None:
                    await self._bind(pod)
                elif pod["metadata"].get("deletionTimestamp"):
                    if uid in self.containers:
                        _end(self.containers[uid], signal.SIGTERM)
                    options = {"gracePeriodSeconds": 0, "preconditions": {"uid": uid}}
                    await self._api.request("DELETE", POD.path(self._namespace, name), body=options)
                elif uid in self.containers:
                    self._restart(self.containers[uid])
        await super().run_pods(pods)

    async def _bind(self, pod: Mapping[str, Any]) -> None:
        """Choose a node that is not lost: engine N runs on node N modulo two, a server on the one with fewer servers,
        everything else on the last one."""
        name, component = pod["metadata"]["name"], label_of(pod, LABEL_COMPONENT)
        servers = Counter(
            entry["spec"].get("nodeName") for entry in self._pods.values() if label_of(entry, LABEL_COMPONENT) == SERVER
        )
        wanted = 1
        if component == ENGINE:
            wanted = int(name.split("-")[-2]) % 2
        elif component == SERVER:
            wanted = int(servers[self.nodes[1]] < servers[self.nodes[0]])
        alive = [node for node in self.nodes if node not in self.lost]
        chosen = self.nodes[wanted] if self.nodes[wanted] in alive else alive[0]
        target = {"apiVersion": "v1", "kind": "Node", "name": chosen}
        binding = {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target}
        await self._api.request("POST", POD.path(self._namespace, name, subresource="binding"), body=binding)

    def _restart(self, container: Container) -> None:
        """Start a crashed container again, as a kubelet does."""
        process = container.process
        if container.component == CHECK or process is None or process.poll() is None:
            return
        self._restarts[uid_of(container.pod)] += 1
        container.ready = False
        container.process = self._spawn(container.pod["metadata"]["name"], container.command)

    async def _start(self, pod: Mapping[str, Any]) -> Container | None:
        if pod["metadata"].get("deletionTimestamp") or pod["spec"].get("nodeName") is None:
            return None
        return await super()._start(pod)

    def _may_start(self, pod: Mapping[str, Any]) -> bool:
        if label_of(pod, LABEL_COMPONENT) == COORDINATOR:
            # The process on a lost node is dead, and its pod is not deleted yet.
            return not [
                entry
                for entry in self.containers.values()
                if entry.component == COORDINATOR and entry.pod["spec"].get("nodeName") not in self.lost
            ]
        return super()._may_start(pod)

    async def state(self, pod: Mapping[str, Any]) -> PodState | None:
        if pod["spec"].get("nodeName") in self.lost:
            return None
        found = await super().state(pod)
        return replace(found, restarts=self._restarts[uid_of(pod)]) if found is not None else None
