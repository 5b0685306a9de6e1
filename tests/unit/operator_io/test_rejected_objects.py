"""Objects that the API server rejects with 500: the status names them, and everything else goes on."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from in_memory_cluster import MINIMAL, Cluster

from megatron_operator.cluster.api import KubeApiError
from megatron_operator.cluster.kinds import ObjectKind

from .operator_task import DirectLink, InMemoryApi, Watch, new_operator

MALFORMED = (
    "failed to create typed patch object (default/demo; apps/v1): "
    ".spec.template.spec.tolerations[0].tolerationSecond: field not declared in schema"
)
WEBHOOK = 'Internal error occurred: failed calling webhook "pods.example.com": connection refused'


class RejectingApi(InMemoryApi):
    """Answers applies and dry runs of objects with a podTemplate whose schedulerName is `bad` with 500."""

    said = MALFORMED

    async def apply(self, kind: ObjectKind, body: dict[str, Any], **options: Any) -> dict[str, Any]:
        template = body.get("spec", {}).get("template", {}) if kind.plural in ("deployments", "statefulsets") else {}
        if template.get("spec", {}).get("schedulerName") == "bad":
            raise KubeApiError(500, "InternalError", self.said)
        return await super().apply(kind, body, **options)


@pytest.mark.parametrize("component", ["engine", "server", "coordinator"])
@pytest.mark.parametrize(("said", "reason"), [(MALFORMED, "InvalidPodTemplate"), (WEBHOOK, "ChildRefused")])
async def test_a_template_answered_with_500_is_reported_and_blocks_no_verb(
    component: str, said: str, reason: str
) -> None:
    cluster = Cluster({**copy.deepcopy(MINIMAL), "replicas": 2}, security=False)
    api = RejectingApi(cluster)
    api.said = said
    watch = Watch(api)
    watch.show()
    task = new_operator(api, watch, DirectLink(cluster), term=1)

    async def until(state: str, *, pods: int) -> None:
        for _ in range(60):
            await task.run_once()
            cluster.tick()
            watch.show()
            if (cluster.status["state"], len(cluster.engine_pods())) == (state, pods):
                return
        raise AssertionError(f"never {state} with {pods} engine pods: {cluster.status}")

    await until("Running", pods=2)
    cluster.patch(**{component: {"podTemplate": {"spec": {"schedulerName": "bad"}}}})
    watch.show()
    for _ in range(5):
        await task.run_once()
        cluster.tick()
        watch.show()
    degraded = cluster.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", reason)
    assert said in degraded["message"]
    cluster.patch(desiredState="Paused")
    watch.show()
    await until("Paused", pods=2)
    cluster.patch(desiredState="Running", replicas=1)
    watch.show()
    await until("Running", pods=1)
