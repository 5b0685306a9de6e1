"""Steps of the C++ kernels against the decoder in torch, on small models with every feature of the model families."""

import dataclasses
import itertools

import numpy as np
import pytest
import torch
from soak import pairwise, size

from megatron_kernels.cpu.library import BFLOAT16_INSTRUCTION_SETS
from megatron_kernels.cpu.packing import pack
from megatron_kernels.quantized import Q2_K, Q3_K, Q4_K, Q5_0, Q6_K
from megatron_runtime.distributed.groups import Collectives
from megatron_runtime.models.config import ModelConfig, MoEConfig
from megatron_runtime.models.cpp_decoder import CppDecoder, build_decoder
from megatron_runtime.models.decoder import DecoderModel, DecoderWeights, ExpertWeights, FeedForward
from megatron_runtime.models.layers.cpu import PackedLinear, PackedLinears

from .example_steps import (
    EXPERTS,
    PLAIN,
    STEPS,
    TRAITS,
    Sequences,
    caches,
    expected_logits,
    in_cpp,
    step,
    stored_blocks,
    unpacked,
    weights_of,
)

MARGINS = {"bfloat16": 0.02, "int8": 0.05, "int4": 0.05}
"""Largest difference that the rounding of activations causes, relative to the largest logit."""
CACHE_MARGINS = {torch.bfloat16: 0.02, torch.float16: 0.002}
"""The same for keys and values."""


def check_steps(config: ModelConfig, weights: DecoderWeights) -> None:
    """Compare steps with those in torch of the same matrices, whose activations are not rounded."""
    ours, reference = build_decoder(config, weights), DecoderModel(config, unpacked(weights))
    assert isinstance(ours, CppDecoder)
    cache, reference_cache = caches(config)
    sequences = Sequences(config)
    for new in STEPS:
        plan = sequences.plan(new)
        expected = expected_logits(reference, plan, reference_cache)
        assert (step(ours, plan, cache) - expected).abs().max() < MARGINS["int4"] * expected.abs().max()


@torch.inference_mode()
@pytest.mark.parametrize("traits", TRAITS)
def test_steps_equal_torchs(traits: str, isa: str) -> None:
    config = dataclasses.replace(PLAIN, **TRAITS[traits])
    ours, reference = in_cpp(config, "float32")
    cache, reference_cache = caches(config)
    sequences = Sequences(config)
    for new in STEPS:
        plan = sequences.plan(new)
        torch.testing.assert_close(
            step(ours, plan, cache), expected_logits(reference, plan, reference_cache), rtol=1e-4, atol=1e-4
        )


@torch.inference_mode()
@pytest.mark.parametrize("traits", TRAITS)
@pytest.mark.parametrize("format", ["float32", "bfloat16"])
def test_the_last_part_of_a_step_equals_that_of_torch_and_cuda(traits: str, format: str, isa: str) -> None:
    """Last norm and head of the same hidden states: Decoder::logits in C++ and Decoder.logits of the others."""
    config = dataclasses.replace(PLAIN, **TRAITS[traits])
    ours, _ = in_cpp(config, format)
    cache, _ = caches(config)
    sequences = Sequences(config)
    for new in STEPS:
        plan = sequences.plan(new)
        ends_N = plan.query_lengths.cumsum(dtype=np.int64) - 1
        x_TD, logits_NV = ours.run_plan(plan, cache, ends_N)
        torch.testing.assert_close(torch.from_numpy(logits_NV), ours.logits(x_TD[ends_N]), rtol=1e-4, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("format", ["bfloat16", "float16", "int8", "int4"])
def test_steps_in_a_format_differ_by_the_rounding_of_activations(format: str, isa: str) -> None:
    is_exact = format == "float16" or (format == "bfloat16" and isa not in BFLOAT16_INSTRUCTION_SETS)
    ours, reference = in_cpp(PLAIN, format)
    cache, reference_cache = caches(PLAIN)
    sequences = Sequences(PLAIN)
    for new in STEPS:
        plan = sequences.plan(new)
        expected = expected_logits(reference, plan, reference_cache)
        margin = 1e-4 if is_exact else MARGINS[format]
        assert (step(ours, plan, cache) - expected).abs().max() < margin * expected.abs().max()


@torch.inference_mode()
@pytest.mark.parametrize("moe", [None, EXPERTS], ids=["dense", "experts"])
def test_gates_of_another_format_than_the_other_inputs_compute_as_stored(moe: MoEConfig | None, isa: str) -> None:
    hidden, width = 256, 256
    config = dataclasses.replace(PLAIN, hidden_size=hidden, intermediate_size=width, moe=moe)
    if moe is not None:
        config = dataclasses.replace(config, moe=dataclasses.replace(moe, intermediate_size=width))
    linears, kinds = PackedLinears("int4"), itertools.cycle([(Q4_K, Q6_K), (Q2_K, Q3_K), (Q5_0, Q5_0)])

    def mixed(mlp: FeedForward) -> FeedForward:
        parts = [stored_blocks(kind, width, hidden, scale=1e-3) for kind in next(kinds)]
        linear = linears.linear(parts)
        assert torch.equal(linear.dense(), torch.cat([part.dequantize() for part in parts]))
        return dataclasses.replace(mlp, gate_up_FD=linear)

    weights = weights_of(config, linears)
    mlps = [
        dataclasses.replace(layer.mlp, experts=tuple(map(mixed, layer.mlp.experts)))
        if isinstance(layer.mlp, ExpertWeights)
        else mixed(layer.mlp)
        for layer in weights.layers
    ]
    layers = tuple(dataclasses.replace(layer, mlp=mlp) for layer, mlp in zip(weights.layers, mlps, strict=True))
    weights = dataclasses.replace(weights, layers=layers)
    check_steps(config, weights)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("cache_type", "traits", "head_dim"), pairwise([*CACHE_MARGINS], ["plain", "gemma"], [16, 64, 96])
)
def test_a_cache_in_16_bits_differs_by_its_rounding(
    cache_type: torch.dtype, traits: str, head_dim: int, isa: str
) -> None:
    config = dataclasses.replace(PLAIN, head_dim=head_dim, **TRAITS[traits])
    ours, reference = in_cpp(config, "float32")
    cache, _ = caches(config, cache_type)
    _, reference_cache = caches(config)
    sequences = Sequences(config)
    for new in STEPS:
        plan = sequences.plan(new)
        expected = expected_logits(reference, plan, reference_cache)
        assert (step(ours, plan, cache) - expected).abs().max() < CACHE_MARGINS[cache_type] * expected.abs().max()


@torch.inference_mode()
def test_keys_and_values_beyond_float16_become_its_largest_number(isa: str) -> None:
    weights = weights_of(PLAIN, PackedLinears("float32"))
    first = weights.layers[0]
    large = PackedLinear(pack(first.qkv_QD.dense() * 1e6, "float32"))
    layers = (dataclasses.replace(first, qkv_QD=large), *weights.layers[1:])
    ours = build_decoder(PLAIN, dataclasses.replace(weights, layers=layers))
    cache, _ = caches(PLAIN, torch.float16)
    sequences = Sequences(PLAIN)
    for new in STEPS:
        assert step(ours, sequences.plan(new), cache).isfinite().all()
    assert (cache.abs() == torch.finfo(torch.float16).max).sum() > 100


@torch.inference_mode()
@pytest.mark.parametrize(
    ("traits", "cache_type"),
    size(
        [("plain", torch.float32), ("gemma", torch.bfloat16), ("plain", torch.float16)],
        soak=[*itertools.product(["plain", "gemma"], [torch.float32, *CACHE_MARGINS])],
    ),
)
def test_keys_of_a_long_context_are_divided_among_threads(traits: str, cache_type: torch.dtype, isa: str) -> None:
    config = dataclasses.replace(PLAIN, head_dim=32, **TRAITS[traits])
    ours, reference = in_cpp(config, "float32")
    cache, reference_cache = caches(config, cache_type, pages=320)
    sequences = Sequences(config, count=2, pages=160)
    for new in ({0: 1500, 1: 3}, {0: 1, 1: 1}, {0: 1}, {0: 40, 1: 600}, {0: 1, 1: 1}):
        plan = sequences.plan(new)
        expected = expected_logits(reference, plan, reference_cache)
        margin = CACHE_MARGINS.get(cache_type, 1e-4)
        assert (step(ours, plan, cache) - expected).abs().max() < margin * expected.abs().max()


@torch.inference_mode()
@pytest.mark.parametrize(
    ("format", "cache_type"),
    [
        ("float32", torch.float32),
        ("bfloat16", torch.float32),
        ("bfloat16", torch.bfloat16),
        ("float16", torch.float16),
        ("int4", torch.bfloat16),
    ],
)
def test_a_token_has_the_same_bits_alone_among_others_and_in_a_prompt(
    format: str, cache_type: torch.dtype, isa: str
) -> None:
    config = dataclasses.replace(PLAIN, head_dim=32)
    models = [in_cpp(config, format)[0] for _ in range(3)]
    cached = [caches(config, cache_type, pages=192)[0] for _ in models]
    others, alone, prompts = (Sequences(config, count=4, pages=48) for _ in models)
    tokens = np.random.default_rng(1).integers(0, config.vocab_size, 701).astype(np.int32)
    for model, cache, sequences in zip(models[:2], cached, (others, alone), strict=False):
        plan = sequences.plan({0: 700})
        step(model, dataclasses.replace(plan, token_ids=tokens[:700]), cache)
    several = others.plan({1: 30, 0: 1, 2: 5, 3: 1})
    several.token_ids[30] = tokens[700]
    among_others = step(models[0], several, cached[0])[1]
    by_itself = step(models[1], dataclasses.replace(alone.plan({0: 1}), token_ids=tokens[700:]), cached[1])[0]
    in_a_prompt = step(models[2], dataclasses.replace(prompts.plan({0: 701}), token_ids=tokens), cached[2])[0]
    assert torch.equal(in_a_prompt, among_others)
    if format == "int4" and isa == "amx":
        # The other steps have enough rows for weights to be unpacked to bfloat16.
        assert (by_itself - in_a_prompt).abs().max() < MARGINS["int4"] * in_a_prompt.abs().max()
    else:
        assert torch.equal(in_a_prompt, by_itself)


@torch.inference_mode()
def test_queries_keys_and_values_in_different_formats(isa: str) -> None:
    config = dataclasses.replace(PLAIN, hidden_size=256)
    weights = weights_of(config, PackedLinears("int4"))
    layers = []
    for layer in weights.layers:
        rows = layer.qkv_QD.dense()
        queries_and_keys, values = pack(rows[:128], "int8"), pack(rows[128:], "int4")
        layers.append(dataclasses.replace(layer, qkv_QD=PackedLinear(queries_and_keys, values)))
    weights = dataclasses.replace(weights, layers=tuple(layers))
    check_steps(config, weights)


class Doubled(Collectives):
    """Two tensor ranks of the same part: every sum is doubled."""

    def all_reduce(self, x_TD: torch.Tensor) -> torch.Tensor:
        return x_TD * 2


@torch.inference_mode()
@pytest.mark.parametrize(
    "traits",
    ["plain", "gemma", "norms of outputs and of all heads", "experts", "experts, shares not normalized"],
)
def test_the_phases_of_a_rank_equal_torchs(traits: str) -> None:
    config = dataclasses.replace(PLAIN, **TRAITS[traits])
    ours, reference = in_cpp(config, "float32", collectives=Doubled())
    cache, reference_cache = caches(config)
    sequences = Sequences(config)
    for new in STEPS:
        plan = sequences.plan(new)
        x_TD = ours.run_rank(plan, x_TD=ours.embed(torch.from_numpy(plan.token_ids)), cache_LPXE=cache)
        last_N = torch.from_numpy(plan.query_lengths.cumsum(dtype=np.int64) - 1)
        torch.testing.assert_close(
            ours.logits(x_TD[last_N]),
            expected_logits(reference, plan, reference_cache),
            rtol=1e-4,
            atol=1e-4,
        )
