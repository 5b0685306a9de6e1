"""How files write the rotary embedding's base and scaling."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron_runtime.loading.checkpoint import UnsupportedModelError
from megatron_runtime.models.config import LinearScaling, Llama3Scaling, ModelConfig, RopeScaling
from megatron_runtime.models.families.base import Fields


def rope_of_hf(fields: Fields, *, theta: float) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the layers that see everything. theta: where the file gives none."""
    # transformers 5 writes rope_parameters, for each kind of layer where they differ; version 4 wrote rope_theta and
    # rope_scaling.
    values = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    values = values.get("full_attention", values)
    base = values.get("rope_theta") or fields.get("rope_theta", theta)
    return base, _scaling(values, fields.where)


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
    base = fields.get("rope.freq_base", theta)
    if kind == "none":
        return base, None
    if kind != "linear":
        raise UnsupportedModelError(f"{fields.where} has rope scaling {kind!r}: supported are 'none' and 'linear'")
    return base, LinearScaling(factor=fields.need("rope.scaling.factor"))


def _scaling(values: Mapping[str, Any], where: str) -> RopeScaling | None:
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(factor=values["factor"])
    if kind != "llama3":
        raise UnsupportedModelError(f"{where} has rope type {kind!r}: supported are 'default', 'linear' and 'llama3'")
    return Llama3Scaling(
        factor=values["factor"],
        low_freq_factor=values["low_freq_factor"],
        high_freq_factor=values["high_freq_factor"],
        original_max_position_embeddings=values["original_max_position_embeddings"],
    )
