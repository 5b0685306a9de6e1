"""Writes: only the leader's, only onto what the resource owns; Events that count; keys that admit the operator."""

from __future__ import annotations

import asyncio
import base64
from dataclasses import replace
from typing import Any

import pytest

from megatron_operator.cluster.api import KubeApiError
from megatron_operator.cluster.keys import (
    KeyFormatError,
    admin_peer_keys,
    ensure_admin_keys,
    keys_view,
    new_resource_keys,
)
from megatron_operator.cluster.kinds import CHILD_KINDS, SERVICE, kind_of
from megatron_operator.cluster.lease import LeadershipLostError
from megatron_operator.cluster.projection import project_child, project_resource
from megatron_operator.cluster.writer import NotOwnedError, Recorder, Writer
from megatron_operator.decision.actions import EmitEvent
from megatron_operator.render.keys import KEY_NAMES
from megatron_operator.resource.names import FIELD_MANAGER

OWNER = {"apiVersion": "inference.megatron.dev/v1beta1", "kind": "MegatronInference", "name": "demo", "uid": "u"}


def manifest(**labels: str) -> dict[str, Any]:
    metadata = {"name": "demo", "namespace": "prod", "labels": labels, "ownerReferences": [OWNER]}
    return {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": {"ports": []}}


@pytest.fixture
def counted() -> list[tuple[str, str]]:
    return []


@pytest.fixture
def writer(store: Any, counted: list[tuple[str, str]]) -> Writer:
    return Writer(store, guard=lambda: None, count=lambda verb, kind: counted.append((verb, kind)))


async def test_absent_child_is_created_without_force_then_forced_onto_itself(store: Any, writer: Writer) -> None:
    seen = await writer.apply_child(manifest(), owner_uid="u", known=None)
    again = await writer.apply_child(manifest(a="b"), owner_uid="u", known=seen)

    assert store.forced == [False, True]
    assert again.uid == seen.uid


async def test_foreign_object_is_left_alone_and_named(store: Any, writer: Writer) -> None:
    foreign = manifest()
    foreign["metadata"].pop("ownerReferences")
    await store.create(SERVICE, foreign, manager="user")

    with pytest.raises(NotOwnedError, match="Service demo in namespace prod exists and is not owned"):
        await writer.apply_child(manifest(), owner_uid="u", known=None)
    assert store.writes == [("create", "Service")]


async def test_our_own_child_that_the_watch_has_not_shown_yet_is_written_onto(store: Any, writer: Writer) -> None:
    first = await writer.apply_child(manifest(), owner_uid="u", known=None)
    again = await writer.apply_child(manifest(a="b"), owner_uid="u", known=None)

    assert again.uid == first.uid
    assert store.objects["Service", "prod", "demo"]["metadata"]["labels"] == {"a": "b"}
    assert store.writes == [("apply", "Service")] * 2


async def test_a_child_of_a_re_created_resource_is_left_alone(store: Any, writer: Writer) -> None:
    seen = await writer.apply_child(manifest(), owner_uid="u", known=None)
    with pytest.raises(NotOwnedError):
        await writer.apply_child(manifest(), owner_uid="another", known=seen)


async def test_object_replaced_behind_our_back_is_a_conflict_not_an_overwrite(store: Any, writer: Writer) -> None:
    seen = await writer.apply_child(manifest(), owner_uid="u", known=None)
    await store.delete(SERVICE, "prod", "demo", uid=seen.uid)
    await store.create(SERVICE, manifest(), manager="user")

    with pytest.raises(KubeApiError) as rejected:
        await writer.apply_child(manifest(), owner_uid="u", known=seen)
    assert rejected.value.conflict


async def test_an_operator_that_does_not_lead_writes_nothing(store: Any) -> None:
    def lost() -> None:
        raise LeadershipLostError("not leading")

    writer = Writer(store, guard=lost, count=lambda verb, kind: None)
    resource = project_resource({"metadata": {"name": "demo", "namespace": "prod", "uid": "u", "resourceVersion": "1"}})
    with pytest.raises(LeadershipLostError):
        await writer.apply_child(manifest(), owner_uid="u", known=None)
    with pytest.raises(LeadershipLostError):
        await writer.apply_status(resource, {})
    with pytest.raises(LeadershipLostError):
        await writer.create(manifest())
    with pytest.raises(LeadershipLostError):
        await writer.delete_pod("p", namespace="prod", uid="1")
    with pytest.raises(LeadershipLostError):
        await writer.delete_child(project_child(manifest()).ref, namespace="prod", uid="1")
    assert store.writes == []


async def test_status_carries_the_version_and_uid_it_was_decided_from(store: Any, writer: Writer) -> None:
    raw = {"metadata": {"name": "demo", "namespace": "prod", "uid": "u", "resourceVersion": "7"}}
    with pytest.raises(KubeApiError):
        await writer.apply_status(project_resource(raw), {"state": "Paused"})
    store.objects["MegatronInference", "prod", "demo"] = raw
    written = await writer.apply_status(project_resource(raw), {"state": "Paused"})
    assert written.status == {"state": "Paused"}


async def test_equal_messages_are_one_event_with_a_count(store: Any) -> None:
    recorder = Recorder(store, instance="op-1")
    paused = EmitEvent("Normal", "Paused", "Running -> Paused: every rank confirmed")
    for event in (paused, paused, paused, EmitEvent("Normal", "Running", "Paused -> Running")):
        await recorder.emit(event, name="demo", namespace="prod", uid="u")

    events = [obj for key, obj in store.objects.items() if key[0] == "Event"]
    assert [(event["reason"], event.get("series", {}).get("count")) for event in events] == [
        ("Paused", 3),
        ("Running", None),
    ]
    assert events[0]["regarding"]["uid"] == "u"


async def test_long_event_is_cut_at_a_character_and_a_failed_one_is_no_error(store: Any) -> None:
    recorder = Recorder(store, instance="op-1")
    await recorder.emit(EmitEvent("Warning", "Long", "é" * 900), name="demo", namespace="prod", uid="u")
    (event,) = store.objects.values()
    assert event["note"] == "é" * 500

    store.reject = KubeApiError(403, "Forbidden", "no")
    await recorder.emit(EmitEvent("Warning", "Other", "x"), name="demo", namespace="prod", uid="u")


async def test_the_admin_key_is_created_once_and_accepted_by_every_resource(store: Any, writer: Writer) -> None:
    admin = await ensure_admin_keys(store, writer, namespace="system")
    assert await ensure_admin_keys(store, writer, namespace="system") == admin
    assert store.writes == [("create", "Secret")]

    files = new_resource_keys(admin)
    assert set(files) == set(KEY_NAMES)
    secret = keys_secret(files)
    peer = admin_peer_keys(secret, admin)
    assert (peer.own, peer.server_public.decode()) == (admin, files["server.pub"])


async def test_keys_that_reject_this_operator_are_named(store: Any, writer: Writer) -> None:
    admin = await ensure_admin_keys(store, writer, namespace="system")
    other = await ensure_admin_keys(store, writer, namespace="elsewhere")
    with pytest.raises(KeyFormatError, match="is not this operator's admin key yet"):
        admin_peer_keys(keys_secret(new_resource_keys(other)), admin)
    assert not keys_view(keys_secret(new_resource_keys(other)), admin).admin_admitted
    with pytest.raises(KeyFormatError, match=r"entry server\.pub is missing"):
        admin_peer_keys(keys_secret({"admin.pub": admin.public.decode()}), admin)


def keys_secret(files: dict[str, str]) -> dict[str, Any]:
    data = {name: base64.b64encode(text.encode()).decode() for name, text in files.items()}
    return {"metadata": {"name": "demo-keys"}, "data": data}


def test_paths_of_kinds() -> None:
    assert kind_of("apps/v1", "Deployment").path("prod", "demo", subresource="scale") == (
        "/apis/apps/v1/namespaces/prod/deployments/demo/scale"
    )
    assert SERVICE.path(None) == "/api/v1/services"
    assert "Secret" not in {kind.kind for kind in CHILD_KINDS}


def test_the_owner_of_the_replicas_is_read_from_the_managed_fields() -> None:
    def seen(manager: str, **fields: Any) -> bool:
        entry = {"manager": manager, "operation": "Apply", "fieldsV1": {"f:spec": fields}}
        obj = {**manifest(), "apiVersion": "apps/v1", "kind": "Deployment"}
        return project_child({**obj, "metadata": {**obj["metadata"], "managedFields": [entry]}}).owns_replicas

    assert seen(FIELD_MANAGER, **{"f:replicas": {}})
    assert not seen(FIELD_MANAGER, **{"f:template": {}})
    assert not seen("kube-controller-manager", **{"f:replicas": {}})


async def test_replicas_that_are_no_longer_applied_get_another_owner_first(store: Any, writer: Writer) -> None:
    deployment = {**manifest(), "apiVersion": "apps/v1", "kind": "Deployment"}
    seen = await writer.apply_child({**deployment, "spec": {"replicas": 3}}, owner_uid="u", known=None)
    applied: list[tuple[str, Any]] = []
    apply = store.apply

    async def recorded(kind: Any, body: Any, *, manager: str, **options: Any) -> Any:
        applied.append((manager, body["spec"]))
        return await apply(kind, body, manager=manager, **options)

    store.apply = recorded
    await writer.apply_child({**deployment, "spec": {"paused": False}}, owner_uid="u", known=seen)
    assert applied == [(FIELD_MANAGER, {"paused": False})]
    applied.clear()
    owner = replace(seen, owns_replicas=True, version=store.version)
    await writer.apply_child({**deployment, "spec": {"paused": False}}, owner_uid="u", known=owner)
    assert applied == [(f"{FIELD_MANAGER}-replicas", {"replicas": 3}), (FIELD_MANAGER, {"paused": False})]
    store.version += 1
    with pytest.raises(KubeApiError, match="modified"):  # an autoscaler was faster
        await writer.apply_child({**deployment, "spec": {}}, owner_uid="u", known=owner)


async def test_a_write_without_an_answer_is_cancelled_when_the_lease_may_expire(store: Any) -> None:
    cancelled = asyncio.Event()

    async def unanswered(*arguments: Any, **options: Any) -> Any:
        try:
            await asyncio.Event().wait()
        finally:
            cancelled.set()

    store.apply = store.delete = unanswered
    writer = Writer(store, guard=lambda: 0.01, count=lambda verb, kind: None)
    with pytest.raises(KubeApiError, match="Timeout: write of a Service: no answer"):
        await writer.apply_child(manifest(), owner_uid="u", known=None)
    assert cancelled.is_set()
    with pytest.raises(KubeApiError, match="Timeout"):
        await writer.delete_pod("demo-engine-0-0", namespace="prod", uid="u")
