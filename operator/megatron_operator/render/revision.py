"""ControllerRevision `NAME-rev-HASH`, which records the inputs from which the engines of one revision are rendered.

HASH is the revision, a digest of the rendered pod template with the resolved image. If an object of an engine is
missing, the operator renders the object from this record. The current spec applies to an engine only after a rollout
has replaced the engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from megatron_operator.render.context import Manifest, RenderContext, RenderError, child, seal
from megatron_operator.render.engine import revision_of
from megatron_operator.resource.engine import Backend
from megatron_operator.resource.names import REVISION_KIND as KIND
from megatron_operator.resource.spec import MegatronInferenceSpec, parse_stored_spec

API_VERSION = "apps/v1"
_SPEC_FIELDS: dict[str, Any] = {
    "model": True,
    "weights": True,
    "parallelism": True,
    "engine": True,
    "lifecycle": {"drain_seconds"},
}
"""Fields of the spec that are inputs of an engine's pod template."""
_NOT_IN_TEMPLATE: dict[str, Any] = {
    "model": {"adapters"},
    "engine": {"roles": {"prefill": {"replicas", "per_decode"}}},
}
_SETTINGS = ("runtime_image", "image_pull_policy", "security")
_VLLM_SETTINGS = (*_SETTINGS, "vllm_runtime_image")


def revision_name(ctx: RenderContext, revision: str) -> str:
    return f"{ctx.name}-rev-{revision}"


def revision_child(ctx: RenderContext) -> Manifest:
    """Return the ControllerRevision that records the revision of the spec.

    Raises:
        RenderError: the spec cannot be rendered.
    """
    data = {
        "spec": _inputs(ctx.spec),
        "settings": {name: getattr(ctx.settings, name) for name in _recorded(ctx.spec)},
    }
    # Revisions are identified by content, not by order, so the mandatory number has no meaning.
    return seal(child(ctx, KIND, revision_name(ctx, revision_of(ctx)), api_version=API_VERSION, data=data, revision=1))


def _inputs(spec: MegatronInferenceSpec) -> dict[str, Any]:
    inputs = spec.model_dump(mode="json", by_alias=True, include=_SPEC_FIELDS, exclude=_NOT_IN_TEMPLATE)
    # These defaults are left out, because the records of earlier releases lack them.
    if inputs["engine"]["roles"] is None:
        del inputs["engine"]["roles"]
    vllm = inputs["engine"]["vllm"]
    if vllm is not None and not vllm["allowNixlBetweenPods"]:
        del vllm["allowNixlBetweenPods"]
    return inputs


def has_inputs(ctx: RenderContext, data: Mapping[str, Any]) -> bool:
    """Return whether a stored revision has the same inputs as the current spec. Rendered templates are not compared."""
    try:
        same_security = data["settings"]["security"] == ctx.settings.security
        return same_security and _inputs(parse_stored_spec(data["spec"])[0]) == _inputs(ctx.spec)
    except (KeyError, TypeError, ValidationError):
        return False


def downloads(data: Mapping[str, Any]) -> bool:
    """Return whether the engines of a stored revision download their model."""
    try:
        return parse_stored_spec(data["spec"])[0].model.source.downloads
    except (KeyError, TypeError, ValidationError):
        return False


def _recorded(spec: MegatronInferenceSpec) -> tuple[str, ...]:
    """Return the names of the operator's settings on which an engine's template depends."""
    return _SETTINGS if spec.engine.backend is Backend.NATIVE else _VLLM_SETTINGS


def context_of(ctx: RenderContext, data: Mapping[str, Any], *, revision: str) -> RenderContext | None:
    """Return the render context of a stored revision.

    Return None if `data` is invalid, or if this operator renders `data` to another revision, for example because an
    upgrade changed the template. Engines of such a revision do not change until a rollout replaces them.
    """
    try:
        stored, _ = parse_stored_spec(data["spec"])
        # The policy accepted the inputs when they were recorded; a stricter policy does not affect running engines.
        settings = replace(
            ctx.settings, **{name: data["settings"][name] for name in _recorded(stored)}, pod_policy=None
        )
        found = replace(ctx, spec=stored, settings=settings)
        return found if revision_of(found) == revision else None
    except (KeyError, TypeError, ValidationError, RenderError):
        return None
