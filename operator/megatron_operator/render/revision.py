"""ControllerRevision `NAME-rev-HASH`: the inputs from which the engines of one revision are rendered whole.

HASH is the revision: a digest of the rendered pod template, resolved image included. While an engine waits for its
turn in a rollout, whatever of it must be made again is rendered from here, never from the present spec.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from megatron_operator.model.resource import parse_spec
from megatron_operator.render.context import InvalidPodTemplate, Manifest, RenderContext, child, seal
from megatron_operator.render.engine import revision_of

KIND = "ControllerRevision"
API_VERSION = "apps/v1"
_SPEC_FIELDS: dict[str, Any] = {
    "model": True,
    "weights": True,
    "parallelism": True,
    "engine": True,
    "lifecycle": {"drain_seconds"},
}
"""What an engine's template depends on."""
_SETTINGS = ("runtime_image", "image_pull_policy", "security")


def revision_name(ctx: RenderContext, revision: str) -> str:
    return f"{ctx.name}-rev-{revision}"


def revision_child(ctx: RenderContext) -> Manifest:
    """The record of the revision that the spec renders to.

    Raises:
        InvalidPodTemplate: when the spec renders to none.
    """
    data = {
        "spec": ctx.spec.model_dump(mode="json", by_alias=True, include=_SPEC_FIELDS),
        "settings": {name: getattr(ctx.settings, name) for name in _SETTINGS},
    }
    # Revisions are told apart by content, not by order, so the mandatory number says nothing.
    return seal(child(ctx, KIND, revision_name(ctx, revision_of(ctx)), api_version=API_VERSION, data=data, revision=1))


def context_of(ctx: RenderContext, data: Mapping[str, Any], *, revision: str) -> RenderContext | None:
    """The context that a stored revision was rendered in; None when this operator renders its inputs otherwise, as
    after an upgrade that changed the template. An engine of such a revision is left as it is until its turn."""
    try:
        stored = parse_spec(data["spec"])
        # The policy accepted the inputs when they were recorded; a stricter one does not stop what runs since then.
        settings = replace(ctx.settings, **{name: data["settings"][name] for name in _SETTINGS}, pod_policy=None)
        found = replace(ctx, spec=stored, settings=settings)
        return found if revision_of(found) == revision else None
    except (KeyError, TypeError, ValidationError, InvalidPodTemplate):
        return None
