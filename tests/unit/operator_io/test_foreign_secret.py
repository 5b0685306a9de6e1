"""A Secret with the name of a resource's keys is used only if the resource owns it, or if this operator made it."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import dataclass
from typing import Any

import pytest
from in_memory_cluster import MINIMAL, OWNER_UID, Cluster

from megatron_operator.cluster.cache import Index, ResourceCache
from megatron_operator.cluster.keys import is_sealed, new_resource_keys
from megatron_operator.cluster.projection import project_resource
from megatron_operator.cluster.writer import Recorder, Writer
from megatron_operator.controller.act import Actor
from megatron_operator.controller.observe import Observer, ObserverSettings
from megatron_operator.decision.actions import AdoptKeys, CreateKeys, Decision, RotateKeys
from megatron_operator.decision.coordinator_snapshot import CoordinatorSnapshot
from megatron_operator.decision.decide import decide
from megatron_operator.decision.world import ChildRef
from megatron_operator.render.context import RenderContext
from megatron_operator.render.keys import ANNOTATION_GENERATION, ANNOTATION_SEAL, ANNOTATION_STAGE, keys_secret
from megatron_operator.resource.spec import parse_spec
from megatron_operator.resource.states import KeyStage

from .operator_task import DirectLink, Leader

SECRET = ("Secret", "default", "demo-keys")
REF = ChildRef("Secret", "demo-keys")


@dataclass
class Site:
    """The reads and writes of one resource's task, on the store."""

    store: Any
    cluster: Cluster
    observer: Observer
    actor: Actor
    resource: Any

    async def decision(self) -> Decision:
        world = await self.observer.world(self.resource, term=1, rejections=self.actor.rejections, vetted={})
        assert not world.coordinator.reachable
        return decide(world)

    def put_foreign(self, owner_uid: str | None) -> dict[str, Any]:
        """Its entries are keys that admit this operator, chosen to pose as its coordinator."""
        ctx = RenderContext("demo", "default", owner_uid or "", parse_spec(MINIMAL), self.cluster.settings)
        secret = keys_secret(ctx, new_resource_keys(self.cluster.admin), generation=1, since="2026-01-01T00:00:00Z")
        secret["metadata"] |= {"uid": "theirs", "resourceVersion": "7"}
        if owner_uid is None:
            del secret["metadata"]["ownerReferences"]
        self.store.objects[SECRET] = secret
        return copy.deepcopy(secret)


@pytest.fixture
def site(store: Any) -> Site:
    cluster = Cluster(MINIMAL)
    metadata = {"name": "demo", "namespace": "default", "uid": OWNER_UID, "resourceVersion": "7"}
    resource = project_resource({"metadata": metadata, "spec": MINIMAL})
    cache = ResourceCache(
        uid=OWNER_UID,
        key=("default", "demo"),
        index=Index(children={}, pods={}, resources={OWNER_UID: [resource]}),
    )
    link: Any = DirectLink(cluster)
    elector: Any = Leader(1)
    options = ObserverSettings(
        settings=cluster.settings,
        admin=cluster.admin,
        resolve=lambda *_: "inproc://",
        resync_seconds=1e9,
        audits=asyncio.Semaphore(1),
    )
    observer = Observer(store, cache, link, options=options)
    actor = Actor(
        cache=cache,
        writer=Writer(store, guard=lambda: None, count=lambda verb, kind: None),
        observer=observer,
        recorder=Recorder(store, instance="test"),
        link=link,
        elector=elector,
        settings=cluster.settings,
        admin=cluster.admin,
        count_signal=lambda kind: None,
    )
    return Site(store, cluster, observer, actor, resource)


@pytest.mark.parametrize("owner_uid", [None, "of-another-resource"])
async def test_keys_of_another_owner_are_neither_adopted_nor_overwritten(site: Site, owner_uid: str | None) -> None:
    first = await site.decision()
    (create,) = (action for action in first.actions if isinstance(action, CreateKeys))
    foreign = site.put_foreign(owner_uid)  # between the read and the write
    await site.actor.act([create], site.resource)
    rejection = site.actor.rejections[REF]
    assert rejection.code == 409
    assert "not owned by this resource" in rejection.message
    for _ in range(2):
        decision = await site.decision()
        assert decision.reason == "ChildNotOwned"
        assert "Secret demo-keys" in decision.message
        assert not any(isinstance(action, CreateKeys | RotateKeys) for action in decision.actions)
    await site.actor.act([create, RotateKeys("demo-keys", 2, KeyStage.ADMITTING)], site.resource)
    await site.actor.act([RotateKeys("demo-keys", 2, KeyStage.ADMITTING)], site.resource)
    world = await site.observer.world(site.resource, term=1, rejections={}, vetted={})
    assert world.keys is None
    assert site.store.objects == {SECRET: foreign}
    assert site.store.writes == []


async def test_keys_of_this_resource_are_created_and_used(site: Site) -> None:
    decision = await site.decision()
    create = [action for action in decision.actions if isinstance(action, CreateKeys)]
    await site.actor.act(create, site.resource)
    world = await site.observer.world(site.resource, term=1, rejections={}, vetted={})
    assert world.keys is not None
    assert world.keys.admin_admitted
    assert site.store.writes == [("create", "Secret")]


@pytest.mark.parametrize(
    "damage",
    [
        {"data": {}},
        {"data": {"server.pub": "bm8ga2V5"}},
        {"metadata": {"annotations": {ANNOTATION_STAGE: "x"}}},
        {"metadata": {"annotations": {ANNOTATION_GENERATION: "x"}}},
    ],
    ids=["empty", "no key", "stage", "generation"],
)
async def test_keys_that_cannot_be_read_any_more_are_replaced(site: Site, damage: dict[str, Any]) -> None:
    await site.actor.act([CreateKeys("demo-keys")], site.resource)
    secret = site.store.objects[SECRET]
    secret["data"] = secret["data"] | damage["data"] if damage.get("data") else damage.get("data", secret["data"])
    secret["metadata"]["annotations"] |= damage.get("metadata", {}).get("annotations", {})
    before = copy.deepcopy(secret)
    await site.observer.reread_keys(site.resource)
    decision = await site.decision()
    (repair,) = (action for action in decision.actions if isinstance(action, CreateKeys))
    await site.actor.act([repair], site.resource)
    world = await site.observer.world(site.resource, term=1, rejections={}, vetted={})
    assert world.keys is not None
    assert world.keys.stage is KeyStage.SETTLED
    assert is_sealed(site.store.objects[SECRET], site.cluster.admin)
    assert site.store.objects[SECRET]["data"] != before["data"]


async def test_keys_that_this_operator_made_are_adopted_from_an_earlier_resource(site: Site) -> None:
    create = CreateKeys("demo-keys")
    await site.actor.act([create], site.resource)
    made = copy.deepcopy(site.store.objects[SECRET])
    del site.store.objects[SECRET]["metadata"]["ownerReferences"]
    await site.observer.reread_keys(site.resource)
    decision = await site.decision()
    assert decision.reason != "ChildNotOwned"
    (adopt,) = (action for action in decision.actions if isinstance(action, AdoptKeys))
    await site.actor.act([adopt], site.resource)
    assert site.store.objects[SECRET]["metadata"]["ownerReferences"] == made["metadata"]["ownerReferences"]
    assert site.store.objects[SECRET]["data"] == made["data"]
    decision = await site.decision()
    assert not any(isinstance(action, CreateKeys | AdoptKeys | RotateKeys) for action in decision.actions)


@pytest.mark.parametrize("change", ["data", "name", "namespace", "seal", "admin"])
def test_a_seal_holds_for_the_data_and_name_that_the_operator_wrote(change: str) -> None:
    cluster = Cluster(MINIMAL).settled()
    secret, admin = copy.deepcopy(cluster.objects[cluster.secret]), cluster.admin
    assert is_sealed(secret, admin)
    match change:
        case "data":
            secret["data"]["server.pub"] = secret["data"]["client.pub"]
        case "seal":
            del secret["metadata"]["annotations"][ANNOTATION_SEAL]
        case "admin":
            admin = Cluster(MINIMAL).admin
        case _:
            secret["metadata"][change] = "other"
    assert not is_sealed(secret, admin)


async def test_the_time_without_a_coordinator_counts_while_its_keys_are_missing(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(DirectLink, "snapshot", CoordinatorSnapshot(unknown_seconds=7.0))
    world = await site.observer.world(site.resource, term=1, rejections={}, vetted={})
    assert world.coordinator == CoordinatorSnapshot(error="its keys do not exist yet", unknown_seconds=7.0)
