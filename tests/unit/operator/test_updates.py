"""An upgrade of the operator: resources keep their release until they are updated, some at a time."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from in_memory_cluster import MINIMAL, Cluster

from megatron_operator.controller.task import UpdateLimit
from megatron_operator.decision.world import ChildRef
from megatron_operator.render import coordinator, engine, server
from megatron_operator.resource.release import Release, is_older
from megatron_operator.resource.settings import DEFAULT_COORDINATOR_IMAGE, IMAGE_REGISTRY

NEW_COORDINATOR_IMAGE = f"{IMAGE_REGISTRY}/megatron-operator:2"
NEW = {"runtime_image": "runtime:2", "coordinator_image": NEW_COORDINATOR_IMAGE, "version": "2.0.0"}


def upgraded(cluster: Cluster, **fields: Any) -> None:
    cluster.settings = replace(cluster.settings, **{**NEW, **fields})


@pytest.fixture
def other_rendering(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """An operator that renders the pods of every component with another argument."""

    def change() -> None:
        for module, name in ((coordinator, "coordinator_args"), (server, "server_args"), (engine, "engine_args")):
            before = getattr(module, name)
            monkeypatch.setattr(module, name, lambda *given, before=before: [*before(*given), "--new-flag"])

    return change


def images(cluster: Cluster) -> dict[str, str]:
    return {
        ref.name: obj["spec"]["template"]["spec"]["containers"][0]["image"]
        for ref, obj in cluster.objects.items()
        if ref.kind in ("Deployment", "StatefulSet")
    }


def arguments(cluster: Cluster, kind: str, name: str) -> list[str]:
    template = cluster.objects[ChildRef(kind, name, "apps/v1")]["spec"]["template"]
    found: list[str] = template["spec"]["containers"][0]["args"]
    return found


def test_an_upgrade_of_the_operator_restarts_nothing_and_offers_an_update(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2).settled()
    assert cluster.condition("UpdateAvailable")["status"] == "False"
    before, pods = images(cluster), set(cluster.pods)
    upgraded(cluster)
    cluster.settle()
    assert (images(cluster), cluster.deleted_pods, set(cluster.pods)) == (before, [], pods)
    found = cluster.condition("UpdateAvailable")
    assert (found["status"], found["reason"]) == ("True", "UpdateAvailable")
    assert "runtime image: runtime:1 -> runtime:2" in found["message"]
    assert "kubectl megatron update demo" in found["message"]
    assert cluster.status["release"]["runtimeImage"] == "runtime:1"
    assert [event.reason for event in cluster.events].count("UpdateAvailable") == 1


@pytest.mark.parametrize("ask", ["annotation", "autoUpdate"])
def test_an_update_replaces_every_component(make_cluster: Any, ask: str) -> None:
    cluster = make_cluster(replicas=2).settled()
    upgraded(cluster)
    cluster.settle()
    if ask == "annotation":
        cluster.update_to = cluster.status["update"]["id"]
    else:
        cluster.patch(rollout={"autoUpdate": True})
    cluster.step()
    assert cluster.status["update"]["phase"] == "Running"
    cluster.settle()
    assert images(cluster) == {
        "demo-coordinator": NEW_COORDINATOR_IMAGE,
        "demo-server": "runtime:2",
        "demo-engine-0": "runtime:2",
        "demo-engine-1": "runtime:2",
    }
    assert cluster.signals() == ["DRAIN demo-engine-1", "DRAIN demo-engine-0"]
    assert "update" not in cluster.status
    assert cluster.status["release"]["version"] == "2.0.0"
    assert cluster.condition("UpdateAvailable")["reason"] == "UpToDate"


def test_a_request_is_for_the_release_that_it_names_only(make_cluster: Any) -> None:
    cluster = make_cluster().settled()
    upgraded(cluster)
    cluster.settle()
    asked = cluster.status["update"]["id"]
    upgraded(cluster, version="3.0.0", runtime_image="runtime:3")
    cluster.update_to = asked
    cluster.settle()
    assert cluster.status["release"]["runtimeImage"] == "runtime:1"
    assert cluster.status["update"]["phase"] == "Available"


def test_components_that_the_operator_renders_differently_wait_for_the_update(
    make_cluster: Any, other_rendering: Callable[[], None]
) -> None:
    cluster = make_cluster(replicas=2).settled()
    before = copy.deepcopy({ref: obj for ref, obj in cluster.objects.items() if ref.kind != "ControllerRevision"})
    other_rendering()
    upgraded(cluster)
    cluster.settle()
    assert {ref: obj for ref, obj in cluster.objects.items() if ref.kind != "ControllerRevision"} == before
    assert cluster.status["ready"] == "2/2"
    assert cluster.status["updatedReplicas"] == 2
    cluster.unverified = set(cluster.objects)  # another operator process
    cluster.settle()
    assert cluster.deleted_pods == []
    assert "--new-flag" not in arguments(cluster, "Deployment", "demo-coordinator")
    cluster.update_to = cluster.status["update"]["id"]
    cluster.settle()
    assert "--new-flag" in arguments(cluster, "Deployment", "demo-coordinator")
    assert "--new-flag" in arguments(cluster, "Deployment", "demo-server")
    assert all("--new-flag" in arguments(cluster, "StatefulSet", f"demo-engine-{index}") for index in (0, 1))


def test_verbs_scaling_and_changes_of_the_spec_go_on_before_the_update(
    make_cluster: Any, other_rendering: Callable[[], None]
) -> None:
    cluster = make_cluster(replicas=2).settled()
    other_rendering()
    upgraded(cluster)
    for change in ({"desiredState": "Paused"}, {"desiredState": "Running"}, {"replicas": 3}):
        cluster.change(**change)
    assert cluster.deleted_pods == []
    assert cluster.status["ready"] == "3/3"
    cluster.change(coordinator={"routing": {"policy": "RoundRobin"}})
    assert "RoundRobin" in arguments(cluster, "Deployment", "demo-coordinator")
    assert "--new-flag" not in arguments(cluster, "Deployment", "demo-server")
    assert cluster.deleted_pods == []
    cluster.change(engine={"batching": {"maxRequests": 7}})
    assert sorted(cluster.deleted_pods) == ["demo-engine-0-0", "demo-engine-1-0", "demo-engine-2-0"]
    assert set(images(cluster).values()) == {"runtime:1", DEFAULT_COORDINATOR_IMAGE}
    cluster.change(desiredState="Stopped")
    cluster.change(desiredState="Running")
    assert set(images(cluster).values()) == {"runtime:1", DEFAULT_COORDINATOR_IMAGE}


def test_the_release_is_read_from_the_children_if_the_status_is_lost(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2).settled()
    upgraded(cluster)
    cluster.status = {}
    cluster.settle()
    assert cluster.status["release"]["runtimeImage"] == "runtime:1"
    assert cluster.deleted_pods == []


def test_a_resource_that_is_created_again_is_new(make_cluster: Any) -> None:
    cluster = make_cluster().settled()
    upgraded(cluster)
    cluster.status, cluster.objects, cluster.pods, cluster.coordinator = {}, {}, {}, None
    cluster.settle()
    assert cluster.status["release"]["runtimeImage"] == "runtime:2"
    assert cluster.condition("UpdateAvailable")["status"] == "False"


def test_an_update_waits_for_a_place(make_cluster: Any) -> None:
    cluster = make_cluster(rollout={"autoUpdate": True}).settled()
    upgraded(cluster)
    cluster.may_update = False
    cluster.settle()
    assert cluster.status["update"]["phase"] == "Waiting"
    assert "updates of other resources" in cluster.condition("UpdateAvailable")["message"]
    assert cluster.status["release"]["runtimeImage"] == "runtime:1"
    cluster.may_update = True
    cluster.settle()
    assert cluster.status["release"]["runtimeImage"] == "runtime:2"


@pytest.mark.parametrize("quiet", [{"desiredState": "Paused"}, {"rollout": {"autoUpdate": True, "paused": True}}])
def test_an_update_waits_while_nothing_may_be_replaced(make_cluster: Any, quiet: dict[str, Any]) -> None:
    cluster = make_cluster(rollout={"autoUpdate": True}).settled()
    cluster.change(**quiet)
    upgraded(cluster)
    cluster.settle()
    assert cluster.status["update"]["phase"] == "Waiting"
    assert cluster.status["release"]["runtimeImage"] == "runtime:1"
    cluster.change(desiredState="Running", rollout={"autoUpdate": True, "paused": False})
    assert cluster.status["release"]["runtimeImage"] == "runtime:2"
    assert set(images(cluster).values()) == {"runtime:2", NEW_COORDINATOR_IMAGE}


def test_a_stopped_resource_is_updated_without_engines(make_cluster: Any) -> None:
    cluster = make_cluster(rollout={"autoUpdate": True}).settled()
    cluster.change(desiredState="Stopped")
    upgraded(cluster)
    cluster.settle()
    assert "update" not in cluster.status
    assert images(cluster)["demo-coordinator"] == NEW_COORDINATOR_IMAGE


def test_an_update_to_engines_that_fail_keeps_its_place(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2, rollout={"autoUpdate": True}).settled()
    upgraded(cluster)
    cluster.broken_engines.add("demo-engine-1")
    cluster.settle()
    assert cluster.status["update"]["phase"] == "Running"
    assert cluster.status["ready"] == "1/2"


def test_releases_with_a_known_vulnerability_get_a_security_update(make_cluster: Any) -> None:
    cluster = make_cluster().settled()
    upgraded(cluster, oldest_secure_version="0.1.1")
    cluster.settle()
    found = cluster.condition("UpdateAvailable")
    assert found["reason"] == "SecurityUpdateAvailable"
    assert "0.1.1" in found["message"]
    assert [event.type for event in cluster.events if event.reason == "SecurityUpdateAvailable"] == ["Warning"]


@pytest.mark.parametrize(
    ("version", "than", "older"),
    [
        ("0.1.0", "0.1.1", True),
        ("0.2.0", "0.1.9", False),
        ("0.10.0", "0.9.0", False),
        ("1.0.0", "1.0.0", False),
        ("v1.2.3-rc.1", "1.2.4", True),
        ("unknown", "0.0.1", True),
    ],
)
def test_versions_are_compared_by_number(version: str, than: str, older: bool) -> None:
    assert is_older(version, than) is older


def test_a_status_cannot_name_an_image_that_the_installation_does_not_allow(make_cluster: Any) -> None:
    cluster = make_cluster().settled()
    cluster.status["release"]["runtimeImage"] = "evil.example/runtime:1"
    cluster.settle()
    assert "evil.example" not in " ".join(images(cluster).values())
    found = cluster.condition("Degraded")
    assert found["reason"] == "NotAllowed"
    assert "status.release.runtimeImage" in found["message"]
    cluster.update_to = cluster.status["update"]["id"]
    cluster.settle()
    assert cluster.condition("Degraded")["status"] == "False"


def test_fields_of_a_later_operator_do_not_hide_a_recorded_release() -> None:
    stored = {"version": "9", "coordinatorImage": "c", "runtimeImage": "r", "imagePullPolicy": "Always", "later": 1}
    found = Release.from_status(stored)
    assert found is not None
    assert found.runtime_image == "r"
    assert Release.from_annotation("no json") is None
    assert Release.from_status({"version": "9"}) is None


def test_the_limit_counts_updates_that_began_under_an_earlier_leader() -> None:
    class Seen:
        def __init__(self, phase: str) -> None:
            self.status = {"update": {"id": "x", "phase": phase}} if phase else {}

    resources: Any = {"a": [Seen("Running")], "b": [Seen("Waiting")], "c": [Seen("")]}
    limit = UpdateLimit(1, lambda: resources)
    woken: list[str] = []

    def decided(uid: str, phase: str) -> None:
        limit.decided(uid, Seen(phase).status, wake=lambda: woken.append(uid))

    assert [limit.may_begin(uid) for uid in "abc"] == [True, False, False]
    decided("b", "Waiting")
    decided("a", "Running")
    assert woken == []
    decided("a", "")
    assert woken == ["b"]
    assert limit.may_begin("b")
    decided("b", "Running")
    assert not limit.may_begin("c")
    decided("c", "Waiting")
    del resources["b"]
    limit.ended("b")
    assert woken == ["b", "c"]
    assert limit.may_begin("c")


def test_of_many_resources_at_most_the_limit_is_updated_at_once() -> None:
    """The limit and the decisions together, in an order as tasks take their turns."""
    clusters = [Cluster(copy.deepcopy({**MINIMAL, "rollout": {"autoUpdate": True}})) for _ in range(5)]
    limit = UpdateLimit(2, dict)
    maximum = 0
    for cluster in clusters:
        cluster.settle()
        upgraded(cluster)
    for _ in range(120):
        for number, cluster in enumerate(clusters):
            cluster.may_update = limit.may_begin(str(number))
            cluster.step()
            limit.decided(str(number), cluster.status, wake=lambda: None)
            cluster.tick()
        running = sum((cluster.status.get("update") or {}).get("phase") == "Running" for cluster in clusters)
        maximum = max(maximum, running)
    assert maximum == 2
    assert all(cluster.status["release"]["runtimeImage"] == "runtime:2" for cluster in clusters)
    assert all("update" not in cluster.status for cluster in clusters)
