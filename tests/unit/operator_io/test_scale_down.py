"""Many engines that were asked for by mistake: their removal does not wait for one request after another."""

from __future__ import annotations

import asyncio
import copy

from eventually import LONG_SECONDS
from in_memory_cluster import MINIMAL, Cluster

from megatron_operator.cluster.kinds import ObjectKind

from .operator_task import DirectLink, InMemoryApi, Watch, new_operator


class SlowDeletions(InMemoryApi):
    """A deletion ends when another one has begun, or is the last."""

    def __init__(self, cluster: Cluster, expected: int) -> None:
        super().__init__(cluster)
        self._expected = expected
        self._begun = asyncio.Condition()
        self.deletions = 0

    async def delete(self, kind: ObjectKind, namespace: str, name: str, *, uid: str) -> None:
        async with self._begun:
            self.deletions += 1
            mine = self.deletions
            self._begun.notify_all()
            await self._begun.wait_for(lambda: self.deletions > mine or mine == self._expected)
        await super().delete(kind, namespace, name, uid=uid)


async def test_engines_that_never_served_are_removed_in_one_pass_with_concurrent_requests() -> None:
    cluster = Cluster({**copy.deepcopy(MINIMAL), "replicas": 2}, security=False)
    api = SlowDeletions(cluster, expected=3 * 18)
    watch = Watch(api)
    watch.show()
    task = new_operator(api, watch, DirectLink(cluster), term=1)

    async def passes(count: int) -> None:
        for _ in range(count):
            async with asyncio.timeout(LONG_SECONDS):
                await task.run_once()
            cluster.tick()
            watch.show()

    await passes(8)
    assert cluster.status["ready"] == "2/2"
    cluster.broken_engines |= {f"demo-engine-{index}" for index in range(2, 20)}
    cluster.patch(replicas=20)
    watch.show()
    await passes(2)
    assert len(cluster.engine_pods()) == 20
    cluster.patch(replicas=2)
    watch.show()
    await passes(1)
    assert api.deletions == 3 * 18
    names = sorted(ref.name for ref in cluster.objects if ref.kind == "StatefulSet")
    assert names == ["demo-engine-0", "demo-engine-1"]
