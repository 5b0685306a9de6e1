"""Checkpoints of models that the program has in memory, from Megatron-Core or transformers."""

from __future__ import annotations

from typing import Any

import torch

from megatron_runtime.checkpoints.source import ModelInMemory
from megatron_runtime.checkpoints.torch_dist.live_model import LiveModelCheckpoint, is_megatron_model, unwrapped
from megatron_runtime.models.config import ModelConfig, UnsupportedModelError
from megatron_runtime.models.families import FAMILIES, config_from_hf
from megatron_runtime.models.tensors import Checkpoint, Part, TensorKind


def model_in_memory(model: Any, *, ends: tuple[int, ...] = ()) -> ModelInMemory:
    """Return `model` as a source of weights. Do not change the weights while an engine loads them.

    model: a GPTModel from Megatron-Core, a causal language model from transformers in eval mode, or a Checkpoint.
    ends:  token ids that end an answer of a GPTModel, whose configuration has no such ids. Not used for other models.

    Raises UnsupportedModelError if `model` has another type.
    """
    if is_megatron_model(model):
        gpt = unwrapped(model)
        records = getattr(gpt.config, "moe_enable_routing_replay", False)
        return ModelInMemory(
            LiveModelCheckpoint(model, ends=ends),
            name=f"a {type(gpt).__name__}",
            reopen=lambda: LiveModelCheckpoint(model, ends=ends),
            records_routing=bool(gpt.config.num_moe_experts and records),
        )
    if isinstance(getattr(model, "config", None), ModelConfig) and callable(getattr(model, "read", None)):
        return ModelInMemory(model, name=type(model).__name__)
    if isinstance(model, torch.nn.Module) and hasattr(model, "config") and hasattr(model.config, "to_dict"):
        return ModelInMemory(_of_transformers(model), name=f"a {type(model).__name__}")
    raise UnsupportedModelError(
        f"model is {type(model).__module__}.{type(model).__name__}: want a GPTModel of Megatron-Core or a causal "
        "language model of transformers, or use from_pretrained() with a model reference"
    )


class TensorsInMemory(Checkpoint):
    """A checkpoint of tensors in memory, by their transformers names."""

    def __init__(self, config: ModelConfig, held: dict[str, torch.Tensor]) -> None:
        self.config = config
        self.kinds = {name: TensorKind(tuple(tensor.shape), tensor.dtype) for name, tensor in held.items()}
        self._held = held

    def read(self, name: str, part: Part = ()) -> torch.Tensor:
        return self._held[name][part]


def _of_transformers(model: torch.nn.Module) -> TensorsInMemory:
    if model.training:
        raise UnsupportedModelError("the model is in training mode: call model.eval() first")
    values: dict[str, Any] = model.config.to_dict()  # type: ignore[operator, union-attr]
    generation = getattr(model, "generation_config", None)
    ends = getattr(generation, "eos_token_id", None)
    if ends is None:
        ends = values.get("eos_token_id")
    config = config_from_hf(
        {**values, "architectures": values.get("architectures") or [type(model).__name__]},
        ends=() if ends is None else tuple(ends) if isinstance(ends, list) else (ends,),
        where="the model's configuration",
    )
    # As in save_pretrained(), leave out a head that is tied to the embedding.
    left_out = ("lm_head.weight",) if config.tie_embeddings else ()
    held: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if not name.endswith(("rotary_emb.inv_freq", *left_out)):
            held |= _one_by_one(name, tensor.detach(), config)
    return TensorsInMemory(config, held)


def _one_by_one(name: str, tensor: torch.Tensor, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Return the tensors that transformers saves for `tensor`, by name.

    transformers fuses experts in memory, but saves each expert as a separate tensor.
    """
    layer, _, what = name.partition(".mlp.")
    if config.moe is None or what not in ("gate.weight", "experts.gate_up_proj", "experts.down_proj"):
        return {name: tensor}
    family, at = FAMILIES[config.family], f"layers.{layer.rpartition('.')[2]}."
    if what == "gate.weight":
        return {family.hf_name(f"{at}router"): tensor}
    if what == "experts.down_proj":
        return {family.hf_name(f"{at}experts.{expert}.down"): one for expert, one in enumerate(tensor)}
    return {
        family.hf_name(f"{at}experts.{expert}.{half}"): one
        for expert, fused in enumerate(tensor)
        for half, one in zip(("gate", "up"), fused.chunk(2), strict=True)
    }
