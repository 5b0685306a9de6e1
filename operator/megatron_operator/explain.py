"""A resource's status as an explanation for people. Pure text from plain data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_operator.model.conditions import ConditionType, Reason

_DOCS = {reason.value: reason.doc for reason in Reason}


def explanation(resource: Mapping[str, Any]) -> str:
    """The chain from what is wanted to what is waited for, then conditions, engines and the last transitions."""
    metadata, status = resource["metadata"], resource.get("status") or {}
    desired = (resource.get("spec") or {}).get("desiredState", "Running")
    title = f"{metadata.get('namespace', 'default')}/{metadata['name']}"
    if not status:
        return f"{title}: wanted {desired}; no status yet: no operator has seen it. Is one running for this namespace?"
    lines = [f"{title}: {status.get('state')}, wanted {desired}, {status.get('ready', '0/0')} engines ready"]
    if metadata.get("generation") != status.get("observedGeneration"):
        lines.append("  the latest change of the spec has not been seen by the operator yet")
    lines += _waiting(status)
    lines += ["conditions:", *(_condition(entry) for entry in status.get("conditions") or ())]
    lines += _engines(status)
    lines += _history(status)
    return "\n".join(lines)


def _waiting(status: Mapping[str, Any]) -> list[str]:
    plan = status.get("plan")
    if plan is None:
        return ["  waits for nothing"]
    lines = [f"  because: {plan['step']}", f"  waits for: {plan['waitingOn']}", f"  since: {plan['since']}"]
    lifecycle = status.get("lifecycle") or {}
    if lifecycle.get("phase") not in (None, "Confirmed"):
        total = lifecycle.get("totalRanks")
        ranks = f", {lifecycle.get('confirmedRanks', 0)} of {total} ranks" if total is not None else ""
        lines.append(f"  operation {lifecycle['operationId']}: {lifecycle['signal']} is {lifecycle['phase']}{ranks}")
        if lifecycle.get("message"):
            lines.append(f"    {lifecycle['message']}")
    for entry in status.get("conditions") or ():
        if entry["type"] == ConditionType.DEGRADED.value and entry["status"] == "True":
            lines.append(f"  trouble: {entry['reason']}: {entry['message']}")
            lines.append(f"    {_DOCS.get(entry['reason'], '')}")
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
