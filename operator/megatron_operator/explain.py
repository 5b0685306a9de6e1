"""Explains a resource's status as text. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any

from megatron_operator.model.conditions import ConditionType, Reason
from megatron_operator.model.remedies import REMEDIES
from megatron_operator.plan.diagnosis import diagnose
from megatron_operator.plan.reduce import reduce_pod
from megatron_operator.plan.world import PodView

_DOCS = {reason.value: (reason.doc, REMEDIES[reason].action) for reason in Reason}
"""What each reason means, and what to do about it."""


def explanation(resource: Mapping[str, Any]) -> list[str]:
    """Return lines with the desired state, the current step and what it waits for, conditions, engines, transitions."""
    metadata, status = resource["metadata"], resource.get("status") or {}
    desired = (resource.get("spec") or {}).get("desiredState", "Running")
    title = f"{metadata.get('namespace', 'default')}/{metadata['name']}"
    if not status:
        return [f"{title}: desired {desired}; no status yet. Is an operator running for this namespace?"]
    lines = [f"{title}: {status.get('state')}, desired {desired}, {status.get('ready', '0/0')} engines ready"]
    if metadata.get("generation") != status.get("observedGeneration"):
        lines.append("  the operator has not processed the latest change of the spec yet")
    lines += _waiting(status)
    lines += ["conditions:", *(_condition(entry) for entry in status.get("conditions") or ())]
    lines += _engines(status)
    lines += _history(status)
    return lines


def causes(resource: Mapping[str, Any], pods: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the chain from the resource down to the pod, scheduler or rank that it waits for, one step per line."""
    status = resource.get("status") or {}
    lines = list(takewhile(lambda line: line != "conditions:", explanation(resource)))
    if not status or status.get("plan") is None:
        return lines
    engines = {entry["name"]: entry for entry in status.get("engines") or ()}
    views = sorted((reduce_pod(pod) for pod in pods), key=lambda view: (view.engine, view.name))
    nodes = {pod["metadata"]["name"]: (pod.get("spec") or {}).get("nodeName") for pod in pods}
    held_up = [view for view in views if view.deleting or not (view.ready or view.phase == "Succeeded")]
    for name in sorted({view.engine or view.component for view in held_up}):
        entry = engines.get(name)
        state = f" is {entry['state']}, {entry.get('ranks', 0)} ranks registered" if entry is not None else ""
        lines.append(f"  {name}{state}")
        lines += [_pod_line(view, nodes.get(view.name)) for view in held_up if (view.engine or view.component) == name]
    bare = sorted(name for name, entry in engines.items() if entry["state"] == "Pending")
    with_pods = {view.engine for view in views}
    lines += [f"  {name} is Pending and has no pods" for name in bare if name not in with_pods]
    return lines


def _pod_line(view: PodView, node: str | None) -> str:
    where = f"on node {node}" if node else "on no node"
    found = diagnose(view)
    if view.deleting:
        why = "it is being deleted"
    elif found is not None:
        why = f"{found[0].value}: {found[1]}"
    else:
        why = view.reason or ("it runs and is not ready yet" if view.phase == "Running" else "its containers start")
    return f"    pod {view.name}, {view.phase}, {where}: {why}"


def _waiting(status: Mapping[str, Any]) -> list[str]:
    plan = status.get("plan")
    if plan is None:
        return ["  waits for nothing"]
    lines = [f"  because: {plan['step']}", f"  waits for: {plan['waitingOn']}", f"  since: {plan['since']}"]
    lifecycle = status.get("lifecycle") or {}
    if lifecycle.get("phase") not in (None, "Confirmed"):
        total = lifecycle.get("totalRanks")
        ranks = f", {lifecycle.get('confirmedRanks', 0)} of {total} ranks" if total else ""
        lines.append(f"  operation {lifecycle['operationId']}: {lifecycle['signal']} is {lifecycle['phase']}{ranks}")
        if lifecycle.get("message"):
            lines.append(f"    {lifecycle['message']}")
    for entry in status.get("conditions") or ():
        if entry["type"] == ConditionType.DEGRADED.value and entry["status"] == "True":
            lines.append(f"  error: {entry['reason']}: {entry['message']}")
            lines += [f"    {text}" for text in _DOCS.get(entry["reason"], ())]
    return lines


def _condition(entry: Mapping[str, Any]) -> str:
    return f"  {entry['type']:17} {entry['status']:7} {entry['reason']}: {entry['message']}"


def _engines(status: Mapping[str, Any]) -> list[str]:
    engines = status.get("engines") or ()
    if not engines:
        return []
    rows = []
    for engine in engines:
        facts = f"revision {engine.get('revision') or '-'}, {engine.get('restarts', 0)} restarts"
        why = f": {engine['diagnosis']}" if engine.get("diagnosis") else ""
        rows.append(f"  {engine['name']:24} {engine['state']:10} {facts}{why}")
    return ["engines:", *rows]


def _history(status: Mapping[str, Any]) -> list[str]:
    rows = [
        f"  {entry['at']}  {entry['from']} -> {entry['to']} in {entry['seconds']} s, by {entry['by']}"
        for entry in (status.get("history") or ())[-5:]
    ]
    return ["last transitions:", *rows] if rows else []
