"""vLLM engines: image, command line, environment, and the checks of arguments that the API server cannot make. Pure."""

from __future__ import annotations

from typing import Any

from megatron_operator.render.context import RenderContext, UnsupportedByBackend
from megatron_operator.render.options import Option
from megatron_operator.resource.spec import Backend
from megatron_operator.resource.text import printable
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.protocol.vllm_arguments import code_arguments, problem_of

MAX_CHARACTERS = 16_384
"""Limit of the arguments as JSON, which are a part of the command line."""
MAX_LEVELS = 16
_ENV = {
    "VLLM_CACHE_ROOT": "/cache/vllm",
    "FLASHINFER_WORKSPACE_BASE": "/cache/flashinfer",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
}
"""The root file system is read-only, so compiled code is cached on the cache volume. vLLM sends no telemetry."""


def engine_image(ctx: RenderContext) -> str | None:
    """Return the image of the engines; None for that of the other components."""
    engine = ctx.spec.engine
    if engine.backend is Backend.NATIVE:
        return engine.image
    return (engine.vllm.image if engine.vllm else None) or ctx.settings.vllm_runtime_image


def _arguments(ctx: RenderContext, _name: str) -> str | None:
    """Return the engine arguments as JSON; None for native engines.

    Raises:
        UnsupportedByBackend: with the first argument that vLLM engines do not accept.
    """
    if ctx.spec.engine.backend is Backend.NATIVE:
        return None
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


VLLM_OPTIONS = (
    Option("--backend", lambda ctx, _: None if ctx.spec.engine.backend is Backend.NATIVE else "vllm"),
    Option("--vllm-arguments", _arguments),
    Option("--vllm-allow-code", _loads_code),
)
"""Options of `megatron engine` that choose vLLM."""


def vllm_env(ctx: RenderContext) -> list[dict[str, Any]]:
    """Return the environment of vLLM engines; empty for native engines."""
    if ctx.spec.engine.backend is Backend.NATIVE:
        return []
    env: list[dict[str, Any]] = [{"name": name, "value": value} for name, value in _ENV.items()]
    if ctx.spec.pods_per_engine > 1:
        env.append({"name": "VLLM_HOST_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    return env


def vllm_arguments(ctx: RenderContext) -> dict[str, Any]:
    """Return `spec.engine.vllm.args`; empty without it."""
    return ctx.spec.engine.vllm.args if ctx.spec.engine.vllm else {}


def _levels(value: Any) -> int:
    entries = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    return 0 if entries is None else 1 + max(map(_levels, entries), default=0)
