"""Explains a resource's status as text. All functions are pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import groupby, takewhile
from typing import Any

from megatron_operator.decision.diagnosis import References, diagnose, references
from megatron_operator.decision.reduce import reduce_pod
from megatron_operator.decision.world import PodView
from megatron_operator.resource.conditions import ConditionType, Reason
from megatron_operator.resource.names import PREFILL
from megatron_operator.resource.remedies import REMEDIES

_DOCS = {reason.value: (reason.doc, REMEDIES[reason].action) for reason in Reason}
"""Meaning and remedy of each reason."""


def explanation(resource: Mapping[str, Any], operators: str | None = None) -> list[str]:
    """Return lines that describe a resource.

    The lines show the desired state, the backend, the current step and what it waits for, and then conditions, engines,
    adapters and transitions.

    operators: the problem with the operators of the resource's namespace, from `operator_leases.operator_problem`; None
        if exactly one operator runs.
    """
    metadata, status = resource["metadata"], resource.get("status") or {}
    spec = resource.get("spec") or {}
    desired = spec.get("desiredState", "Running")
    backend = (spec.get("engine") or {}).get("backend", "Native")
    title = f"{metadata.get('namespace', 'default')}/{metadata['name']}"
    problem = [f"  {operators}"] if operators is not None else []
    if not status:
        return [f"{title}: desired {desired}; no status yet: no operator has processed it", *problem]
    ready = f"{status.get('ready', '0/0')} engines ready, backend {backend}"
    lines = [f"{title}: {status.get('state')}, desired {desired}, {ready}", *problem]
    if metadata.get("generation") != status.get("observedGeneration"):
        lines.append("  the operator has not processed the latest change of the spec yet")
    lines += _waiting(status, idle="  waits for nothing" if operators is None else "")
    lines += [
        "conditions:",
        *(
            f"  {entry['type']:17} {entry['status']:7} {entry['reason']}: {entry['message']}"
            for entry in status.get("conditions") or ()
        ),
    ]
    lines += _engines(status)
    lines += _adapters(status)
    lines += _history(status)
    return lines


def causes(resource: Mapping[str, Any], pods: Sequence[Mapping[str, Any]], operators: str | None = None) -> list[str]:
    """Return the chain of causes from the resource to the pod, scheduler or rank that it waits for, one cause per line.

    Engines in the same state for the same reason share a line.

    operators: the problem with the operators of the resource's namespace; None if exactly one operator runs.
    """
    status = resource.get("status") or {}
    lines = list(takewhile(lambda line: line != "conditions:", explanation(resource, operators)))
    if not status or status.get("plan") is None:
        return lines
    engines = {entry["name"]: entry for entry in status.get("engines") or ()}
    views = sorted((reduce_pod(pod) for pod in pods), key=lambda view: (view.engine, view.name))
    nodes = {pod["metadata"]["name"]: (pod.get("spec") or {}).get("nodeName") for pod in pods}
    named = references(resource.get("spec") or {})
    held_up: dict[str, list[PodView]] = {}
    for view in views:
        if view.deleting or not (view.ready or view.phase == "Succeeded"):
            held_up.setdefault(view.engine or view.component, []).append(view)
    alike: dict[tuple[str, ...], list[str]] = {}
    for name in sorted(held_up, key=_by_number):
        entry = engines.get(name)
        state = f" {entry['state']}, {entry.get('ranks', 0)} ranks registered" if entry is not None else ""
        whys = (_pod_line(view, nodes.get(view.name), named, where=False) for view in held_up[name])
        alike.setdefault((_by_number(name)[0], state, *(why.replace(name, "") for why in whys)), []).append(name)
    for (_, state, *_), names in alike.items():
        verb = "" if not state else " is" if len(names) == 1 else " are"
        lines.append(f"  {_together(names)}{verb}{state}{', for example' if len(names) > 1 else ''}")
        lines += [_pod_line(view, nodes.get(view.name), named, where=True) for view in held_up[names[0]]]
    with_pods = {view.engine for view in views}
    bare = [name for name, entry in engines.items() if entry["state"] == "Pending" and name not in with_pods]
    for _, same in groupby(sorted(bare, key=_by_number), key=lambda name: _by_number(name)[0]):
        lines.append(f"  {_together([*same])}: Pending, without pods")
    return lines


def _by_number(name: str) -> tuple[str, int]:
    """Return a key for sorted(), with which engine-2 comes before engine-10."""
    base, _, number = name.rpartition("-")
    return (base, int(number)) if number.isdecimal() else (name, 0)


def _together(names: Sequence[str]) -> str:
    """Return the names of engines of one role in the form `engines 0-3, 5`. A single name is returned unchanged."""
    if len(names) == 1:
        return names[0]
    numbers = [_by_number(name)[1] for name in names]
    ranges: list[list[int]] = []
    for number in numbers:
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    kind = "prefill engines " if _by_number(names[0])[0].endswith(f"-{PREFILL}") else "engines "
    return kind + ", ".join("-".join(map(str, each)) for each in ranges)


def _pod_line(view: PodView, node: str | None, references: References, *, where: bool) -> str:
    diagnosis = diagnose(view, references)
    if view.deleting:
        why = "it is being deleted"
    elif diagnosis is not None:
        why = f"{diagnosis[0].value}: {diagnosis[1]}"
    else:
        why = view.reason or ("it runs and is not ready yet" if view.phase == "Running" else "its containers start")
    place = "" if not where else f", on node {node}" if node else ", on no node"
    return f"    pod {view.name}, {view.phase}{place}: {why}"


def _waiting(status: Mapping[str, Any], *, idle: str) -> list[str]:
    plan = status.get("plan")
    lines = [idle] if idle else []
    if plan is not None:
        lines = [f"  because: {plan['step']}", f"  waits for: {plan['waitingOn']}", f"  since: {plan['since']}"]
    lifecycle = status.get("lifecycle") or {}
    if plan is not None and lifecycle.get("phase") not in (None, "Confirmed"):
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


def _engines(status: Mapping[str, Any]) -> list[str]:
    engines = status.get("engines") or ()
    if not engines:
        return []
    alike: dict[tuple[str, str, str, str], list[str]] = {}
    whole: dict[str, str] = {}
    for engine in engines:
        name = engine["name"]
        facts = f"revision {engine.get('revision') or '-'}, {engine.get('restarts', 0)} restarts"
        why = engine.get("diagnosis") or ""
        why += f"; it is started again at {engine['retryAt']}" if engine.get("retryAt") else ""
        alike.setdefault((_by_number(name)[0], engine["state"], facts, why.replace(name, "")), []).append(name)
        whole[name] = why
    rows = [
        f"  {_together(names):24} {state:12} {facts}{f': {whole[names[0]]}' if whole[names[0]] else ''}"
        for (_, state, facts, _), names in alike.items()
    ]
    return ["engines:", *rows]


def _adapters(status: Mapping[str, Any]) -> list[str]:
    rows = [
        f"  {entry['name']:24} on {entry.get('engines', 0)} engines"
        + (f": {entry['error']}" if "error" in entry else "")
        for entry in status.get("adapters") or ()
    ]
    return ["adapters:", *rows] if rows else []


def _history(status: Mapping[str, Any]) -> list[str]:
    rows = [
        f"  {entry['at']}  {entry['from']} -> {entry['to']} in {entry['seconds']} s, by {entry['by']}"
        for entry in (status.get("history") or ())[-5:]
    ]
    return ["last transitions:", *rows] if rows else []
