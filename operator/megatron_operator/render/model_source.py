"""Source of the weights: the `--model` argument, volumes and environment of engines and servers."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from megatron_operator.render.context import RenderContext, digest, once
from megatron_operator.render.pod import MODEL_DIR
from megatron_operator.render.vllm import vllm_arguments

_VLLM_MODEL = ("hf_overrides", "quantization")
"""Arguments of vLLM that make another model of the same files."""


def _filled(ctx: RenderContext, path: str) -> str:
    revision = ctx.spec.weights.revision if ctx.spec.weights else ""
    return path.replace("{revision}", revision)


def model_argument(ctx: RenderContext) -> str:
    """Return `builtin:NAME`, `hf:ORG/NAME[@REVISION]`, or a path in the pod."""
    source = ctx.spec.model.source
    if source.builtin is not None:
        return f"builtin:{source.builtin}"
    if source.hugging_face is not None:
        weights = ctx.spec.weights
        revision = source.hugging_face.revision or (weights.revision if weights else None)
        return f"hf:{source.hugging_face.repo}" + (f"@{revision}" if revision else "")
    path = source.path or "/"
    return (MODEL_DIR + _filled(ctx, path)).rstrip("/")


def model_volumes(ctx: RenderContext) -> tuple[dict[str, Any], ...]:
    source = ctx.spec.model.source
    if source.persistent_volume_claim is not None:
        claim = {"claimName": source.persistent_volume_claim.claim_name, "readOnly": True}
        return ({"name": "model", "persistentVolumeClaim": claim},)
    if source.image is not None:
        return ({"name": "model", "image": {"reference": source.image.reference, "pullPolicy": "IfNotPresent"}},)
    return ()


def model_mounts(ctx: RenderContext) -> tuple[dict[str, Any], ...]:
    return ({"name": "model", "mountPath": MODEL_DIR, "readOnly": True},) if model_volumes(ctx) else ()


def model_env(ctx: RenderContext) -> list[dict[str, Any]]:
    source = ctx.spec.model.source.hugging_face
    if source is None or source.token_secret_ref is None:
        return []
    ref = source.token_secret_ref
    return [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": ref.name, "key": ref.key}}}]


@once
def without_weights(ctx: RenderContext) -> RenderContext:
    """Return the context without the revision of the weights, which are updated in place."""
    return replace(ctx, spec=ctx.spec.model_copy(update={"weights": None}))


def weights_revision(ctx: RenderContext) -> str:
    """Return the revision of the weights of `model_argument`; empty without one."""
    return ctx.spec.weights.revision if ctx.spec.weights else ""


@once
def model_hash(ctx: RenderContext) -> str:
    """Return the hash of the model. It changes exactly if the new model must not continue tokens of the old one. Other
    weights of one model may continue them: epochs label the tokens."""
    model, arguments = ctx.spec.model, vllm_arguments(ctx)
    changed = {name: arguments[name] for name in _VLLM_MODEL if name in arguments}
    return digest(
        [
            *(model_argument(without_weights(ctx)), model_volumes(ctx)),
            *(model.format, model.dtype, model.max_sequence_length),
            *([changed] if changed else []),
        ]
    )
