"""Reads the weights of a Megatron-Core GPTModel or HybridModel in this process like a checkpoint.

The checkpoint has the configuration of the model and the tensors that this rank holds.

Megatron itself describes the tensors of a rank. `sharded_state_dict()` returns each local tensor with its name in a
distributed checkpoint, its whole shape and its offset. This module uses only attributes of the model. It imports
nothing from Megatron-Core, and sends no tensor to another rank.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import silu

from megatron_runtime.checkpoints.torch_dist.chunked import ChunkedCheckpoint, TensorIndex
from megatron_runtime.checkpoints.torch_dist.configuration import config_json_of
from megatron_runtime.distributed.shard import ParallelSizes, Shard
from megatron_runtime.models.config import ModelConfig, UnsupportedModelError
from megatron_runtime.models.families import config_from_hf
from megatron_runtime.models.layers.paged_attention import inverse_frequencies
from megatron_runtime.protocol.text import shown

_WHERE = "the GPTModel"

_SAME_NAME = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "layernorm_epsilon",
    "normalization",
    "add_bias_linear",
    "add_qkv_bias",
    "qk_layernorm",
    "multi_latent_attention",
    "rotary_interleaved",
    "window_size",
    "mtp_num_layers",
    "moe_router_topk",
    "moe_ffn_hidden_size",
    "moe_layer_freq",
    "moe_router_pre_softmax",
    "moe_router_score_function",
    "moe_shared_expert_intermediate_size",
)
"""Fields of TransformerConfig that have the same name as the argument of Megatron-LM."""

_ONLY: Mapping[str, tuple[Any, ...]] = {
    "softmax_scale": (None,),
    "softmax_type": ("vanilla",),
    "qk_l2_norm": (False,),
    "attention_output_gate": (False,),
    "no_rope_freq": (None,),
    "experimental_attention_variant": (None,),
    "linear_attention_freq": (None,),
    "glu_linear_offset": (0.0,),
    "activation_func_clamp_value": (None,),
    "apply_residual_connection_post_layernorm": (False,),
    "heterogeneous_block_specs": (False,),
    "moe_router_topk_scaling_factor": (None,),
    "moe_router_num_groups": (None,),
    "moe_router_enable_expert_bias": (False,),
    "moe_router_load_balancing_type": ("none", "aux_loss", "seq_aux_loss", "global_aux_loss"),
    "moe_expert_capacity_factor": (None,),
    "moe_apply_probs_on_input": (False,),
    "moe_latent_size": (None,),
    "virtual_pipeline_model_parallel_size": (None,),
}
"""Fields of TransformerConfig that change the computation or the placement of layers, with their supported values."""

_ATTENTION, _MLP = "*", "-"
"""Symbols by which Megatron-Core denotes the layers of a HybridModel."""
_HYBRID_LAYER = re.compile(r"(decoder\.layers\.)(\d+)(\..*)")

_FREQUENCY_TOLERANCE = 1e-3
"""Relative tolerance of rotary frequencies, because Megatron computes them in float32."""


@dataclass(frozen=True, slots=True)
class LiveChunk:
    """A parameter of this rank, as a rectangular part of a stored tensor: one range per axis, and the values.

    values: tensor on any device, whose shape is the lengths of the ranges.
    """

    box: tuple[range, ...]
    values: torch.Tensor

    def bytes_at(self, index: tuple[int, ...]) -> torch.Tensor:
        """Return the bytes of the values at one index of the leading axes, uint8 [*other axes, itemsize]."""
        place = tuple(position - axis.start for position, axis in zip(index, self.box, strict=False))
        values = self.values.detach()[place]
        return values.contiguous().view(torch.uint8).view(*values.shape, values.dtype.itemsize)


class LiveModelCheckpoint(ChunkedCheckpoint[LiveChunk]):
    """A checkpoint of the weights of a GPTModel. Each read() reads the current values of the model's parameters.

    model: a GPTModel of megatron.core, or a HybridModel with the same layers, possibly wrapped (Float16Module,
           DistributedDataParallel). If the parallel state is initialised, the model holds this rank's part, and read()
           returns only values of this part.
    ends:  token ids that end an answer, because the model's configuration has no such ids.

    Raises UnsupportedModelError, which names the field, its value and the supported value.
    """

    def __init__(self, model: Any, *, ends: tuple[int, ...] = ()) -> None:
        gpt = unwrapped(model)
        index = live_index(gpt)
        self.shard = _shard_of(gpt.config)
        super().__init__(
            config_of(gpt, ends),
            index,
            where=_WHERE,
            remedy="build it with a layer spec that has these tensors, as for a Llama, Qwen or Mixtral model",
            absent=gpt.config.params_dtype if self.shard.sizes.pipeline > 1 else None,
        )

    def _values(self, chunk: LiveChunk, index: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return chunk.bytes_at(index)

    def _incomplete(self, name: str, *, held: int, wanted: int) -> UnsupportedModelError:
        sizes = self.shard.sizes
        return UnsupportedModelError(
            f"{_WHERE} of this rank holds {held} of the {wanted} bytes of {name!r} that the engine's rank needs: it "
            f"was built with tensor {sizes.tensor} x pipeline {sizes.pipeline} x expert {sizes.expert} parallel ranks; "
            "give the engine the same sizes, and every pipeline stage as many layers"
        )


def live_index(model: Any) -> dict[str, TensorIndex[LiveChunk]]:
    """Return the parts of Megatron-Core's tensors that this rank holds, by key.

    model: a GPTModel or HybridModel of megatron.core, possibly wrapped.

    Raises UnsupportedModelError for a HybridModel whose layers differ from the layers of a GPTModel.
    """
    gpt = unwrapped(model)
    _require_pairs(gpt)
    index: dict[str, TensorIndex[LiveChunk]] = {}
    for tensor in _sharded_tensors(gpt.sharded_state_dict()):
        leading = tensor.prepend_axis_num
        extents = (*[1] * leading, *tensor.local_shape)
        box = tuple(range(start, start + extent) for start, extent in zip(tensor.global_offset, extents, strict=True))
        name = _gpt_name(tensor.key) if _is_hybrid(gpt) else tensor.key
        before = index[name].chunks if name in index else ()
        chunk = LiveChunk(box, tensor.data[(None,) * leading])
        index[name] = TensorIndex(tuple(tensor.global_shape), tensor.dtype, (*before, chunk))
    return index


def _is_hybrid(model: Any) -> bool:
    return hasattr(model, "hybrid_layer_pattern")


def _require_pairs(model: Any) -> None:
    """Raise UnsupportedModelError unless the layers of a HybridModel alternate attention and MLP, as in a GPTModel."""
    if not _is_hybrid(model):
        return
    if (stages := model.config.pipeline_model_parallel_size) != 1:
        raise UnsupportedModelError(f"the HybridModel has pipeline_model_parallel_size {stages}: supported is 1")
    layers = model.decoder.layer_type_list
    if len(layers) % 2 or any(pair != (_ATTENTION, _MLP) for pair in zip(layers[::2], layers[1::2], strict=True)):
        raise UnsupportedModelError(
            f"the HybridModel has hybrid_layer_pattern {shown(model.hybrid_layer_pattern)}: supported are attention "
            f"layers that an MLP layer follows, {_ATTENTION + _MLP!r} once or more"
        )


def _gpt_name(name: str) -> str:
    """Return a GPTModel's name for the tensor `name` of a HybridModel in which attention and MLP alternate."""
    if (match := _HYBRID_LAYER.fullmatch(name)) is not None:
        begin, layer, rest = match.groups()
        return f"{begin}{int(layer) // 2}{rest}"
    return name.replace("decoder.final_norm.", "decoder.final_layernorm.")


def _rotary_of_hybrid(model: Any) -> dict[str, Any]:
    """Return the rotary base and the rotated fraction of a HybridModel, in the form of Megatron-LM's arguments.

    Both are computed from the rotary frequencies, because the model stores only the frequencies.
    """
    frequencies = model.rotary_pos_emb.inv_freq.detach().double().cpu()
    size = 2 * len(frequencies)
    base = float(frequencies[1]) ** (-size / 2) if size > 2 else 10000.0
    return {"rotary_percent": size / model.config.kv_channels, "rotary_base": float(f"{base:.6g}")}


def is_megatron_model(model: Any) -> bool:
    """Return whether `model` has the structure of a GPTModel or HybridModel of Megatron-Core, possibly wrapped."""
    inner = unwrapped(model)
    config = getattr(inner, "config", None)
    return callable(getattr(inner, "sharded_state_dict", None)) and all(
        hasattr(config, name) for name in ("num_query_groups", "kv_channels", "tensor_model_parallel_size")
    )


def unwrapped(model: Any) -> Any:
    """Return the model inside Megatron's wrappers. A wrapper has the wrapped model as its attribute `module`."""
    while isinstance(getattr(model, "module", None), torch.nn.Module):
        model = model.module
    return model


def _sharded_tensors(entries: Any) -> Iterator[Any]:
    """Yield the ShardedTensors of a sharded state dict.

    For a ShardedTensorFactory, which stands for gate and up together, yield gate and up as two ShardedTensors.
    """
    if isinstance(entries, Mapping):
        entries = entries.values()
    for entry in entries:
        if isinstance(entry, Mapping | list | tuple):
            yield from _sharded_tensors(entry)
        elif hasattr(entry, "build"):
            built = entry.build()
            yield from _sharded_tensors(built if isinstance(built, Mapping | list | tuple) else [built])
        elif isinstance(entry.data, torch.Tensor) and not entry.key.endswith("._extra_state"):
            yield entry


def _shard_of(config: Any) -> Shard:
    """Return the part of the model that this rank holds.

    Raises UnsupportedModelError for kinds of parallelism that engines do not support.
    """
    sizes = ParallelSizes(
        tensor=config.tensor_model_parallel_size,
        pipeline=config.pipeline_model_parallel_size,
        expert=config.expert_model_parallel_size,
    )
    if config.context_parallel_size != 1:
        raise UnsupportedModelError(
            f"{_WHERE} has context_parallel_size {config.context_parallel_size}: supported is 1"
        )
    expert_tensor = getattr(config, "expert_tensor_parallel_size", None)
    if config.num_moe_experts and expert_tensor not in (None, sizes.tensor):
        raise UnsupportedModelError(
            f"{_WHERE} has expert_tensor_parallel_size {expert_tensor}: supported is tensor_model_parallel_size, "
            f"here {sizes.tensor}"
        )
    if sizes.world == 1:
        return Shard()
    state = sys.modules["megatron.core.parallel_state"]
    return Shard(
        sizes=sizes,
        tensor_rank=state.get_tensor_model_parallel_rank(),
        pipeline_rank=state.get_pipeline_model_parallel_rank(),
        expert_rank=state.get_expert_model_parallel_rank() if sizes.expert > 1 else 0,
    )


def config_of(model: Any, ends: tuple[int, ...] = ()) -> ModelConfig:
    """Return the configuration of the whole model, from its attributes and its TransformerConfig.

    The configuration describes the whole model even if this rank holds only a part. For model, ends and errors, see
    LiveModelCheckpoint.
    """
    gpt = unwrapped(model)
    config = gpt.config
    for name, allowed in _ONLY.items():
        if (value := getattr(config, name, allowed[0])) not in allowed:
            raise UnsupportedModelError(
                f"{_WHERE} has {name} {shown(value)}: supported is {' or '.join(map(repr, allowed))}"
            )
    if config.gated_linear_unit and config.activation_func is not silu:
        name = getattr(config.activation_func, "__name__", config.activation_func)
        raise UnsupportedModelError(
            f"{_WHERE} has activation_func {shown(name)}: supported is torch.nn.functional.silu"
        )
    arguments = {
        **{name: getattr(config, name) for name in _SAME_NAME if hasattr(config, name)},
        "group_query_attention": True,
        "num_experts": config.num_moe_experts,
        "swiglu": config.gated_linear_unit,
        "apply_layernorm_1p": config.layernorm_zero_centered_gamma,
        "vocab_size": gpt.vocab_size,
        "max_position_embeddings": gpt.max_sequence_length,
        "position_embedding_type": gpt.position_embedding_type,
        "rotary_percent": getattr(gpt, "rotary_percent", 1.0),
        "rotary_base": getattr(gpt, "rotary_base", 10000),
        "untie_embeddings_and_output_weights": not gpt.share_embeddings_and_output_weights,
    }
    if _is_hybrid(gpt):
        arguments["num_layers"] = config.num_layers // 2
        if gpt.position_embedding_type == "rope":
            arguments |= _rotary_of_hybrid(gpt)
    values = config_json_of(arguments, where=_WHERE)
    rotary = gpt.rotary_pos_emb
    theirs = rotary.inv_freq.detach().double().cpu()
    if getattr(gpt, "rotary_scaling", False):
        # The model does not store the factor. Compute it from the lowest frequency, which the model divides by it.
        factor = round(values["rope_theta"] ** (-(len(theirs) - 1) / len(theirs)) / float(theirs[-1]), 3)
        arguments |= {"use_rope_scaling": True, "rope_scaling_factor": factor}
        values = config_json_of(arguments, where=_WHERE)
    if rotary.seq_len_interpolation_factor is not None:
        values["rope_scaling"] = {"rope_type": "linear", "factor": float(rotary.seq_len_interpolation_factor)}
    result = config_from_hf(values, ends=ends, where=_WHERE)
    ours = inverse_frequencies(head_dim=result.head_dim, theta=result.rope_theta, scaling=result.rope_scaling).double()
    if rotary.seq_len_interpolation_factor is not None:
        theirs = theirs / rotary.seq_len_interpolation_factor
    if ours.shape != theirs.shape or not torch.allclose(ours, theirs, rtol=_FREQUENCY_TOLERANCE, atol=0.0):
        raise UnsupportedModelError(
            f"{_WHERE} rotates by frequencies {shown(theirs.tolist())}: rotary_base {result.rope_theta:g} with "
            f"{result.rope_scaling or 'no scaling'} has others; build it with rotary_base and the scaling of Llama 3.1"
        )
    return result
