"""Converts Kubernetes objects to the views in a World, such as PodView and ChildView. All functions are pure.

A World is a snapshot of everything that the operator has observed about one custom resource.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from datetime import datetime
from itertools import pairwise
from typing import Any

from megatron_operator.decision.world import ChildRef, ChildView, PodView
from megatron_operator.resource.names import (
    ANNOTATION_AVOIDED,
    ANNOTATION_HASH,
    ANNOTATION_INPUTS,
    ANNOTATION_MODEL,
    ANNOTATION_RELEASE,
    CHECK,
    CONTAINERS,
    ENGINE,
    FETCH,
    FIELD_MANAGER,
    GROUP,
    KIND,
    LABEL_COMPONENT,
    LABEL_ENGINE,
    LABEL_MANAGED_BY,
    LABEL_POD_INDEX,
    LABEL_REVISION,
    LABEL_WEIGHTS,
    PORT_HTTP,
    REVISION_KIND,
    SERVER,
)
from megatron_operator.resource.text import parse
from megatron_runtime.protocol import strict_json as json

Object = Mapping[str, Any]


def reduce_child(obj: Object, *, owner_uid: str, verified: bool = True) -> ChildView:
    """Return the view of a child.

    The object must have `apiVersion` and `kind`. The objects in the response to a list request do not have these
    fields.
    """
    metadata, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    annotations = metadata.get("annotations") or {}
    template = spec.get("template") or {}
    has_pods = obj["kind"] in ("Deployment", "StatefulSet")
    complete = not has_pods or _complete(spec, status, updated=obj["kind"] == "Deployment")
    observed = not has_pods or int(status.get("observedGeneration") or 0) >= int(metadata.get("generation") or 0)
    return ChildView(
        ref=ChildRef.of(obj),
        uid=metadata.get("uid", ""),
        owned=any(ref.get("uid") == owner_uid for ref in metadata.get("ownerReferences") or ()),
        orphan=_is_orphan(metadata),
        deleting=metadata.get("deletionTimestamp") is not None,
        hash=annotations.get(ANNOTATION_HASH, ""),
        revision=((template.get("metadata") or {}).get("labels") or {}).get(LABEL_REVISION, ""),
        model_hash=annotations.get(ANNOTATION_MODEL, ""),
        replicas=int(spec.get("replicas") or 0),
        ready_replicas=int(status.get("readyReplicas") or 0),
        release=annotations.get(ANNOTATION_RELEASE, ""),
        inputs=annotations.get(ANNOTATION_INPUTS, ""),
        rolled_out=complete and observed,
        unobserved=complete and not observed,
        stuck=_stuck(status),
        creation_error=_creation_error(status),
        data=_revision_data(obj),
        offer=offer(template.get("spec") or {}),
        owned_fields=_owned_fields(metadata),
        verified=verified,
    )


def _is_orphan(metadata: Object) -> bool:
    labels = metadata.get("labels") or {}
    return not metadata.get("ownerReferences") and labels.get(LABEL_MANAGED_BY) == FIELD_MANAGER


def _owned_fields(metadata: Object) -> str:
    """Return the fields that this operator owns through its applies, as JSON. Returns "" if it owns none.

    Equal results are one object, because most children of a kind have the same fields.
    """
    for entry in metadata.get("managedFields") or ():
        applied = entry.get("operation") == "Apply" and not entry.get("subresource")
        if applied and entry.get("manager") == FIELD_MANAGER:
            return sys.intern(json.dumps(entry.get("fieldsV1") or {}, separators=(",", ":")))
    return ""


def _complete(spec: Object, status: Object, *, updated: bool) -> bool:
    """Return whether all replicas of a workload are ready.

    updated: whether the replicas must also have the current template. StatefulSets do not need this check, because the
             operator itself replaces their pods and compares the pods' revisions.
    """
    wanted = int(spec.get("replicas", 1))
    names = ("replicas", "readyReplicas", *(["updatedReplicas"] if updated else []))
    return all(int(status.get(name) or 0) == wanted for name in names)


def offer(pod: Object) -> tuple[str, str]:
    """Return the URL scheme and the model name of the OpenAI server in a pod spec. Both are empty for other pods."""
    container = next((entry for entry in pod.get("containers") or () if entry.get("name") == SERVER), None)
    if container is None:
        return "", ""
    ports = (str(port.get("name")) for port in container.get("ports") or () if port.get("containerPort") == PORT_HTTP)
    args = [str(arg) for arg in container.get("args") or ()]
    names = (value for flag, value in pairwise(args) if flag == "--model-name")
    return next(ports, ""), next(names, "")


def _stuck(status: Object) -> str:
    progress = _condition(status, "Progressing") or {}
    return str(progress.get("message") or "") if progress.get("reason") == "ProgressDeadlineExceeded" else ""


def _creation_error(status: Object) -> str:
    failure = _condition(status, "ReplicaFailure")
    return str(failure.get("message") or "") if failure is not None and failure.get("status") == "True" else ""


def _revision_data(obj: Object) -> Mapping[str, Any] | None:
    """Return the data of a ControllerRevision if the operator created it. Returns None if a StatefulSet created it."""
    ours = obj["kind"] == REVISION_KIND and ANNOTATION_HASH in (obj["metadata"].get("annotations") or {})
    return obj.get("data") if ours else None


def owner_uid(obj: Object) -> str:
    """Return the UID of the MegatronInference in the owner references.

    Returns an empty string if no owner is a MegatronInference.
    """
    for reference in obj["metadata"].get("ownerReferences") or ():
        if reference.get("kind") == KIND and str(reference.get("apiVersion", "")).startswith(f"{GROUP}/"):
            return str(reference.get("uid", ""))
    return ""


def _controller(obj: Object) -> tuple[str, str]:
    """Return kind and name of the controller of a pod. Both are empty if the pod has no controller.

    If the controller is a ReplicaSet, return its Deployment.
    """
    references = obj["metadata"].get("ownerReferences") or ()
    controller: Object = next((reference for reference in references if reference.get("controller")), {})
    kind, name = str(controller.get("kind", "")), str(controller.get("name", ""))
    return ("Deployment", name.rpartition("-")[0]) if kind == "ReplicaSet" else (kind, name)


def _condition(status: Object, kind: str) -> Object | None:
    return next((entry for entry in status.get("conditions") or () if entry.get("type") == kind), None)


def _rendered_status(status: Object, component: str) -> Object:
    """Return the status of a pod without the containers that the operator did not render.

    Such containers are sidecars from podTemplates and service meshes. While the pod is not initialized, all init
    containers are kept, because any of them can keep the operator's containers from starting.
    """
    names = CONTAINERS.get(component, ())
    initialized = _condition(status, "Initialized")
    blocked = initialized is not None and initialized.get("status") == "False"
    before, main = status.get("initContainerStatuses") or (), status.get("containerStatuses") or ()
    return {
        **status,
        "initContainerStatuses": [entry for entry in before if blocked or entry.get("name") in names],
        "containerStatuses": [entry for entry in main if entry.get("name") in names],
    }


def _containers(status: Object) -> list[Object]:
    return [*(status.get("initContainerStatuses") or ()), *(status.get("containerStatuses") or ())]


def _ready(status: Object) -> bool:
    """Return whether a pod is ready. Containers that the operator did not render are ignored."""
    ready = _condition(status, "Ready")
    if ready is None or ready.get("status") == "True":
        return ready is not None
    ours = status.get("containerStatuses") or ()
    return ready.get("reason") == "ContainersNotReady" and bool(ours) and all(entry.get("ready") for entry in ours)


def _phase(status: Object, component: str) -> str:
    """Return the phase of a pod.

    A pod that checks a revision has ended when its main container has ended, even if a sidecar still runs.
    """
    phase = str(status.get("phase") or "Pending")
    ends = [(entry.get("state") or {}).get("terminated") for entry in status.get("containerStatuses") or ()]
    if component != CHECK or not ends or not all(ends) or phase == "Pending":
        return phase
    return "Succeeded" if all(end["exitCode"] == 0 for end in ends if end) else "Failed"


def _waiting(status: Object) -> tuple[str, str]:
    """Return reason and message of the first waiting container.

    If no container waits, return the reason and message of the scheduler or the pod.
    """
    for container in _containers(status):
        waiting = (container.get("state") or {}).get("waiting")
        if waiting and waiting.get("reason") not in (None, "ContainerCreating", "PodInitializing"):
            return str(waiting["reason"]), str(waiting.get("message") or "")
    scheduled = _condition(status, "PodScheduled")
    if scheduled is not None and scheduled.get("status") == "False":
        return str(scheduled.get("reason") or "Unschedulable"), str(scheduled.get("message") or "")
    return str(status.get("reason") or ""), str(status.get("message") or "")


def _started(status: Object) -> bool:
    containers = status.get("containerStatuses") or ()
    return bool(containers) and all(container.get("started") or container.get("ready") for container in containers)


def _runs(status: Object, container: str) -> bool:
    """Return whether a container or init container of this name runs."""
    return any(
        entry.get("name") == container and (entry.get("state") or {}).get("running") is not None
        for entry in _containers(status)
    )


def _succeeded(container: Object) -> bool:
    ended = (container.get("state") or {}).get("terminated")
    return ended is not None and ended.get("exitCode") == 0


def _last_end(status: Object) -> Object | None:
    """Return the most recent termination of a container, or None if no container has terminated.

    If an init container has succeeded, all its terminations are ignored.
    """
    ends: list[Object] = []
    # Init containers end normally; after their success, earlier terminations are irrelevant.
    before = [entry for entry in status.get("initContainerStatuses") or () if not _succeeded(entry)]
    for container in (*before, *(status.get("containerStatuses") or ())):
        for when in ("state", "lastState"):
            ended = (container.get(when) or {}).get("terminated")
            if ended:
                ends.append({**ended, "container": container.get("name", "")})
    return max(ends, key=lambda ended: str(ended.get("finishedAt") or ""), default=None)


def _time(value: object) -> datetime | None:
    """Return a timestamp of the API as a datetime. Returns None if `value` is not a timestamp."""
    try:
        return parse(str(value))
    except ValueError:
        return None


def _seconds(begin: datetime | None, end: datetime | None) -> float:
    return (end - begin).total_seconds() if begin is not None and end is not None else 0.0


def _image_of(obj: Object, container: str) -> str:
    """Return the image of a container in the pod's spec."""
    spec = obj.get("spec") or {}
    containers = [*(spec.get("initContainers") or ()), *(spec.get("containers") or ())]
    return next((str(entry.get("image") or "") for entry in containers if entry.get("name") == container), "")


def reduce_pod(obj: Object) -> PodView:
    """Return the view of a pod. The view ignores containers that the operator did not render."""
    metadata = obj["metadata"]
    labels = metadata.get("labels") or {}
    component = labels.get(LABEL_COMPONENT, "")
    status = _rendered_status(obj.get("status") or {}, component)
    reason, message = _waiting(status)
    ended = _last_end(status) or {}
    created = metadata.get("creationTimestamp")
    index = str(labels.get(LABEL_POD_INDEX) or "")
    return PodView(
        name=metadata["name"],
        uid=metadata.get("uid", ""),
        component=component,
        engine=labels.get(LABEL_ENGINE, ""),
        index=int(index) if index.isdecimal() else 0,
        phase=_phase(status, component),
        ready=_ready(status),
        started=_started(status),
        deleting=metadata.get("deletionTimestamp") is not None,
        revision=labels.get(LABEL_REVISION, ""),
        weights=labels.get(LABEL_WEIGHTS, ""),
        restarts=sum(
            int(entry.get("restartCount") or 0)
            for entry in _containers(status)
            if entry.get("name") in CONTAINERS.get(component, ())
        ),
        reason=reason,
        message=message,
        ended=str(ended.get("container") or ""),
        image=_image_of(obj, str(ended.get("container") or "")),
        exit_code=ended.get("exitCode"),
        exit_reason=str(ended.get("reason") or ""),
        last_message=str(ended.get("message") or ""),
        ended_at=_time(ended.get("finishedAt")),
        ran_seconds=_seconds(_time(ended.get("startedAt")), _time(ended.get("finishedAt"))),
        created_at=parse(created) if isinstance(created, str) else created,
        owner=owner_uid(obj),
        controller=_controller(obj),
        node=str((obj.get("spec") or {}).get("nodeName") or ""),
        ends_at=_time(metadata.get("deletionTimestamp")) if metadata.get("deletionGracePeriodSeconds") != 0 else None,
        fetching_at=str(status.get("podIP") or "") if _runs(status, FETCH) else "",
        avoided=str((metadata.get("annotations") or {}).get(ANNOTATION_AVOIDED) or ""),
        loading_at=str(status.get("podIP") or "") if _runs(status, ENGINE) and not _ready(status) else "",
        offer=offer(obj.get("spec") or {}) if component == SERVER else ("", ""),
    )


def lost_since(node: Object) -> datetime | None:
    """Return the time at which a node stopped being ready, or None if it is ready.

    For a node that does not have the condition Ready yet, return the time of its creation.
    """
    ready = _condition(node.get("status") or {}, "Ready")
    if ready is None:
        return _time(node["metadata"].get("creationTimestamp"))
    return None if ready.get("status") == "True" else _time(ready.get("lastTransitionTime"))
