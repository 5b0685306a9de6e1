"""Secrets, ConfigMaps and claims that a spec refers to, and the kubelet's messages about missing ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_operator.resource.names import CHECK, COORDINATOR, ENGINE, STANDBY

References = Mapping[tuple[str, str], str]
"""The field of the spec that names an object, by kind in lower case (`secret`, `persistentvolumeclaim`, or `volume` of
a pod) and name."""

NO_REFERENCES: References = {}
_MISSING_OBJECT = re.compile(r'(?P<kind>secret|configmap|persistentvolumeclaim) "(?P<name>[^"]+)" not found', re.I)
_MISSING_KEY = re.compile(r"couldn't find key (?P<key>\S+) in (?P<kind>Secret|ConfigMap) [^/\s]*/(?P<name>[^\s,;]+)")
_MISSING_VOLUME_KEY = re.compile(
    r'volume "(?P<name>[^"]+)".*references non-existent (?:secret|config) key: (?P<key>[^\s,;]+)', re.S
)


@dataclass(frozen=True, slots=True)
class MissingObject:
    """An object that a pod refers to and that does not exist, or lacks a key.

    kind: of the object, in lower case; `volume` if the kubelet names only the volume of the pod.
    key: the missing key; empty if the object is missing.
    """

    kind: str
    name: str
    key: str = ""

    def remedy(self, references: References, *, component: str) -> str:
        """Return what the user does, with the field of the spec; `component` is that of the pod."""
        field = references.get((self.kind, self.name), pod_template(component))
        if self.key:
            what = "its Secret" if self.kind == "volume" else f"{self.kind} {self.name}"
            return f"add key {self.key} to {what}, or correct {field}"
        return f"create {self.kind} {self.name} in the namespace of the resource, or correct {field}"


_SECTIONS = {CHECK: ENGINE, STANDBY: COORDINATOR}


def pod_template(component: str) -> str:
    """Return the field of the spec that has the podTemplate of a component's pods."""
    return f"spec.{_SECTIONS.get(component, component)}.podTemplate"


def missing_object(message: str) -> MissingObject | None:
    """Return the missing object that a message of the kubelet or the scheduler names; None if it names none."""
    found = _MISSING_OBJECT.search(message)
    if found is not None:
        return MissingObject(found["kind"].lower(), found["name"])
    found = _MISSING_KEY.search(message)
    if found is not None:
        return MissingObject(found["kind"].lower(), found["name"], found["key"])
    found = _MISSING_VOLUME_KEY.search(message)
    return None if found is None else MissingObject("volume", found["name"], found["key"])


_FIELDS = (
    ("persistentvolumeclaim", "model.source.persistentVolumeClaim", "claimName", "spec.{}.claimName"),
    ("secret", "model.source.huggingFace.tokenSecretRef", "name", "spec.{}"),
    ("secret", "model.source.objectStore.credentialsSecretRef", "name", "spec.{}"),
    ("persistentvolumeclaim", "model.cache", "persistentVolumeClaim", "spec.{}.persistentVolumeClaim"),
    ("secret", "server.tls", "secretName", "spec.{}.secretName"),
    ("secret", "server.apiKeysSecretRef", "name", "spec.{}"),
)
"""Kind of an object, the section of the spec and its key with the name, and how messages call the field."""
_VOLUMES = {"server.tls": "tls", "server.apiKeysSecretRef": "api-keys"}
"""Volumes of pods by the section of the spec."""


def references(spec: Mapping[str, Any]) -> References:
    """Return the objects that the fields of a spec, as in the API, name; except those of podTemplates."""
    found: dict[tuple[str, str], str] = {}
    for kind, section, key, shown in _FIELDS:
        value: Any = spec
        for part in (*section.split("."), key):
            value = value.get(part) if isinstance(value, Mapping) else None
        if isinstance(value, str):
            found[kind, value] = shown.format(section)
            if section in _VOLUMES:
                found["volume", _VOLUMES[section]] = shown.format(section)
    return found
