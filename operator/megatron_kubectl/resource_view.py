"""Computes the values that lists and tables show about resources and pods. All functions are pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

Object = dict[str, Any]


def conditions(resource: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return the conditions of a resource by type."""
    return {entry["type"]: entry for entry in (resource.get("status") or {}).get("conditions") or ()}


def is_true(resource: Mapping[str, Any], kind: str) -> bool:
    """Return whether the condition of type `kind` has the status True."""
    return conditions(resource).get(kind, {}).get("status") == "True"


def is_observed(resource: Mapping[str, Any]) -> bool:
    """Return whether the operator has processed the current spec."""
    return (resource.get("status") or {}).get("observedGeneration") == resource["metadata"].get("generation")


def is_settled(resource: Mapping[str, Any]) -> bool:
    """Return whether every rank has confirmed the desired state of the current spec."""
    state = ((resource.get("status") or {}).get("lifecycle") or {}).get("observed")
    wanted = (resource.get("spec") or {}).get("desiredState", "Running")
    return is_observed(resource) and is_true(resource, "LifecycleSettled") and state == wanted


def summary(resource: Mapping[str, Any]) -> Object:
    """Return the fields of one resource for the list of resources."""
    metadata, spec, status = resource["metadata"], resource.get("spec") or {}, resource.get("status") or {}
    known = conditions(resource)
    degraded = known.get("Degraded", {})
    shown = degraded if degraded.get("status") == "True" else known.get("Ready", {})
    return {
        "namespace": metadata["namespace"],
        "name": metadata["name"],
        "state": status.get("state") or "Pending",
        "desired": spec.get("desiredState", "Running"),
        "ready": status.get("ready") or "",
        "model": status.get("model") or "",
        "reason": shown.get("reason") or "",
        "degraded": degraded.get("status") == "True",
        "waitingOn": (status.get("plan") or {}).get("waitingOn") or "",
    }


def label(item: Mapping[str, Any], name: str) -> str:
    """Return the value of the label `name` of an object. Returns an empty string if the label is not set."""
    return str((item["metadata"].get("labels") or {}).get(name, ""))


def age(resource: Mapping[str, Any], now: datetime) -> str:
    """Return the age of an object in its largest unit, as kubectl shows ages."""
    created = resource["metadata"].get("creationTimestamp")
    if not created:
        return "-"
    seconds = max(0, int((now - datetime.fromisoformat(str(created).replace("Z", "+00:00"))).total_seconds()))
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= 2 * length:
            return f"{seconds // length}{unit}"
    return f"{seconds}s"


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table with aligned columns. Empty cells are shown as -."""
    cells = [[cell or "-" for cell in row] for row in (headers, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    return ["   ".join(f"{cell:{width}}" for cell, width in zip(row, widths, strict=True)).rstrip() for row in cells]


def rollout(resource: Mapping[str, Any]) -> Object:
    """Return the progress of a rollout, as an object that has these fields, among others.

    done:   whether every engine has the current revision and serves; True if the desired state is not Running.
    failed: reason why waiting does not help; empty if waiting may help.
    text:   progress in one sentence.
    """
    spec, status = resource.get("spec") or {}, resource.get("status") or {}
    replicas, updated = spec.get("replicas", 1), status.get("updatedReplicas") or 0
    runs = spec.get("desiredState", "Running") == "Running"
    behind = runs and updated < replicas
    progress: Object = {**summary(resource), "replicas": replicas, "updated": updated, "done": False, "failed": ""}
    if not is_observed(resource):
        return {**progress, "text": "the operator has not processed the latest change of the spec yet"}
    waiting = progress["waitingOn"]
    text = f"{updated} of {replicas} engines updated, {progress['ready'] or '0/0'} ready"
    if is_true(resource, "Degraded") and not is_true(resource, "Progressing"):
        entry = conditions(resource)["Degraded"]
        return {**progress, "failed": f"{entry['reason']}: {entry['message']}", "text": text}
    if behind and (spec.get("rollout") or {}).get("paused"):
        return {**progress, "failed": "spec.rollout.paused holds the rollout; set it to false", "text": text}
    if is_true(resource, "Ready") and is_settled(resource) and not is_true(resource, "Progressing") and not behind:
        return {**progress, "done": True, "text": text if runs else f"{progress['state']}, as requested"}
    return {**progress, "text": f"{text}; waiting for {waiting}" if waiting else text}
