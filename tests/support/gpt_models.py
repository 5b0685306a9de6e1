"""GPTModels of megatron.core on the CPU. Their random weights are the same for every division over ranks.

Megatron-Core needs three patches to run on the CPU without Transformer Engine; each names what it replaces.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hybrid import hybrid_block
from megatron.core.models.hybrid.hybrid_model import HybridModel
from megatron.core.ssm.mlp_layer import MLPLayer
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer.moe import moe_utils
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_runtime.checkpoints.torch_dist.live_model import _sharded_tensors
from megatron_runtime.distributed.shard import ParallelSizes

VOCAB, LENGTH = 320, 128

_EXPERTS = {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "allgather",
    "moe_enable_routing_replay": True,
}
CASES: dict[str, dict[str, Any]] = {
    "llama": {},
    "hybrid, llama": {"hybrid": "*-*-*-*-"},
    "llama, tied, scaled": {"tied": True, "rope_scaling": True},
    "qwen2": {"add_qkv_bias": True},
    "qwen3, tied": {"qk_layernorm": True, "tied": True},
    "mixtral": _EXPERTS,
    "qwen3_moe, a dense layer": {
        **_EXPERTS,
        "qk_layernorm": True,
        "moe_layer_freq": [1, 0, 1, 1],
        "moe_router_pre_softmax": True,
    },
}


def patch_for_cpu() -> None:
    """Call in a process of its own: the patches last as long as the process."""
    torch.cuda.current_device = lambda: "cpu"  # the device of scratch tensors
    get_cuda_rng_tracker().fork = contextlib.nullcontext  # the CUDA generator of dropout, which is off
    torch.Tensor.cuda = lambda tensor: tensor  # before a tied embedding is shared between pipeline stages
    hybrid_block.TENorm = WrappedTorchNorm  # which Transformer Engine has
    moe_utils.te_general_gemm = None  # named, but not defined, without Transformer Engine


def make_gpt(
    case: str, *, sizes: ParallelSizes | None = None, seed: int = 0, vocab_size: int = VOCAB, **more: Any
) -> GPTModel:
    """Return this rank's part of a model in float32, with the same values as in the whole model of this seed.

    more: further fields of TransformerConfig.
    """
    sizes = sizes or ParallelSizes()
    traits = {**CASES[case], **more}
    tied, scaled = traits.pop("tied", False), traits.pop("rope_scaling", False)
    hybrid = traits.pop("hybrid", "")
    config = TransformerConfig(
        num_layers=len(hybrid) or 4,
        hidden_size=64,
        ffn_hidden_size=96,
        num_attention_heads=8,
        num_query_groups=4,
        kv_channels=16,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        params_dtype=torch.float32,
        pipeline_dtype=torch.float32,
        tensor_model_parallel_size=sizes.tensor,
        pipeline_model_parallel_size=sizes.pipeline,
        expert_model_parallel_size=sizes.expert,
        **traits,
    )
    if hybrid:
        model = make_hybrid(config, hybrid, vocab_size=vocab_size)
        fill(model, seed)
        return model.eval()
    model = GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False, normalization="RMSNorm"),
        vocab_size=vocab_size,
        max_sequence_length=LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=tied,
        position_embedding_type="rope",
        rope_scaling=scaled,
    )
    fill(model, seed)
    return model.eval()


def make_hybrid(config: TransformerConfig, pattern: str, *, vocab_size: int = VOCAB) -> HybridModel:
    """Return a HybridModel without Transformer Engine. pattern: the layers, in Megatron-Core's symbols."""
    layer = get_gpt_layer_local_spec(normalization="RMSNorm").submodules
    names = {"sharded_state_dict_keys_map": layer.sharded_state_dict_keys_map}
    attention = TransformerLayerSubmodules(
        input_layernorm=layer.input_layernorm,
        self_attention=layer.self_attention,
        self_attn_bda=layer.self_attn_bda,
        **names,
    )
    mlp = TransformerLayerSubmodules(
        pre_mlp_layernorm=layer.pre_mlp_layernorm, mlp=layer.mlp, mlp_bda=layer.mlp_bda, **names
    )
    submodules = hybrid_block.HybridStackSubmodules(
        attention_layer=ModuleSpec(module=TransformerLayer, submodules=attention),
        mlp_layer=ModuleSpec(module=MLPLayer, submodules=mlp),
    )
    return HybridModel(
        config,
        ModuleSpec(module=hybrid_block.HybridStack, submodules=submodules),
        vocab_size=vocab_size,
        max_sequence_length=LENGTH,
        hybrid_layer_pattern=pattern,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )


@torch.no_grad()
def fill(model: GPTModel, seed: int) -> None:
    """Fill each tensor with values that depend on its name and the seed; a rank gets its part of the values."""
    for tensor in _sharded_tensors(model.sharded_state_dict()):
        digest = hashlib.sha256(f"{seed} {tensor.key}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "big"))
        whole = torch.randn(tensor.global_shape, generator=generator).mul_(0.2)
        if "norm" in tensor.key:
            whole += 1.0
        extents = (*[1] * tensor.prepend_axis_num, *tensor.local_shape)
        box = tuple(slice(start, start + extent) for start, extent in zip(tensor.global_offset, extents, strict=True))
        tensor.data.copy_(whole[box].view(tensor.local_shape))


def logits_of(model: GPTModel, tokens: Sequence[int]) -> torch.Tensor:
    """Return Megatron's logits [T, V] of a sequence, from a whole model."""
    length = len(tokens)
    hides = torch.ones(1, 1, length, length).tril() < 0.5
    return model(torch.tensor([list(tokens)]), torch.arange(length)[None], hides)[0]


def logits_and_routing(model: GPTModel, tokens: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return logits_of(), and the experts of each token that Megatron's routers record, [T, layers with experts, J]."""
    if not RouterReplay.global_router_replay_instances:
        return logits_of(model, tokens), None
    RouterReplay.set_global_router_replay_action(RouterReplayAction.RECORD)
    try:
        return logits_of(model, tokens), torch.stack(RouterReplay.get_recorded_data(), dim=1)
    finally:
        RouterReplay.clear_global_router_replay_action()


def make_configured_gpt(case: str) -> GPTModel:
    """Return this rank's part of a model under the initialised parallel state."""
    sizes = ParallelSizes(
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
    )
    return make_gpt(case, sizes=sizes)
