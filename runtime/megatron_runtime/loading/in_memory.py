"""Models that a program holds already, as checkpoints to load from: a Llama of transformers, or one of ours."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from megatron_runtime.layers.linear import Linear
from megatron_runtime.loading.checkpoint import UnsupportedModelError
from megatron_runtime.loading.safetensors import parse_config
from megatron_runtime.loading.source import ModelInMemory
from megatron_runtime.models.llama import LayerWeights, LlamaModel
from megatron_runtime.models.llama_config import LlamaConfig


def model_in_memory(model: Any) -> ModelInMemory:
    """`model` as a source of weights. The engine copies them; they must not change while it loads.

    model: a transformers LlamaForCausalLM in eval mode, a LlamaModel, or anything with a LlamaConfig as `config` and
           `tensors()` as a Checkpoint has them.

    Raises UnsupportedModelError for anything else.
    """
    if isinstance(model, LlamaModel):
        return ModelInMemory(_OwnCheckpoint(model), name="a LlamaModel")
    if isinstance(getattr(model, "config", None), LlamaConfig) and callable(getattr(model, "tensors", None)):
        return ModelInMemory(model, name=type(model).__name__)
    if isinstance(model, torch.nn.Module) and hasattr(model, "config") and hasattr(model.config, "to_dict"):
        return ModelInMemory(_TransformersCheckpoint(model), name=f"a {type(model).__name__}")
    raise UnsupportedModelError(
        f"model is {type(model).__module__}.{type(model).__name__}: want a LlamaForCausalLM of transformers or a "
        "LlamaModel, or use from_pretrained() with a model reference"
    )


class _TransformersCheckpoint:
    def __init__(self, model: torch.nn.Module) -> None:
        if model.training:
            raise UnsupportedModelError("the model is in training mode: call model.eval() first")
        self._model = model
        values: dict[str, Any] = model.config.to_dict()  # type: ignore[operator, union-attr]
        generation = getattr(model, "generation_config", None)
        ends = getattr(generation, "eos_token_id", None)
        if ends is None:
            ends = values.get("eos_token_id")
        self.config = parse_config(
            {**values, "architectures": values.get("architectures") or [type(model).__name__]},
            ends=() if ends is None else tuple(ends) if isinstance(ends, list) else (ends,),
            where="the model's configuration",
        )

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        # As save_pretrained() writes it: a head that is tied to the embedding is not a tensor of its own.
        left_out = ("lm_head.weight",) if self.config.tie_embeddings else ()
        for name, tensor in self._model.state_dict().items():
            if not name.endswith(("rotary_emb.inv_freq", *left_out)):
                yield name, tensor.detach()


@dataclass(frozen=True, slots=True)
class _OwnCheckpoint:
    """Our fused weights, taken apart again."""

    model: LlamaModel

    @property
    def config(self) -> LlamaConfig:
        return self.model.config

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        weights = self.model.weights
        yield "model.embed_tokens.weight", weights.embedding_VD
        for number, layer in enumerate(weights.layers):
            for name, tensor in self._of_layer(layer):
                yield f"model.layers.{number}.{name}.weight", tensor
        yield "model.norm.weight", weights.norm_D
        if not self.config.tie_embeddings:
            yield "lm_head.weight", _dense(weights.head_VD)

    def _of_layer(self, layer: LayerWeights) -> Iterator[tuple[str, torch.Tensor]]:
        config = self.config
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        q, k, v = _dense(layer.qkv_QD).split([q_rows, kv_rows, kv_rows])
        gate, up = _dense(layer.gate_up_FD).chunk(2)
        yield "input_layernorm", layer.attention_norm_D
        yield "self_attn.q_proj", q
        yield "self_attn.k_proj", k
        yield "self_attn.v_proj", v
        yield "self_attn.o_proj", _dense(layer.output_DH)
        yield "post_attention_layernorm", layer.mlp_norm_D
        yield "mlp.gate_proj", gate
        yield "mlp.up_proj", up
        yield "mlp.down_proj", _dense(layer.down_DF)


def _dense(linear: Linear) -> torch.Tensor:
    return linear.dense()
