"""The mapping from rows of stored tensors to tensors of the decoder."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from random_checkpoint import CONFIGS, LLAMA, TORCH_DIST_CONFIGS

from megatron_runtime.checkpoints.torch_dist.names import Layout, find_layout, layout_for, pieces, stored_tensors
from megatron_runtime.models.config import ModelConfig, MoEConfig
from megatron_runtime.models.tensors import tensor_shapes

LAYOUTS = [
    Layout(),
    Layout(prefix="module."),
    Layout(numbered_layers=True),
    Layout(numbered_layers=True, numbered_experts=True, split_gate=True),
    Layout(numbered_experts=True),
    Layout(split_gate=True),
    Layout(separate_norms=True),
    Layout(mixture_norm_in_mlp=True),
]


@pytest.mark.parametrize("config", TORCH_DIST_CONFIGS.values(), ids=TORCH_DIST_CONFIGS.keys())
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_every_tensor_of_the_model_has_its_rows(config: ModelConfig, layout: Layout) -> None:
    found = {piece.name: piece.shape for piece in pieces(config, layout)}
    assert found == tensor_shapes(config)


@given(
    heads=st.integers(1, 4),
    group=st.integers(1, 4),
    size=st.sampled_from([2, 8]),
    feed=st.integers(1, 9),
    layers=st.integers(1, 3),
    experts=st.integers(0, 3),
    bias=st.booleans(),
    norm=st.booleans(),
    tied=st.booleans(),
    layout=st.sampled_from(LAYOUTS),
)
def test_each_row_of_a_stored_tensor_is_used_once(
    heads: int,
    group: int,
    size: int,
    feed: int,
    layers: int,
    experts: int,
    bias: bool,
    norm: bool,
    tied: bool,
    layout: Layout,
) -> None:
    config = replace(
        LLAMA,
        num_heads=heads * group,
        num_kv_heads=heads,
        head_dim=size,
        intermediate_size=feed,
        num_layers=layers,
        qkv_bias=bias,
        qk_norm=norm,
        tie_embeddings=tied,
        moe=MoEConfig(num_experts=experts, experts_per_token=1, intermediate_size=feed, normalize=True)
        if experts
        else None,
    )
    stored = stored_tensors(config, layout)
    taken: dict[tuple[str, tuple[int, ...]], list[int]] = {}
    for piece in pieces(config, layout):
        assert piece.columns == stored[piece.key].cell[1:]
        rows = taken.setdefault((piece.key, piece.index), [])
        rows += [row for first, count in piece.rows for row in range(first, first + count)]
    for (key, index), rows in taken.items():
        assert sorted(rows) == list(range(stored[key].cell[0]))
        assert all(at < extent for at, extent in zip(index, stored[key].grid, strict=True))
    assert {key for key, _ in taken} == set(stored)


def test_queries_keys_and_values_of_a_group_are_adjacent() -> None:
    config = replace(LLAMA, num_heads=4, num_kv_heads=2, head_dim=10, num_layers=1)
    rows = {piece.name[-1]: piece.rows for piece in pieces(config, Layout()) if "linear_qkv.weight" in piece.key}
    assert rows == {"q": ((0, 20), (40, 20)), "k": ((20, 10), (60, 10)), "v": ((30, 10), (70, 10))}


def test_names_are_those_of_megatron_core() -> None:
    assert {key: tensor.shape for key, tensor in stored_tensors(CONFIGS["qwen3_moe"], Layout()).items()} == {
        "embedding.word_embeddings.weight": (150, 32),
        "decoder.layers.self_attention.linear_qkv.layer_norm_weight": (3, 32),
        "decoder.layers.self_attention.linear_qkv.weight": (3, (6 + 2 + 2) * 8, 32),
        "decoder.layers.self_attention.q_layernorm.weight": (3, 8),
        "decoder.layers.self_attention.k_layernorm.weight": (3, 8),
        "decoder.layers.self_attention.linear_proj.weight": (3, 32, 48),
        "decoder.layers.pre_mlp_layernorm.weight": (3, 32),
        "decoder.layers.mlp.router.weight": (3, 4, 32),
        "decoder.layers.mlp.experts.experts.linear_fc1.weight": (3, 4, 40, 32),
        "decoder.layers.mlp.experts.experts.linear_fc2.weight": (3, 4, 32, 20),
        "decoder.final_layernorm.weight": (32,),
        "output_layer.weight": (150, 32),
    }
    dense = stored_tensors(CONFIGS["qwen2"], Layout())
    assert dense["decoder.layers.mlp.linear_fc1.weight"].shape == (3, 96, 32)
    assert dense["decoder.layers.mlp.linear_fc1.layer_norm_weight"].shape == (3, 32)
    assert dense["decoder.layers.self_attention.linear_qkv.bias"].shape == (3, 80)
    numbered = stored_tensors(CONFIGS["qwen3_moe, a dense layer"], layout_for(CONFIGS["qwen3_moe, a dense layer"]))
    assert numbered["decoder.layers.1.mlp.linear_fc1.weight"].shape == (96, 32)
    assert numbered["decoder.layers.2.mlp.experts.experts.linear_fc1.weight"].shape == (4, 40, 32)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_layout_is_detected_from_the_names(layout: Layout) -> None:
    config = CONFIGS["mixtral"]
    assert find_layout(stored_tensors(config, layout)) == layout
