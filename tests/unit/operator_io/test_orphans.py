"""Children that a resource of the same name left behind, or that a backup restored, are adopted; keys by a command."""

from __future__ import annotations

import copy
import json
import re
from typing import Any

import pytest
from in_memory_cluster import MINIMAL, OWNER_UID, Cluster

from megatron_operator.cluster.projection import project_child
from megatron_operator.cluster.writer import NotOwnedError, Writer
from megatron_operator.decision.actions import ApplyChild, DeleteChild
from megatron_operator.decision.decide import decide
from megatron_operator.decision.world import ChildRef
from megatron_operator.resource.names import FIELD_MANAGER, LABEL_MANAGED_BY

from .operator_task import DirectLink, InMemoryApi, Watch, new_operator


def orphan(cluster: Cluster, ref: ChildRef) -> None:
    cluster.objects[ref]["metadata"].pop("ownerReferences")


def owners(cluster: Cluster) -> dict[ChildRef, str]:
    return {ref: obj["metadata"]["ownerReferences"][0]["uid"] for ref, obj in cluster.objects.items()}


async def test_children_without_an_owner_are_adopted_and_not_replaced() -> None:
    cluster = Cluster(copy.deepcopy(MINIMAL), security=False).settled()
    uids = {ref: obj["metadata"]["uid"] for ref, obj in cluster.objects.items()}
    pods = dict.fromkeys(cluster.pods)
    for ref in cluster.objects:
        orphan(cluster, ref)
    api = InMemoryApi(cluster)
    watch = Watch(api)
    operator = new_operator(api, watch, DirectLink(cluster), term=2)
    for _ in range(6):
        watch.show()
        await operator.run_once()
    assert set(owners(cluster).values()) == {OWNER_UID}
    assert {ref: obj["metadata"]["uid"] for ref, obj in cluster.objects.items()} == uids
    assert dict.fromkeys(cluster.pods) == pods
    assert cluster.deleted_pods == []


def test_keys_of_another_operator_are_used_only_after_the_command_of_the_message() -> None:
    """Who makes a Secret could otherwise pose as the coordinator."""
    cluster = Cluster(copy.deepcopy(MINIMAL)).settled()
    orphan(cluster, cluster.secret)
    decision = decide(cluster.world())
    assert decision.reason == "ChildNotOwned"
    assert not any(isinstance(action, ApplyChild | DeleteChild) for action in decision.actions)
    assert decision.requeue_after is not None
    patch = re.search(r"kubectl patch secret demo-keys -n default --type merge -p '(.*)'", decision.message)
    assert patch is not None
    cluster.objects[cluster.secret]["metadata"] |= json.loads(patch[1])["metadata"]
    assert decide(cluster.world()).reason == "Serving"


@pytest.mark.parametrize(
    ("labels", "reference"),
    [
        ({}, None),
        ({LABEL_MANAGED_BY: "Helm"}, None),
        ({LABEL_MANAGED_BY: FIELD_MANAGER}, "x"),
    ],
)
async def test_an_object_of_another_program_or_owner_is_not_adopted(
    labels: dict[str, str], reference: str | None
) -> None:
    metadata: dict[str, Any] = {"name": "demo", "namespace": "default", "uid": "s", "labels": labels}
    if reference:
        metadata["ownerReferences"] = [{"kind": "Deployment", "apiVersion": "apps/v1", "uid": reference}]
    known = project_child({"apiVersion": "v1", "kind": "Service", "metadata": metadata})
    writer = Writer(None, guard=lambda: None, count=lambda verb, kind: None)  # type: ignore[arg-type]
    manifest = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "demo", "namespace": "default"}}
    with pytest.raises(NotOwnedError):
        await writer.apply_child(manifest, owner_uid=OWNER_UID, known=known)
