"""From a checkpoint's named tensors to the fused weights of a Llama."""

from __future__ import annotations

import torch

from megatron_runtime.layers.linear import Linear
from megatron_runtime.loading.checkpoint import Checkpoint, UnsupportedModelError
from megatron_runtime.models.llama import LayerWeights, LlamaWeights
from megatron_runtime.models.llama_config import LlamaConfig


class _DenseLayer:
    """The fused tensors of one block, and where each tensor of a checkpoint goes in them."""

    def __init__(self, config: LlamaConfig, dtype: torch.dtype) -> None:
        hidden, feed = config.hidden_size, config.intermediate_size
        q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.attention_norm = torch.empty(hidden, dtype=dtype)
        self.qkv = torch.empty(q_rows + 2 * kv_rows, hidden, dtype=dtype)
        self.output = torch.empty(hidden, q_rows, dtype=dtype)
        self.mlp_norm = torch.empty(hidden, dtype=dtype)
        self.gate_up = torch.empty(2 * feed, hidden, dtype=dtype)
        self.down = torch.empty(hidden, feed, dtype=dtype)
        q, k, v = self.qkv.split([q_rows, kv_rows, kv_rows])
        gate, up = self.gate_up.chunk(2)
        self.targets = {
            "input_layernorm.weight": self.attention_norm,
            "self_attn.q_proj.weight": q,
            "self_attn.k_proj.weight": k,
            "self_attn.v_proj.weight": v,
            "self_attn.o_proj.weight": self.output,
            "post_attention_layernorm.weight": self.mlp_norm,
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": self.down,
        }

    def finish(self) -> LayerWeights:
        return LayerWeights(
            attention_norm_D=self.attention_norm,
            qkv_QD=Linear(self.qkv),
            output_DH=Linear(self.output),
            mlp_norm_D=self.mlp_norm,
            gate_up_FD=Linear(self.gate_up),
            down_DF=Linear(self.down),
        )


def load_llama_weights(checkpoint: Checkpoint, dtype: torch.dtype) -> LlamaWeights:
    """Read every tensor of `checkpoint` once, as `dtype`. Raises UnsupportedModelError naming what does not fit."""
    config = checkpoint.config
    embedding = torch.empty(config.vocab_size, config.hidden_size, dtype=dtype)
    norm = torch.empty(config.hidden_size, dtype=dtype)
    head = embedding if config.tie_embeddings else torch.empty_like(embedding)
    dense = [_DenseLayer(config, dtype) for _ in range(config.num_layers)]
    targets = {"model.embed_tokens.weight": embedding, "model.norm.weight": norm}
    if not config.tie_embeddings:
        targets["lm_head.weight"] = head
    for number, layer in enumerate(dense):
        targets |= {f"model.layers.{number}.{name}": target for name, target in layer.targets.items()}
    _fill(targets, checkpoint)
    targets.clear()
    layers = []
    while dense:
        layers.append(dense.pop(0).finish())
    return LlamaWeights(
        embedding_VD=embedding,
        layers=tuple(layers),
        norm_D=norm,
        head_VD=Linear(head, packed=not config.tie_embeddings),
    )


def _fill(targets: dict[str, torch.Tensor], checkpoint: Checkpoint) -> None:
    missing = set(targets)
    for name, tensor in checkpoint.tensors():
        if name == "lm_head.weight" and checkpoint.config.tie_embeddings:
            continue
        if name not in targets:
            raise UnsupportedModelError(f"the checkpoint holds tensor {name!r}, which a Llama has not")
        if tensor.shape != targets[name].shape:
            raise UnsupportedModelError(
                f"tensor {name!r} has shape {tuple(tensor.shape)}: the model's configuration asks for "
                f"{tuple(targets[name].shape)}"
            )
        targets[name].copy_(tensor)
        missing.discard(name)
    if missing:
        raise UnsupportedModelError(f"the checkpoint lacks tensors: {', '.join(sorted(missing)[:8])}")
