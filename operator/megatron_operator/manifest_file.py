"""Reads resources from files for `render` and `plan`, and validates them like the API server."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from megatron_operator.render.context import RenderContext
from megatron_operator.resource.base import require
from megatron_operator.resource.names import API_VERSION, KIND
from megatron_operator.resource.release import Release
from megatron_operator.resource.settings import Settings
from megatron_operator.resource.spec import ADAPTER_NAME_RULE, NAME_RULES, MegatronInferenceSpec, parse_spec
from megatron_operator.resource.text import printable

DEFAULT_NAMESPACE = "default"
NO_UID = "00000000-0000-0000-0000-000000000000"


class ResourceFileError(ValueError):
    """A file contains no valid custom resource. The message names the file, the field and the remedy."""


@dataclass(frozen=True, slots=True)
class ResourceFile:
    """One custom resource, read from a file.

    namespace, uid: empty if the file has no such field. A resource has no UID before its first apply.
    """

    name: str
    namespace: str
    uid: str
    spec: MegatronInferenceSpec
    release: Release | None
    """`status.release`, if the resource has a status."""

    def context(self, settings: Settings) -> RenderContext:
        return RenderContext(self.name, self.namespace or DEFAULT_NAMESPACE, self.uid or NO_UID, self.spec, settings)

    def present_context(self, settings: Settings) -> RenderContext:
        """Return the context that renders the children as they are now.

        The context has the release in the resource's status, or the release of `settings` if the status has none.
        """
        return self.context(settings if self.release is None else self.release.settings(settings))

    def applied_to(self, present: ResourceFile) -> ResourceFile:
        """Return the resource that results if this file is applied to the resource `present`.

        Raises:
            ResourceFileError: the file describes another resource.
        """
        ours, theirs = ((each.namespace or present.namespace or self.namespace, each.name) for each in (self, present))
        if ours != theirs:
            raise ResourceFileError(f"{'/'.join(theirs)} is not the resource of the file, {'/'.join(ours)}")
        return replace(self, namespace=present.namespace, uid=present.uid, release=present.release)


def describe(error: ValidationError) -> str:
    """Return all errors of a spec, one per line, as `spec.path: message`."""
    lines = []
    for fault in error.errors():
        message = fault["msg"].removeprefix("Value error, ")
        path = ".".join(["spec", *(str(part) for part in fault["loc"])])
        lines.append(
            printable(message if message.startswith("spec.") else f"{path}: {message} (is {fault['input']!r})")
        )
    return "\n".join(lines)


def read_resource(path: Path) -> ResourceFile:
    """Return the only MegatronInference in a YAML file.

    Raises:
        ResourceFileError: the file has no MegatronInference, several of them, or an invalid one.
    """
    try:
        documents = [entry for entry in yaml.safe_load_all(path.read_bytes()) if entry is not None]
    except (OSError, yaml.YAMLError) as error:
        raise ResourceFileError(f"{path}: cannot be read as YAML: {error}") from error
    resources = [entry for entry in documents if isinstance(entry, dict) and entry.get("kind") == KIND]
    if len(resources) != 1:
        raise ResourceFileError(f"{path}: holds {len(resources)} objects of kind {KIND}; give exactly one")
    return resource_of(resources[0], origin=str(path))


def resource_of(manifest: dict[str, Any], *, origin: str) -> ResourceFile:
    """Return the resource that a manifest from a file or the API server describes.

    Args:
        origin: source of the manifest, for messages.

    Raises:
        ResourceFileError: the manifest is invalid.
    """
    if manifest.get("apiVersion") != API_VERSION:
        raise ResourceFileError(f"{origin}: apiVersion: is {manifest.get('apiVersion')!r}; use {API_VERSION}")
    metadata = manifest.get("metadata") or {}
    try:
        require(NAME_RULES, metadata.get("name", ""))
        spec = parse_spec(manifest.get("spec") or {})
        require([ADAPTER_NAME_RULE], (metadata["name"], spec))
    except ValidationError as error:
        raise ResourceFileError(f"{origin}:\n{describe(error)}") from error
    except ValueError as error:
        raise ResourceFileError(f"{origin}: {error}") from error
    return ResourceFile(
        name=metadata["name"],
        namespace=metadata.get("namespace", ""),
        uid=metadata.get("uid", ""),
        spec=spec,
        release=Release.from_status((manifest.get("status") or {}).get("release")),
    )
