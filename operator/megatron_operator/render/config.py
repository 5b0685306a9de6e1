"""ConfigMap `NAME-config-HASH`: environment variables of all containers. Its name has the hash of its content, so a
change reaches a pod only by a change of the pod's template."""

from __future__ import annotations

from megatron_operator.render.context import Manifest, RenderContext, child, digest, once, seal


def config_data(ctx: RenderContext) -> dict[str, str]:
    """Return the variables. Caches are on the pod's writable cache volume."""
    # The default is left out: it restarts no pod of a resource that an earlier release rendered.
    log_format = ctx.settings.runtime_log_format
    logs = {} if log_format == "text" else {"MEGATRON_LOG_FORMAT": log_format}
    return {
        **logs,
        "HOME": "/tmp",
        "HF_HOME": "/cache/huggingface",
        "TRITON_CACHE_DIR": "/cache/triton",
        "TORCHINDUCTOR_CACHE_DIR": "/cache/inductor",
        "XDG_CACHE_HOME": "/cache",
        "MEGATRON_RESOURCE": f"{ctx.namespace}/{ctx.name}",
        "PYTHONUNBUFFERED": "1",
    }


@once
def config_name(ctx: RenderContext) -> str:
    return f"{ctx.name}-config-{digest(config_data(ctx))}"


def config_map(ctx: RenderContext) -> Manifest:
    return seal(child(ctx, "ConfigMap", config_name(ctx), immutable=True, data=config_data(ctx)))
