"""vLLM engines: their image, command line and environment, and the argument checks that the API server cannot make."""

from __future__ import annotations

from typing import Any

from megatron_operator.render.context import RenderContext, UnsupportedByBackend
from megatron_operator.render.options import Option, of_field
from megatron_operator.render.pod import quantity_bytes
from megatron_operator.resource.engine import Backend, EngineSpec, SleepLevel, SpeculativeMethod
from megatron_operator.resource.text import printable
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.protocol.vllm_arguments import code_arguments, problem_of

MAX_CHARACTERS = 16_384
"""Maximum length of the arguments as JSON, because they are a part of the command line."""
MAX_LEVELS = 16
_METHODS = {
    SpeculativeMethod.NGRAM: "ngram",
    SpeculativeMethod.SUFFIX: "suffix",
    SpeculativeMethod.MTP: "mtp",
    SpeculativeMethod.EAGLE: "eagle",
    SpeculativeMethod.EAGLE3: "eagle3",
    SpeculativeMethod.DRAFT_MODEL: "draft_model",
}
_SLEEP_LEVELS = {SleepLevel.HOST_MEMORY: "1", SleepLevel.DISCARD: "2"}
_ENV = {
    "VLLM_CACHE_ROOT": "/cache/vllm",
    "FLASHINFER_WORKSPACE_BASE": "/cache/flashinfer",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
"""Environment of vLLM. The root file system is read-only, so compiled code is cached on the cache volume. vLLM sends no
telemetry.
"""


def engine_image(ctx: RenderContext) -> str | None:
    """Return the image of the engines, or None if they use the image of the other components."""
    engine = ctx.spec.engine
    if engine.backend is Backend.NATIVE:
        return engine.image
    return (engine.vllm.image if engine.vllm else None) or ctx.settings.vllm_runtime_image


def _arguments(ctx: RenderContext, _name: str) -> str | None:
    """Return the engine arguments of vLLM as JSON, or None for native engines.

    Raises:
        UnsupportedByBackend: an argument is not allowed, or the JSON is too long. The message names one argument.
    """
    if ctx.spec.engine.backend is Backend.NATIVE:
        return None
    given = ctx.spec.engine.vllm.args if ctx.spec.engine.vllm else {}
    for field, set_by_field in _of_fields(ctx.spec.engine).items():
        for name in sorted(set_by_field.keys() & given.keys()):
            raise UnsupportedByBackend(f"spec.engine.vllm.args.{name} conflicts with spec.engine.{field}: remove one")
    if ctx.spec.engine.roles is not None and "kv_transfer_config" in given:
        raise UnsupportedByBackend(
            "spec.engine.vllm.args.kv_transfer_config conflicts with spec.engine.roles: remove one"
        )
    arguments = vllm_arguments(ctx)
    canonical = json.dumps(arguments, sort_keys=True, separators=(",", ":"))
    if len(canonical) > MAX_CHARACTERS or _levels(arguments) > MAX_LEVELS:
        raise UnsupportedByBackend(
            f"spec.engine.vllm.args: has {len(canonical)} characters as JSON in {_levels(arguments)} levels; at most "
            f"{MAX_CHARACTERS} characters in {MAX_LEVELS} levels are allowed; shorten it"
        )
    problem = problem_of(arguments, allow_code=True)  # the pod policy decides on code
    if problem is not None:
        raise UnsupportedByBackend(f"spec.engine.vllm.args.{printable(problem)}")
    return canonical.replace("$", "\\u0024")


def _loads_code(ctx: RenderContext, _name: str) -> bool:
    return ctx.spec.engine.backend is not Backend.NATIVE and bool(code_arguments(vllm_arguments(ctx)))


def uses_nixl(ctx: RenderContext) -> bool:
    """Return whether the engines exchange KV by NIXL."""
    return ctx.spec.engine.backend is Backend.VLLM and ctx.spec.engine.roles is not None


VLLM_OPTIONS = (
    Option("--backend", lambda ctx, _: None if ctx.spec.engine.backend is Backend.NATIVE else "vllm"),
    Option("--vllm-arguments", _arguments),
    Option("--vllm-allow-code", _loads_code),
    Option("--vllm-allow-nixl", lambda ctx, _: uses_nixl(ctx)),
    of_field("--vllm-sleep-level", "engine.vllm.sleep_level", write=_SLEEP_LEVELS.__getitem__),
)
"""Options of `megatron engine` that choose vLLM."""


def vllm_env(ctx: RenderContext) -> list[dict[str, Any]]:
    """Return the environment variables of vLLM engines and their servers. Returns an empty list for native engines."""
    if ctx.spec.engine.backend is Backend.NATIVE:
        return []
    env: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in _ENV.items()]
    if ctx.spec.pods_per_engine > 1:
        env.append({"name": "VLLM_HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    return env


def vllm_arguments(ctx: RenderContext) -> dict[str, Any]:
    """Return the vLLM arguments from `spec.engine.vllm.args` and from other fields of `spec.engine`."""
    engine = ctx.spec.engine
    arguments = engine.vllm.args if engine.vllm else {}
    return {**arguments, **{name: value for each in _of_fields(engine).values() for name, value in each.items()}}


def _of_fields(engine: EngineSpec) -> dict[str, dict[str, Any]]:
    """Return the vLLM arguments that fields of `spec.engine` define, by name of the field."""
    found: dict[str, dict[str, Any]] = {}
    if engine.kv_offload is not None:
        gib = quantity_bytes(engine.kv_offload.cpu_memory) / (1 << 30)
        found["kvOffload"] = {"kv_offloading_backend": "native", "kv_offloading_size": gib}
    if engine.quantization is not None:
        found["quantization"] = {"quantization": engine.quantization}
    if (speculative := engine.speculative) is not None:
        config = {"method": _METHODS[speculative.method], "num_speculative_tokens": speculative.tokens}
        model = {} if speculative.model is None else {"model": speculative.model}
        found["speculative"] = {"speculative_config": {**config, **model}}
    return found


def _levels(value: Any) -> int:
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if entries is None else 1 + max(map(_levels, entries), default=0)
