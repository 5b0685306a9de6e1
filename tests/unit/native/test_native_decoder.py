"""Compiled steps against the decoder in torch, on small models with every feature of the model families."""

import dataclasses

import pytest
import torch


from .native_models import PLAIN, STEPS, TRAITS, Sequences, caches, expected_logits, native, step


@torch.inference_mode()
@pytest.mark.parametrize("format", ["float32", "bfloat16"])
@pytest.mark.parametrize("traits", TRAITS)
def test_steps_equal_torchs(traits: str, format: str) -> None:
    config = dataclasses.replace(PLAIN, **TRAITS[traits])
    ours, reference = native(config, format)
    cache, reference_cache = caches(config)
    sequences = Sequences(config)
    for new in STEPS:
        plan = sequences.plan(new)
        torch.testing.assert_close(
            step(ours, plan, cache), expected_logits(reference, plan, reference_cache), rtol=1e-4, atol=1e-4
        )


@torch.inference_mode()
@pytest.mark.parametrize("format", ["int8", "int4"])
def test_integer_steps_differ_by_the_rounding_of_activations(format: str) -> None:
    ours, reference = native(PLAIN, format)
    cache, reference_cache = caches(PLAIN)
    sequences = Sequences(PLAIN)
    for new in STEPS:
        plan = sequences.plan(new)
        expected = expected_logits(reference, plan, reference_cache)
        assert (step(ours, plan, cache) - expected).abs().max() < 0.05 * expected.abs().max()


@torch.inference_mode()
def test_a_cache_in_bfloat16_differs_by_its_rounding() -> None:
    ours, reference = native(PLAIN, "float32")
    cache, _ = caches(PLAIN, torch.bfloat16)
    _, reference_cache = caches(PLAIN)
    sequences = Sequences(PLAIN)
    for new in STEPS:
        plan = sequences.plan(new)
        expected = expected_logits(reference, plan, reference_cache)
        assert (step(ours, plan, cache) - expected).abs().max() < 0.02 * expected.abs().max()


@torch.inference_mode()
def test_a_decoded_token_has_the_same_bits_alone_and_among_others() -> None:
    together, alone = native(PLAIN, "float32")[0], native(PLAIN, "float32")[0]
    (cache, _), (other_cache, _) = caches(PLAIN), caches(PLAIN)
    first, second = Sequences(PLAIN), Sequences(PLAIN)
    prompt = first.plan({0: 40})
    step(together, prompt, cache)
    step(alone, second.plan({0: 40}), other_cache)
    several = first.plan({0: 1, 1: 30, 2: 5})
    single = second.plan({0: 1})
    assert several.token_ids[0] == single.token_ids[0]
    assert torch.equal(step(together, several, cache)[0], step(alone, single, other_cache)[0])
