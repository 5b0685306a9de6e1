"""API objects reduced to views, and views to diagnoses."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_operator.decision.diagnosis import diagnose
from megatron_operator.decision.reduce import reduce_child, reduce_pod


def _pod(status: dict[str, Any]) -> dict[str, Any]:
    labels = {
        "app.kubernetes.io/component": "engine",
        "inference.megatron.dev/engine": "demo-engine-1",
        "inference.megatron.dev/revision": "abc",
        "apps.kubernetes.io/pod-index": "2",
    }
    metadata = {"name": "demo-engine-1-2", "uid": "u", "labels": labels, "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {"metadata": metadata, "status": status}


def _waiting(reason: str, message: str = "") -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": message}}
    return {"phase": "Pending", "containerStatuses": [{"name": "engine", "restartCount": 0, "state": state}]}


def _ended(code: int, reason: str, message: str = "", *, restarts: int = 3) -> dict[str, Any]:
    ended = {"terminated": {"exitCode": code, "reason": reason, "message": message, "finishedAt": "t"}}
    waiting = {"waiting": {"reason": "CrashLoopBackOff"}}
    return {
        "phase": "Running",
        "containerStatuses": [{"name": "engine", "restartCount": restarts, "state": waiting, "lastState": ended}],
    }


def test_a_pod_is_reduced_to_what_decisions_need() -> None:
    view = reduce_pod(_pod({"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}))
    assert (view.component, view.engine, view.index, view.revision) == ("engine", "demo-engine-1", 2, "abc")
    assert view.ready
    assert not view.deleting
    assert view.created_at is not None
    assert (view.reason, view.message, view.ended, view.image) == ("", "", "", "")
    assert (view.exit_code, view.exit_reason, view.last_message) == (None, "", "")
    assert diagnose(view) is None


def test_a_pod_without_status_is_pending() -> None:
    view = reduce_pod({"metadata": {"name": "x"}})
    assert (view.phase, view.ready, view.restarts) == ("Pending", False, 0)


UNSCHEDULABLE = {
    "phase": "Pending",
    "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes: cpu"}],
}


@pytest.mark.parametrize(
    ("status", "reason", "words"),
    [
        (_waiting("ImagePullBackOff", "not found"), "ImagePullFailed", "not found"),
        (_waiting("ErrImagePull"), "ImagePullFailed", "check the image"),
        (_waiting("CreateContainerConfigError", "secret x not found"), "ContainerConfigError", "secret x not found"),
        (UNSCHEDULABLE, "Unschedulable", "0/1 nodes: cpu"),
        (_ended(3, "Error", "no such weights"), "CrashLooping", "exit code 3 (3 restarts): no such weights"),
        (_ended(137, "OOMKilled"), "OutOfMemory", "raise the limit"),
    ],
)
def test_each_pod_failure_has_its_own_reason(status: dict[str, Any], reason: str, words: str) -> None:
    found = diagnose(reduce_pod(_pod(status)))
    assert found is not None
    assert found[0].value == reason
    assert words in found[1]


@pytest.mark.parametrize("status", [_waiting("ContainerCreating"), _waiting("PodInitializing"), {"phase": "Running"}])
def test_a_starting_pod_has_no_failure(status: dict[str, Any]) -> None:
    assert diagnose(reduce_pod(_pod(status))) is None


def test_termination_messages_are_cut_from_the_front() -> None:
    found = diagnose(reduce_pod(_pod(_ended(1, "Error", "x" * 5000 + " the end"))))
    assert found is not None
    assert found[1].endswith("the end")
    assert len(found[1]) < 600


def test_a_child_is_owned_by_uid_not_by_name() -> None:
    obj = {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "demo", "uid": "1"}}
    assert not reduce_child(obj, owner_uid="me").owned
    obj["metadata"]["ownerReferences"] = [{"uid": "me", "name": "x"}]  # type: ignore[index]
    assert reduce_child(obj, owner_uid="me").owned
