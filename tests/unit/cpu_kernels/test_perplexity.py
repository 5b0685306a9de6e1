"""The loss of accuracy of each weight format: perplexity of the built-in model on Python's documentation."""

import math
import pydoc_data.topics
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from soak import size

from megatron_runtime.backends.native.executor import StepPlan
from megatron_runtime.checkpoints.checkpoint import open_checkpoint
from megatron_runtime.checkpoints.source import resolve
from megatron_runtime.models.cpp_decoder import CppDecoder, build_decoder
from megatron_runtime.models.layers.cpu import PackedLinears, select_numbers
from megatron_runtime.models.weights import load_weights
from megatron_runtime.tokenization import load_tokenizer

MODEL = "builtin:smollm2-135m"
TOKENS = 512
PAGE = 16


@pytest.fixture(scope="module")
def tokens() -> np.ndarray:
    text = pydoc_data.topics.topics["typesseq"] + pydoc_data.topics.topics["assignment"]
    return np.array(load_tokenizer(MODEL).encode(text)[:TOKENS], dtype=np.int32)


@torch.inference_mode()
def read(format: str, tokens: np.ndarray) -> np.ndarray:
    """Return the logits after each token."""
    checkpoint = open_checkpoint(resolve(MODEL))
    config = checkpoint.config
    linears = PackedLinears(format)  # type: ignore[arg-type]
    if format == "int8":
        # Convert the file's 4-bit weights to int8 instead of using them directly.
        linears.quantized_kinds = frozenset()
    weights = load_weights(checkpoint, torch.float32, linears=linears)
    model = build_decoder(config, weights)
    assert isinstance(model, CppDecoder)
    count = len(tokens)
    shape = (config.num_layers, count // PAGE + 1, PAGE, 2 * config.num_kv_heads * config.head_dim)
    cache = torch.zeros(shape, dtype=select_numbers(format).cache)
    plan = StepPlan(
        token_ids=tokens,
        positions=np.arange(count, dtype=np.int32),
        query_lengths=np.array([count], dtype=np.int32),
        context_lengths=np.array([count], dtype=np.int32),
        block_tables=np.arange(count // PAGE + 1, dtype=np.int32)[None],
        slot_mapping=np.arange(count, dtype=np.int64),
        needs_sample=np.ones(1, dtype=bool),
        sampling=SimpleNamespace(prompt_targets={}),  # type: ignore[arg-type]
    )
    return model.run_plan(plan, cache, np.arange(count))[1]


def perplexity(logits_TV: np.ndarray, tokens: np.ndarray) -> float:
    scores_TV = torch.from_numpy(logits_TV[:-1])
    return math.exp(torch.nn.functional.cross_entropy(scores_TV, torch.from_numpy(tokens[1:]).long()).item())


@pytest.fixture(scope="module")
def exact(tokens: np.ndarray) -> np.ndarray:
    return read("float32", tokens)


@pytest.mark.parametrize(
    ("format", "maximum", "margin"),
    [
        ("bfloat16", 0.005, 0.5),
        ("int4", 0.03, 1.0),
        *size([], soak=[("float16", 0.001, 0.1), ("int8", 0.01, 1.0)]),
    ],
)
def test_a_format_stays_near_float32(
    format: str, maximum: float, margin: float, tokens: np.ndarray, exact: np.ndarray
) -> None:
    """Perplexity changes by at most `most`, and the format's best token is within `margin` of float32's best logit."""
    logits = read(format, tokens)
    before, after = perplexity(exact, tokens), perplexity(logits, tokens)
    print(f"\nperplexity: float32 {before:.4f}, {format} {after:.4f}: {100 * (after / before - 1):+.3f} %")
    assert abs(after / before - 1) < maximum
    chosen = exact[np.arange(len(tokens)), logits.argmax(1)]
    print(f"largest margin {(exact.max(1) - chosen).max():.3f}")
    assert (exact.max(1) - chosen).max() < margin
