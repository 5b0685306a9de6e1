"""Diagnosis of a pod: a reason and a sentence with a remedy, from the kubelet's or scheduler's messages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron_operator.decision.causes import CREATION, EXIT_CODES, SCHEDULING, Cause, find_cause
from megatron_operator.decision.references import NO_REFERENCES, References, missing_object, pod_template
from megatron_operator.decision.world import PodView
from megatron_operator.resource.conditions import Reason
from megatron_operator.resource.names import FETCH, PREFLIGHT
from megatron_runtime.process.gpu_failures import gpu_failure
from megatron_runtime.protocol import strict_json as json

_PULL = frozenset({"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"})
_CONFIG = frozenset(
    {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "FailedCreatePodSandBox"}
)
_VOLUME = frozenset({"FailedMount", "FailedAttachVolume", "FailedMapVolume"})
_BEFORE = (PREFLIGHT, FETCH)
"""Init containers that the operator renders. An engine waits for them, so their first error is reported."""
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


def diagnose(pod: PodView, references: References = NO_REFERENCES) -> tuple[Reason, str] | None:
    """Return the error of a pod, or None while it starts or runs. `references`: the objects that the spec names."""
    if pod.deleting or pod.ready:
        return None
    said = f": {pod.message}" if pod.message else ""
    if pod.reason in _PULL:
        return Reason.IMAGE_PULL_FAILED, f"pod {pod.name}: {pod.reason}{said}; check the image's name and pull secrets"
    missing = missing_object(pod.message)
    if pod.reason in _CONFIG or pod.reason in _VOLUME:
        reason = Reason.VOLUME_FAILED if pod.reason in _VOLUME and missing is None else Reason.CONTAINER_CONFIG_ERROR
        remedy = f"; {missing.remedy(references, component=pod.component)}" if missing is not None else ""
        return reason, f"pod {pod.name}: {pod.reason}{said}{remedy}"
    if pod.reason in ("Unschedulable", "SchedulingGated"):
        said = f": {_without_repetition(pod.message)}" if pod.message else ""
        cause = find_cause(pod.message, SCHEDULING)
        if cause is not None and missing is not None:
            remedy = missing.remedy(references, component=pod.component)
            return cause.reason, f"pod {pod.name} has no node{said}; {remedy}"
        remedy = f"; {cause.remedy}" if cause else ""
        return (cause.reason if cause else Reason.UNSCHEDULABLE), f"pod {pod.name} has no node{said}{remedy}"
    ended = pod.exit_code is not None
    if ended and pod.exit_reason == "OOMKilled":
        return termination(pod)
    failed_check = pod.ended in _BEFORE and pod.exit_code != 0
    crashed = pod.reason == "CrashLoopBackOff" or pod.phase == "Failed" or pod.restarts >= 2 or failed_check
    if ended and crashed and (pod.exit_code != 0 or pod.reason == "CrashLoopBackOff"):
        return termination(pod)
    return None


def _without_repetition(message: str) -> str:
    """Drop sentences that repeat the end of an earlier one, as in `claim "a" not found. not found` of the scheduler."""
    kept: list[str] = []
    for part in message.split(". "):
        sentence = part.rstrip(".; ")
        if sentence and not any(earlier.endswith(sentence) for earlier in kept):
            kept.append(sentence)
    return ". ".join(kept)


def termination(pod: PodView) -> tuple[Reason, str]:
    """Return why the container of a pod that terminated last did so."""
    if pod.exit_reason == "OOMKilled":
        return Reason.OUT_OF_MEMORY, (
            f"pod {pod.name}: its container was killed at its memory limit ({pod.restarts} restarts); raise the limit "
            "in podTemplate or lower batching.kvCacheMemory"
        )

    meaning = EXIT_CODES.get(pod.exit_code or 0)
    code = f"exit code {pod.exit_code}{f', {meaning}' if meaning else ''}"
    termination = _termination_message(pod)
    rank = f", rank {termination.rank}" if termination.rank is not None and pod.ended not in _BEFORE else ""
    who = f"pod {pod.name} (node rank {pod.index} of {pod.engine}{rank})" if pod.engine else f"pod {pod.name}"
    cause = find_cause(f"{termination.reason}: {termination.text}")
    said = termination.remedy or (cause.remedy if cause else "")
    remedy = f"; {said}" if said else ""
    reason = cause.reason if cause else Reason.CRASH_LOOPING
    what = f"container {pod.ended}" if pod.ended in _BEFORE else "its container"
    return reason, f"{who}: {what} ended with {code} ({pod.restarts} restarts){termination.quoted(cause)}{remedy}"


def is_rank_lost(pod: PodView) -> bool:
    """Return whether its container ended because another rank of its engine was lost."""
    return pod.exit_code is not None and _termination_message(pod).reason == "RankLost"


def is_device_failure(pod: PodView) -> bool:
    """Return whether its container ended because a GPU or its node is faulty."""
    failure = gpu_failure(_termination_message(pod).text) if pod.exit_code else None
    return failure is not None and failure.is_of_device


def first_diagnosis(pods: Iterable[PodView], references: References) -> tuple[Reason, str] | None:
    """Return the first diagnosis of the pods, by name."""
    for pod in sorted(pods, key=lambda pod: pod.name):
        found = diagnose(pod, references)
        if found is not None:
            return found
    return None


def creation_error(what: str, said: str, *, component: str) -> tuple[Reason, str]:
    """Return why pods of a component cannot be created, from the words of the API server. `what` names the pods."""
    cause = find_cause(said, CREATION)
    remedy = f"; {cause.remedy.format(pod_template=pod_template(component))}" if cause else ""
    return (cause.reason if cause else Reason.CHILD_REFUSED), f"{what} cannot be created: {said}{remedy}"
