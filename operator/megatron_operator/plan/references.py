"""Secrets, ConfigMaps and claims that a spec refers to, and the kubelet's messages about missing ones."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from megatron_operator.model.resource import MegatronInferenceSpec

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
        field = references.get((self.kind, self.name), f"spec.{component}.podTemplate")
        if self.key:
            what = "its Secret" if self.kind == "volume" else f"{self.kind} {self.name}"
            return f"add key {self.key} to {what}, or correct {field}"
        return f"create {self.kind} {self.name} in the namespace of the resource, or correct {field}"


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


def references(spec: MegatronInferenceSpec) -> References:
    """Return the objects that the fields of a spec name, except those of podTemplates."""
    found: dict[tuple[str, str], str] = {}
    source, server = spec.model.source, spec.server
    if source.persistent_volume_claim is not None:
        name = source.persistent_volume_claim.claim_name
        found["persistentvolumeclaim", name] = "spec.model.source.persistentVolumeClaim.claimName"
    if source.hugging_face is not None and source.hugging_face.token_secret_ref is not None:
        found["secret", source.hugging_face.token_secret_ref.name] = "spec.model.source.huggingFace.tokenSecretRef"
    if source.object_store is not None and source.object_store.credentials_secret_ref is not None:
        name = source.object_store.credentials_secret_ref.name
        found["secret", name] = "spec.model.source.objectStore.credentialsSecretRef"
    cache = spec.model.cache
    if cache is not None and cache.persistent_volume_claim is not None:
        found["persistentvolumeclaim", cache.persistent_volume_claim] = "spec.model.cache.persistentVolumeClaim"
    if server.tls is not None:
        found["secret", server.tls.secret_name] = "spec.server.tls.secretName"
        found["volume", "tls"] = "spec.server.tls.secretName"
    if server.api_keys_secret_ref is not None:
        found["secret", server.api_keys_secret_ref.name] = "spec.server.apiKeysSecretRef"
        found["volume", "api-keys"] = "spec.server.apiKeysSecretRef"
    return found
