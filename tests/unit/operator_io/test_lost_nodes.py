"""The operator reads a node only for a pod whose deletion is overdue, and deletes none by force without that read."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from in_memory_cluster import MINIMAL, Cluster

from megatron_operator.cluster.kinds import NODE, ObjectKind

from .operator_task import DirectLink, InMemoryApi, Watch, new_operator

POD = "demo-engine-0-0"


class CountingApi(InMemoryApi):
    """Counts the reads of nodes."""

    reads = 0

    async def get(self, kind: ObjectKind, namespace: str | None, name: str) -> dict[str, Any] | None:
        self.reads += kind is NODE
        return await super().get(kind, namespace, name)


class Run:
    """A resource with two engines that serve, and its operator."""

    def __init__(self) -> None:
        self.cluster = Cluster({**copy.deepcopy(MINIMAL), "replicas": 2}, security=False)
        self.api = CountingApi(self.cluster)
        self._watch = Watch(self.api)
        self._watch.show()
        self._task = new_operator(self.api, self._watch, DirectLink(self.cluster), term=1)

    async def passes(self, count: int) -> None:
        for _ in range(count):
            await self._task.run_once()
            self.cluster.tick()
            self._watch.show()


@pytest.fixture
async def run() -> Run:
    made = Run()
    await made.passes(20)
    assert made.cluster.status["ready"] == "2/2"
    assert made.api.reads == 0
    return made


async def test_a_pod_on_a_lost_node_is_replaced(run: Run) -> None:
    uid = run.cluster.pods[POD]["metadata"]["uid"]
    run.cluster.lose_node("demo-engine-0")
    await run.passes(10)
    assert run.cluster.pods[POD]["metadata"]["uid"] != uid
    assert run.cluster.status["ready"] == "2/2"
    reads = run.api.reads
    await run.passes(5)
    assert run.api.reads == reads


@pytest.mark.parametrize("readable", [True, False], ids=["ready", "not readable"])
async def test_a_pod_stays_while_its_node_is_ready_or_cannot_be_read(run: Run, readable: bool) -> None:
    uid = run.cluster.pods[POD]["metadata"]["uid"]
    run.cluster.lose_node("demo-engine-0", ready="True" if readable else "Unknown")
    if not readable:
        run.api.unreadable_nodes.add("node-of-demo-engine-0")
    await run.passes(10)
    assert run.cluster.pods[POD]["metadata"]["uid"] == uid
    assert run.api.reads == 1, "it is read again after some seconds only"
