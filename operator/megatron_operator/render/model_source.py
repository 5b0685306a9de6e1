"""Converts the source of the weights to the `--model` argument, volumes and environment of engines and servers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from megatron_operator.render.context import MODEL_CACHE, RenderContext, digest, once
from megatron_operator.render.pod import MODEL_CACHE_DIR, MODEL_DIR
from megatron_operator.render.vllm import vllm_arguments
from megatron_operator.resource.names import FETCH, PORT_HEALTH
from megatron_operator.resource.spec import MegatronInferenceSpec
from megatron_runtime.protocol.adapters import Adapter

OBJECT_STORE_VARIABLES = {
    "s3": (
        *("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_REGION", "AWS_ENDPOINT_URL"),
        "AWS_SKIP_SIGNATURE",
    ),
    "gs": ("GOOGLE_SERVICE_ACCOUNT_KEY", "GOOGLE_BASE_URL", "GOOGLE_SKIP_SIGNATURE"),
    "az": (
        *("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ACCOUNT_KEY", "AZURE_STORAGE_SAS_TOKEN"),
        *("AZURE_STORAGE_CLIENT_ID", "AZURE_STORAGE_CLIENT_SECRET", "AZURE_STORAGE_TENANT_ID"),
        *("AZURE_STORAGE_ENDPOINT", "AZURE_SKIP_SIGNATURE"),
    ),
    "https": (),
}
"""Keys that are read from the Secret of an object store, by the scheme of its URL."""
_VLLM_MODEL = ("hf_overrides", "quantization")
"""Arguments of vLLM that turn the same files into another model."""


def _filled(ctx: RenderContext, path: str) -> str:
    return path.replace("{revision}", weights_revision(ctx))


def model_argument(ctx: RenderContext) -> str:
    """Return the value of `--model`.

    The value is `builtin:NAME`, `hf:ORG/NAME[@REVISION]`, the URL of an object store, or a path in the pod.
    """
    source = ctx.spec.model.source
    if source.builtin is not None:
        return f"builtin:{source.builtin}"
    if source.hugging_face is not None:
        revision = source.hugging_face.revision or weights_revision(ctx)
        return f"hf:{source.hugging_face.repo}" + (f"@{revision}" if revision else "")
    if source.object_store is not None:
        return _filled(ctx, source.object_store.url).rstrip("/")
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
    """Return the environment variables with credentials for the source of the model.

    Each variable of an object store has its value from one key of the Secret, and is unset if the key is missing. If
    the whole Secret were imported (`envFrom`), it could set any variable.
    """
    source = ctx.spec.model.source
    if source.hugging_face is not None and source.hugging_face.token_secret_ref is not None:
        ref = source.hugging_face.token_secret_ref
        return [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": ref.name, "key": ref.key}}}]
    if source.object_store is None or source.object_store.credentials_secret_ref is None:
        return []
    name, scheme = source.object_store.credentials_secret_ref.name, source.object_store.url.partition(":")[0]
    return [
        {"name": key, "valueFrom": {"secretKeyRef": {"name": name, "key": key, "optional": True}}}
        for key in OBJECT_STORE_VARIABLES[scheme]
    ]


def cache_volumes(ctx: RenderContext) -> tuple[dict[str, Any], ...]:
    cache = ctx.spec.model.cache
    if cache is None:
        return ()
    if cache.persistent_volume_claim is not None:
        return ({"name": MODEL_CACHE, "persistentVolumeClaim": {"claimName": cache.persistent_volume_claim}},)
    return ({"name": MODEL_CACHE, "hostPath": {"path": cache.host_path, "type": "Directory"}},)


def cache_mounts(ctx: RenderContext) -> tuple[dict[str, Any], ...]:
    return ({"name": MODEL_CACHE, "mountPath": MODEL_CACHE_DIR, "readOnly": True},) if ctx.spec.model.cache else ()


def cache_env(ctx: RenderContext) -> list[dict[str, Any]]:
    return [{"name": "MEGATRON_MODEL_CACHE", "value": MODEL_CACHE_DIR}] if ctx.spec.model.cache else []


def fetch_containers(ctx: RenderContext) -> tuple[dict[str, Any], ...]:
    """Return the init container that downloads the model to the cache, or waits while another pod downloads it.

    Returns an empty tuple if the spec has no cache. Only this container can write to the cache. It has the operator's
    runtime image, whatever image the engines have.
    """
    if ctx.spec.model.cache is None:
        return ()
    container = {
        "name": FETCH,
        "image": ctx.settings.runtime_image,
        "args": [
            *("fetch", model_argument(ctx), "--cache", MODEL_CACHE_DIR),
            *("--progress-port", str(PORT_HEALTH)),
        ],
        "env": model_env(ctx),
        "resources": {"requests": {"cpu": "250m", "memory": "256Mi"}, "limits": {"memory": "2Gi"}},
        "volumeMounts": [{"name": MODEL_CACHE, "mountPath": MODEL_CACHE_DIR}],
    }
    return (container,)


@once
def without_weights(ctx: RenderContext) -> RenderContext:
    """Return the context without the revision of the weights. Weights are updated in place, without a rollout."""
    return ctx if ctx.spec.has_trainer else replace(ctx, spec=ctx.spec.model_copy(update={"weights": None}))


def model_adapters(spec: MegatronInferenceSpec) -> tuple[Adapter, ...]:
    """Return the adapters of a spec, sorted by name, with the sources that engines load."""
    found = []
    for adapter in spec.model.adapters or ():
        repository, path = adapter.source.hugging_face, adapter.source.path
        source = f"{MODEL_DIR}{path}"
        if repository is not None:
            source = f"hf:{repository.repo}" + (f"@{repository.revision}" if repository.revision else "")
        found.append(Adapter(adapter.name, source))
    return tuple(sorted(found, key=lambda adapter: adapter.name))


def adapters_digest(adapters: Iterable[Adapter]) -> str:
    """Return a hash of a list of adapters. The hash does not depend on the order of the list."""
    return digest(sorted([adapter.name, adapter.source] for adapter in adapters))


def weights_revision(ctx: RenderContext) -> str:
    """Return the revision of the weights that pods load, or an empty string if the spec names no revision."""
    return ctx.spec.weights_revision


@once
def model_hash(ctx: RenderContext) -> str:
    """Return the hash of the model. The hash changes if, and only if, the new model must not continue tokens of the old
    model.

    Other weights of the same model have the same hash and may continue tokens, because epochs label the tokens.
    """
    model, arguments = ctx.spec.model, vllm_arguments(ctx)
    changed = {name: arguments[name] for name in _VLLM_MODEL if name in arguments}
    return digest(
        [
            *(model_argument(without_weights(ctx)), model_volumes(ctx)),
            *(model.format, model.dtype, ctx.spec.max_sequence_length),
            *([changed] if changed else []),
        ]
    )
