"""The release of a resource: the images and other settings that its pods use from one operator installation.

A resource keeps its release when the operator is upgraded, until the resource itself is updated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import Field, ValidationError

from megatron_operator.resource.base import ApiModel
from megatron_operator.resource.engine import Backend
from megatron_operator.resource.settings import Settings
from megatron_runtime.protocol import strict_json as json


class Release(ApiModel):
    """The images and other settings that a resource uses, as in `status.release`.

    vllm_runtime_image: None if the resource has no vLLM engines.
    """

    version: str = Field(description="Version of the operator that the release came with.")
    coordinator_image: str = Field(description="Image of the coordinator.")
    runtime_image: str = Field(description="Image of servers, and of native engines without spec.engine.image.")
    vllm_runtime_image: str | None = Field(
        default=None, description="Image of vLLM engines without spec.engine.vllm.image."
    )
    image_pull_policy: str = Field(description="Pull policy of the images.")

    @classmethod
    def of(cls, settings: Settings, backend: Backend) -> Release:
        """Return the release that these settings define for a resource with engines of this backend."""
        return cls(
            version=settings.version,
            coordinator_image=settings.coordinator_image,
            runtime_image=settings.runtime_image,
            vllm_runtime_image=settings.vllm_runtime_image if backend is Backend.VLLM else None,
            image_pull_policy=settings.image_pull_policy,
        )

    @classmethod
    def from_status(cls, stored: Any) -> Release | None:
        """Return the release that a status records. Returns None if the status has no valid release.

        Fields of later operators are ignored.
        """
        if not isinstance(stored, Mapping):
            return None
        known = {field.alias for field in cls.model_fields.values()}
        try:
            return cls.model_validate({name: value for name, value in stored.items() if name in known})
        except ValidationError:
            return None

    @classmethod
    def from_annotation(cls, text: str) -> Release | None:
        """Return the release with which a child was rendered, from its annotation.

        Returns None if the annotation has no valid release.
        """
        try:
            return cls.from_status(json.loads(text))
        except ValueError:
            return None

    def to_status(self) -> dict[str, Any]:
        return self.model_dump(mode="json", exclude_none=True)

    def to_annotation(self) -> str:
        return json.dumps(self.to_status(), sort_keys=True, separators=(",", ":"))

    def for_backend(self, backend: Backend, default: str) -> Release:
        """Return this release with an image for vLLM engines if `backend` is vLLM, otherwise without one.

        The backend may have changed since the release was recorded.

        default: image for vLLM engines if this release has none.
        """
        image = (self.vllm_runtime_image or default) if backend is Backend.VLLM else None
        return self.model_copy(update={"vllm_runtime_image": image})

    def settings(self, installed: Settings) -> Settings:
        """Return the settings for rendering the children of a resource that has this release.

        installed: settings of the operator installation.
        """
        fields = {name: value for name, value in dict(self).items() if value is not None}
        return replace(installed, **fields, installed_images=installed.runtime_images)

    def differences(self, other: Release) -> str:
        """Return the fields in which `other` differs from this release, as `field: old -> new`."""
        mine, others = dict(self), dict(other)
        changed = (name for name in mine if mine[name] != others[name])
        return ", ".join(f"{name.replace('_', ' ')}: {mine[name]} -> {others[name]}" for name in changed)


def is_older(version: str, than: str) -> bool:
    """Return whether `version` is older than `than`. Only the numbers at the beginning of versions are compared."""
    return _numbers(version) < _numbers(than)


def _numbers(version: str) -> tuple[int, ...]:
    numbers: list[int] = []
    for part in version.lstrip("v").split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)
