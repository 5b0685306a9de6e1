"""Diagnosis of a pod: a reason and a sentence with a remedy, from the kubelet's or scheduler's messages."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass

from megatron_operator.model.conditions import Reason
from megatron_operator.plan.causes import EXIT_CODES, SCHEDULING, Cause, find_cause
from megatron_operator.plan.world import PodView
from megatron_operator.render.context import PREFLIGHT

_PULL = frozenset({"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"})
_CONFIG = frozenset({"CreateContainerConfigError", "CreateContainerError", "RunContainerError"})
_TERMINATION_MESSAGE = 400
"""Limit of characters of a termination message in the status."""


@dataclass(frozen=True, slots=True)
class _Termination:
    """A termination message: one line of JSON of our own processes, or any text of others."""

    text: str
    reason: str = ""
    rank: int | None = None
    remedy: str = ""

    def quoted(self, cause: Cause | None) -> str:
        """Return the text; of a long one the part from what `cause` matches, else the end."""
        text = " ".join(self.text.split())
        spare = len(text) - _TERMINATION_MESSAGE
        if spare <= 0:
            return f": {text}" if text else ""
        match = cause.pattern.search(text) if cause is not None else None
        start = min(match.start(), spare) if match is not None else spare
        before, after = "…" if start else "", "…" if start < spare else ""
        return f": {before}{text[start : start + _TERMINATION_MESSAGE]}{after}"


def _termination_message(pod: PodView) -> _Termination:
    try:
        told = json.loads(pod.last_message)
        rank = told.get("rank")
        return _Termination(
            text=str(told["message"]),
            reason=str(told.get("reason") or ""),
            rank=rank if isinstance(rank, int) else None,
            remedy=str(told.get("remedy") or ""),
        )
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return _Termination(pod.last_message)


def diagnose(pod: PodView) -> tuple[Reason, str] | None:
    """Return the error of a pod, or None while it starts or runs."""
    if pod.deleting or pod.ready:
        return None
    said = f": {pod.message}" if pod.message else ""
    if pod.reason in _PULL:
        return Reason.IMAGE_PULL_FAILED, f"pod {pod.name}: {pod.reason}{said}; check the image's name and pull secrets"
    if pod.reason in _CONFIG:
        return Reason.CONTAINER_CONFIG_ERROR, f"pod {pod.name}: {pod.reason}{said}"
    if pod.reason in ("Unschedulable", "SchedulingGated"):
        cause = find_cause(pod.message, SCHEDULING)
        remedy = f"; {cause.remedy}" if cause else ""
        return (cause.reason if cause else Reason.UNSCHEDULABLE), f"pod {pod.name} has no node{said}{remedy}"
    ended = pod.exit_code is not None
    if ended and pod.exit_reason == "OOMKilled":
        return Reason.OUT_OF_MEMORY, (
            f"pod {pod.name}: its container was killed at its memory limit ({pod.restarts} restarts); raise the limit "
            "in podTemplate or lower batching.kvCacheMemory"
        )
    failed_check = pod.ended == PREFLIGHT and pod.exit_code != 0
    crashed = pod.reason == "CrashLoopBackOff" or pod.phase == "Failed" or pod.restarts >= 2 or failed_check
    if ended and crashed and (pod.exit_code != 0 or pod.reason == "CrashLoopBackOff"):
        return _ended(pod)
    return None


def _ended(pod: PodView) -> tuple[Reason, str]:
    meaning = EXIT_CODES.get(pod.exit_code or 0)
    code = f"exit code {pod.exit_code}{f', {meaning}' if meaning else ''}"
    termination = _termination_message(pod)
    rank = f", rank {termination.rank}" if termination.rank is not None and pod.ended != PREFLIGHT else ""
    who = f"pod {pod.name} (node rank {pod.index} of {pod.engine}{rank})" if pod.engine else f"pod {pod.name}"
    cause = find_cause(f"{termination.reason}: {termination.text}")
    said = termination.remedy or (cause.remedy if cause else "")
    remedy = f"; {said}" if said else ""
    reason = cause.reason if cause else Reason.CRASH_LOOPING
    what = f"container {pod.ended}" if pod.ended == PREFLIGHT else "its container"
    return reason, f"{who}: {what} ended with {code} ({pod.restarts} restarts){termination.quoted(cause)}{remedy}"


def first_diagnosis(pods: Iterable[PodView]) -> tuple[Reason, str] | None:
    """Return the first diagnosis of the pods, by name."""
    for pod in sorted(pods, key=lambda pod: pod.name):
        found = diagnose(pod)
        if found is not None:
            return found
    return None
