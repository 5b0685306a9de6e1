"""How files write the rotary embedding's base and scaling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from megatron_runtime.models.config import LinearScaling, Llama3Scaling, ModelConfig, RopeScaling, UnsupportedModelError
from megatron_runtime.models.families.base import Fields
from megatron_runtime.protocol.text import shown

_TOLERANCE = 1e-3
"""Of factors that were computed in float32."""


def rope_of_hf(fields: Fields, *, theta: float) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the layers that see everything. theta: where the file gives none."""
    # transformers 5 writes rope_parameters, for each kind of layer where they differ; version 4 wrote rope_theta and
    # rope_scaling.
    values = fields.below("rope_parameters" if fields.get("rope_parameters") else "rope_scaling")
    if "full_attention" in values.values:
        values = values.below("full_attention")
    base = values if values.get("rope_theta") else fields
    return base.constant("rope_theta", theta), _scaling(values)


def rope_to_hf(config: ModelConfig) -> dict[str, Any]:
    """config.json's fields, in the form that both versions of transformers read."""
    scaling: dict[str, Any] | None = None
    if isinstance(config.rope_scaling, Llama3Scaling):
        own = config.rope_scaling
        scaling = {
            "rope_type": "llama3",
            "factor": own.factor,
            "low_freq_factor": own.low_freq_factor,
            "high_freq_factor": own.high_freq_factor,
            "original_max_position_embeddings": own.original_max_position_embeddings,
        }
    elif isinstance(config.rope_scaling, LinearScaling):
        scaling = {"rope_type": "linear", "factor": config.rope_scaling.factor}
    return {"rope_theta": config.rope_theta, "rope_scaling": scaling}


def rope_of_gguf(fields: Fields, *, theta: float) -> tuple[float, RopeScaling | None]:
    kind = fields.get("rope.scaling.type", "none")
    base = fields.constant("rope.freq_base", theta)
    if kind == "none":
        return base, None
    if kind != "linear":
        raise UnsupportedModelError(f"{fields.where} has rope scaling {shown(kind)}: supported are 'none' and 'linear'")
    return base, LinearScaling(factor=fields.constant("rope.scaling.factor"))


def scaling_of_factors(factors: Sequence[float], *, theta: float, head_dim: int, where: str) -> Llama3Scaling:
    """The scaling that divides the frequency of each rotary pair by these factors.

    GGUF files hold what the scaling comes to, not its constants; all Llama 3 have the same but for the factor. Raises
    UnsupportedModelError for factors of another kind.
    """
    if not factors or not all(0 < factor < math.inf for factor in factors):
        raise UnsupportedModelError(f"tensor 'rope_freqs.weight' of {where} has a value that is no factor above zero")
    found = Llama3Scaling(
        factor=round(max(factors), 3), low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    for pair, factor in enumerate(factors):
        turns = found.original_max_position_embeddings * theta ** (-2 * pair / head_dim) / (2 * math.pi)
        blend = (turns - found.low_freq_factor) / (found.high_freq_factor - found.low_freq_factor)
        blend = min(max(blend, 0.0), 1.0)
        if abs(factor * ((1 - blend) / found.factor + blend) - 1) > _TOLERANCE:
            raise UnsupportedModelError(
                f"tensor 'rope_freqs.weight' of {where} divides the frequency of pair {pair} by {factor}: supported "
                f"is the scaling of Llama 3, which comes to {1 / ((1 - blend) / found.factor + blend):.4g}"
            )
    return found


def _scaling(values: Fields) -> RopeScaling | None:
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(factor=values.constant("factor"))
    if kind != "llama3":
        raise UnsupportedModelError(
            f"{values.where} has rope type {shown(kind)}: supported are 'default', 'linear' and 'llama3'"
        )
    return Llama3Scaling(
        factor=values.constant("factor"),
        low_freq_factor=values.constant("low_freq_factor"),
        high_freq_factor=values.constant("high_freq_factor"),
        original_max_position_embeddings=values.size("original_max_position_embeddings"),
    )
