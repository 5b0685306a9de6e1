"""Diagnoses a pod from the messages of the kubelet or scheduler. A diagnosis is a reason and a sentence with a remedy.

If a message is about a missing object, the remedy includes the field of the spec that names the object.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_operator.decision.causes import CREATION, EXIT_CODES, SCHEDULING, Cause, find_cause
from megatron_operator.decision.world import PodView
from megatron_operator.resource.conditions import Reason
from megatron_operator.resource.names import CHECK, COORDINATOR, ENGINE, FETCH, PREFLIGHT, STANDBY
from megatron_runtime.process.gpu_failures import gpu_failure
from megatron_runtime.protocol import strict_json as json

References = Mapping[tuple[str, str], str]
"""The spec field that names an object. The key is the object's kind in lower case (`secret`, `persistentvolumeclaim`,
…, or `volume` for a volume of the pod) and its name.
"""

NO_REFERENCES: References = {}
_MISSING_OBJECT = re.compile(
    r"(?P<kind>secret|configmap|persistentvolumeclaim|resourceclaim|resourceclaimtemplate)(?:\.resource\.k8s\.io)? "
    r'"(?P<name>[^"]+)" not found',
    re.I,
)
_MISSING_KEY = re.compile(r"couldn't find key (?P<key>\S+) in (?P<kind>Secret|ConfigMap) [^/\s]*/(?P<name>[^\s,;]+)")
_MISSING_VOLUME_KEY = re.compile(
    r'volume "(?P<name>[^"]+)".*references non-existent (?:secret|config) key: (?P<key>[^\s,;]+)', re.S
)


@dataclass(frozen=True, slots=True)
class MissingObject:
    """An object that a pod refers to and that does not exist, or that lacks a required key.

    kind: kind of the object, in lower case; `volume` if the kubelet names only the volume of the pod.
    key: the missing key; empty if the object is missing.
    """

    kind: str
    name: str
    key: str = ""

    def remedy(self, references: References, *, component: str) -> str:
        """Return the remedy, including the field of the spec that names the object.

        component: component of the pod.
        """
        field = references.get((self.kind, self.name), pod_template(component))
        if self.key:
            what = "its Secret" if self.kind == "volume" else f"{self.kind} {self.name}"
            return f"add key {self.key} to {what}, or correct {field}"
        where = "" if self.kind in _CLUSTER_WIDE else " in the namespace of the resource"
        return f"create {self.kind} {self.name}{where}, or correct {field}"


_CLUSTER_WIDE = ("priorityclass", "runtimeclass")
_SECTIONS = {CHECK: ENGINE, STANDBY: COORDINATOR}


def pod_template(component: str) -> str:
    """Return the path of the spec field with the podTemplate of a component."""
    return f"spec.{_SECTIONS.get(component, component)}.podTemplate"


def missing_object(message: str) -> MissingObject | None:
    """Return the missing object that a message of the kubelet or the scheduler names.

    Returns None if the message names no object.
    """
    match = _MISSING_OBJECT.search(message)
    if match is not None:
        return MissingObject(match["kind"].lower(), match["name"])
    match = _MISSING_KEY.search(message)
    if match is not None:
        return MissingObject(match["kind"].lower(), match["name"], match["key"])
    match = _MISSING_VOLUME_KEY.search(message)
    return None if match is None else MissingObject("volume", match["name"], match["key"])


_FIELDS = (
    ("persistentvolumeclaim", "model.source.persistentVolumeClaim", "claimName", "spec.{}.claimName"),
    ("secret", "model.source.huggingFace.tokenSecretRef", "name", "spec.{}"),
    ("secret", "model.source.objectStore.credentialsSecretRef", "name", "spec.{}"),
    ("persistentvolumeclaim", "model.cache", "persistentVolumeClaim", "spec.{}.persistentVolumeClaim"),
    ("secret", "server.tls", "secretName", "spec.{}.secretName"),
    ("secret", "server.apiKeysSecretRef", "name", "spec.{}"),
    ("priorityclass", "coordinator", "priorityClassName", "spec.{}.priorityClassName"),
)
"""Fields of the spec that name an object. An entry has the object's kind in lower case, the path of a section of the
spec, the key of the section that has the name, and the field's path in messages.
"""
_VOLUMES = {"server.tls": "tls", "server.apiKeysSecretRef": "api-keys"}
"""Volumes of pods, by the section of the spec that defines them."""


def references(spec: Mapping[str, Any]) -> References:
    """Return the objects that a spec references outside podTemplates, with the fields that name them.

    spec: the spec as stored in the API.
    """
    names: dict[tuple[str, str], str] = {}
    for kind, section, key, shown in _FIELDS:
        value: Any = spec
        for part in (*section.split("."), key):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, str):
            names[kind, value] = shown.format(section)
            if section in _VOLUMES:
                names["volume", _VOLUMES[section]] = shown.format(section)
    engine: Any = spec.get("engine") or {}
    for claim in (engine.get("accelerator") or {}).get("claims") or ():
        for kind, key in (
            ("resourceclaim", "resourceClaimName"),
            ("resourceclaimtemplate", "resourceClaimTemplateName"),
        ):
            if claim.get(key):
                names[kind, claim[key]] = f"spec.engine.accelerator.claims[].{key}"
    return names


_PULL = frozenset({"ImagePullBackOff", "ErrImagePull", "InvalidImageName", "ErrImageNeverPull", "RegistryUnavailable"})
_CONFIG = frozenset(
    {"CreateContainerConfigError", "CreateContainerError", "RunContainerError", "FailedCreatePodSandBox"}
)
_VOLUME = frozenset({"FailedMount", "FailedAttachVolume", "FailedMapVolume"})
_BEFORE = (PREFLIGHT, FETCH)
"""Init containers that the operator renders. An engine waits for them, so their first error is reported."""
_TERMINATION_MESSAGE = 400
"""Maximum number of characters of a termination message in the status."""


@dataclass(frozen=True, slots=True)
class _Termination:
    """A termination message. The project's processes write one line of JSON. Other processes can write any text."""

    text: str
    reason: str = ""
    rank: int | None = None
    remedy: str = ""

    def quoted(self, cause: Cause | None) -> str:
        """Return the text of the message. A long text is truncated.

        The kept part starts at the text that matches `cause`. If nothing matches, the kept part is the end of the text.
        """
        text = " ".join(self.text.split())
        spare = len(text) - _TERMINATION_MESSAGE
        if spare <= 0:
            return f": {text}" if text else ""
        match = cause.search(text) if cause is not None else None
        start = min(match.start(), spare) if match is not None else spare
        before, after = "…" if start else "", "…" if start < spare else ""
        return f": {before}{text[start : start + _TERMINATION_MESSAGE]}{after}"


def _termination_message(pod: PodView) -> _Termination:
    try:
        document = json.loads(pod.last_message)
        rank = document.get("rank")
        return _Termination(
            text=str(document["message"]),
            reason=str(document.get("reason") or ""),
            rank=rank if isinstance(rank, int) else None,
            remedy=str(document.get("remedy") or ""),
        )
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        return _Termination(pod.last_message)


def diagnose(pod: PodView, references: References = NO_REFERENCES) -> tuple[Reason, str] | None:
    """Return the error of a pod, or None while the pod starts or runs without an error.

    references: the objects that the spec names.
    """
    if pod.deleting or pod.ready:
        return None
    detail = f": {pod.message}" if pod.message else ""
    if pod.reason in _PULL:
        return (
            Reason.IMAGE_PULL_FAILED,
            f"pod {pod.name}: {pod.reason}{detail}; check the image's name and pull secrets",
        )
    missing = missing_object(pod.message)
    if pod.reason in _CONFIG or pod.reason in _VOLUME:
        reason = Reason.VOLUME_FAILED if pod.reason in _VOLUME and missing is None else Reason.CONTAINER_CONFIG_ERROR
        remedy = f"; {missing.remedy(references, component=pod.component)}" if missing is not None else ""
        return reason, f"pod {pod.name}: {pod.reason}{detail}{remedy}"
    if pod.reason in ("Unschedulable", "SchedulingGated"):
        detail = f": {_without_repetition(pod.message)}" if pod.message else ""
        cause = find_cause(pod.message, SCHEDULING)
        if cause is not None and missing is not None:
            remedy = missing.remedy(references, component=pod.component)
            return cause.reason, f"pod {pod.name} has no node{detail}; {remedy}"
        remedy = f"; {cause.remedy}" if cause else ""
        return (cause.reason if cause else Reason.UNSCHEDULABLE), f"pod {pod.name} has no node{detail}{remedy}"
    ended = pod.exit_code is not None
    if ended and pod.exit_reason == "OOMKilled":
        return termination(pod)
    failed_check = pod.ended in _BEFORE and pod.exit_code != 0
    crashed = pod.reason == "CrashLoopBackOff" or pod.phase == "Failed" or pod.restarts >= 2 or failed_check
    if ended and crashed and (pod.exit_code != 0 or pod.reason == "CrashLoopBackOff"):
        return termination(pod)
    return None


def _without_repetition(message: str) -> str:
    """Return the message without sentences that only repeat the end of an earlier sentence.

    For example, `claim "a" not found. not found` becomes `claim "a" not found`.
    """
    kept: list[str] = []
    for part in message.split(". "):
        sentence = part.rstrip(".; ")
        if sentence and not any(earlier.endswith(sentence) for earlier in kept):
            kept.append(sentence)
    return ". ".join(kept)


def termination(pod: PodView) -> tuple[Reason, str]:
    """Return the reason and a message for the last termination of a container in a pod."""
    if pod.exit_reason == "OOMKilled":
        remedy = f"raise the limit of container {pod.ended} in {pod_template(pod.component)}"
        if pod.component == ENGINE and pod.ended == ENGINE:
            remedy += ", or lower spec.engine.batching.kvCacheMemory"
        message = f"pod {pod.name}: its container was killed at its memory limit ({pod.restarts} restarts); {remedy}"
        return Reason.OUT_OF_MEMORY, message

    meaning = EXIT_CODES.get(pod.exit_code or 0)
    code = f"exit code {pod.exit_code}{f', {meaning}' if meaning else ''}"
    termination = _termination_message(pod)
    rank = f", rank {termination.rank}" if termination.rank is not None and pod.ended not in _BEFORE else ""
    who = f"pod {pod.name} (node rank {pod.index} of {pod.engine}{rank})" if pod.engine else f"pod {pod.name}"
    cause = find_cause(f"{termination.reason}: {termination.text}")
    action = termination.remedy or (cause.remedy if cause else "")
    remedy = f"; {action}" if action else ""
    reason = cause.reason if cause else Reason.CRASH_LOOPING
    what = f"container {pod.ended}" if pod.ended in _BEFORE else "its container"
    return reason, f"{who}: {what} ended with {code} ({pod.restarts} restarts){termination.quoted(cause)}{remedy}"


def is_rank_lost(pod: PodView) -> bool:
    """Return whether the container of a pod exited because another rank of the engine was lost."""
    return pod.exit_code is not None and _termination_message(pod).reason == "RankLost"


def is_device_failure(pod: PodView) -> bool:
    """Return whether the container of a pod exited because a GPU or its node is faulty."""
    failure = gpu_failure(_termination_message(pod).text) if pod.exit_code else None
    return failure is not None and failure.is_of_device


def first_diagnosis(pods: Iterable[PodView], references: References) -> tuple[Reason, str] | None:
    """Return the diagnosis of the first pod, in the order of names, that has one. Returns None if no pod has one."""
    for pod in sorted(pods, key=lambda pod: pod.name):
        finding = diagnose(pod, references)
        if finding is not None:
            return finding
    return None


def creation_error(what: str, error: str, *, component: str) -> tuple[Reason, str]:
    """Return why pods of a component cannot be created, as a reason and a message.

    what:  name of the pods.
    error: message of the API server.
    """
    cause = find_cause(error, CREATION)
    remedy = f"; {cause.remedy.format(pod_template=pod_template(component))}" if cause else ""
    return (cause.reason if cause else Reason.CHILD_REFUSED), f"{what} cannot be created: {error}{remedy}"
