"""Models in the memory of the program as checkpoints: of Megatron-Core, of transformers, or a DecoderModel."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from megatron_runtime.checkpoints.source import ModelInMemory
from megatron_runtime.checkpoints.torch_dist.live_model import LiveModelCheckpoint, is_megatron_model, unwrapped
from megatron_runtime.models.config import ModelConfig, UnsupportedModelError
from megatron_runtime.models.decoder import DecoderModel, FeedForward, LayerWeights
from megatron_runtime.models.families import FAMILIES, config_from_hf
from megatron_runtime.models.tensors import Checkpoint, Part, TensorKind


def model_in_memory(model: Any, *, ends: tuple[int, ...] = ()) -> ModelInMemory:
    """Return `model` as a source of weights. The engine copies the weights; do not change them while it loads.

    model: a GPTModel of Megatron-Core, a causal language model of transformers in eval mode, a complete DecoderModel,
           or a Checkpoint.
    ends:  token ids that end an answer of a GPTModel, whose configuration has none; other models have their own.

    Raises UnsupportedModelError for anything else.
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
    if isinstance(model, DecoderModel):
        return ModelInMemory(TensorsInMemory(model.config, dict(_own_tensors(model))), name="a DecoderModel")
    if isinstance(getattr(model, "config", None), ModelConfig) and callable(getattr(model, "read", None)):
        return ModelInMemory(model, name=type(model).__name__)
    if isinstance(model, torch.nn.Module) and hasattr(model, "config") and hasattr(model.config, "to_dict"):
        return ModelInMemory(_of_transformers(model), name=f"a {type(model).__name__}")
    raise UnsupportedModelError(
        f"model is {type(model).__module__}.{type(model).__name__}: want a GPTModel of Megatron-Core, a causal "
        "language model of transformers or a DecoderModel, or use from_pretrained() with a model reference"
    )


class TensorsInMemory(Checkpoint):
    """Tensors by their transformers names."""

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
    # As in save_pretrained(): a head that is tied to the embedding is not a separate tensor.
    left_out = ("lm_head.weight",) if config.tie_embeddings else ()
    held: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if not name.endswith(("rotary_emb.inv_freq", *left_out)):
            held |= _one_by_one(name, tensor.detach(), config)
    return TensorsInMemory(config, held)


def _one_by_one(name: str, tensor: torch.Tensor, config: ModelConfig) -> dict[str, torch.Tensor]:
    """Return the tensors that transformers saves for `tensor`: experts are fused in memory and separate in files."""
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


def _own_tensors(model: DecoderModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors of the fused weights by their names in transformers."""
    config, weights = model.config, model.weights
    if weights.embedding is None or weights.norm_D is None or weights.head_WD is None:
        raise UnsupportedModelError("the DecoderModel holds only a part of its model: give a complete one")
    family = FAMILIES[config.family]
    yield family.hf_name("embedding"), weights.embedding.dense()
    for number, layer in enumerate(weights.layers):
        for name, tensor in _of_layer(layer, config):
            yield family.hf_name(f"layers.{number}.{name}"), tensor
    yield family.hf_name("norm"), weights.norm_D / config.logit_scale - config.norm_weight_offset
    if not config.tie_embeddings:
        yield family.hf_name("head"), weights.head_WD.dense()


def _of_layer(layer: LayerWeights, config: ModelConfig) -> Iterator[tuple[str, torch.Tensor]]:
    rows = [config.num_heads * config.head_dim, *[config.num_kv_heads * config.head_dim] * 2]
    if config.fused:
        yield "qkv", layer.qkv_QD.dense()
    else:
        yield from zip("qkv", layer.qkv_QD.dense().split(rows), strict=True)
    if layer.qkv_bias_Q is not None:
        yield from zip(("q_bias", "k_bias", "v_bias"), layer.qkv_bias_Q.split(rows), strict=True)
    yield "output", layer.output_DH.dense()
    for name, norm in (
        ("attention_norm", layer.attention_norm_D),
        ("q_norm", layer.q_norm_C),
        ("k_norm", layer.k_norm_C),
        ("attention_output_norm", layer.attention_output_norm_D),
        ("mlp_norm", layer.mlp_norm_D),
        ("mlp_output_norm", layer.mlp_output_norm_D),
    ):
        if norm is not None:
            yield name, norm - config.norm_weight_offset
    if isinstance(layer.mlp, FeedForward) and config.fused:
        yield "gate_up", layer.mlp.gate_up_FD.dense()
        yield "down", layer.mlp.down_DF.dense()
        return
    if isinstance(layer.mlp, FeedForward):
        yield from _of_feed_forward("", layer.mlp)
        return
    yield "router", layer.mlp.router_XD.dense()
    for number, expert in enumerate(layer.mlp.experts, layer.mlp.first):
        yield from _of_feed_forward(f"experts.{number}.", expert)


def _of_feed_forward(prefix: str, mlp: FeedForward) -> Iterator[tuple[str, torch.Tensor]]:
    gate, up = mlp.gate_up_FD.dense().chunk(2)
    yield f"{prefix}gate", gate
    yield f"{prefix}up", up
    yield f"{prefix}down", mlp.down_DF.dense()
