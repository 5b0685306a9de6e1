"""QK-norm, rotation and append: the kernel equals its reference, which equals the runtime's own layers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_kernels import qk_norm_rope_append, qk_norm_rope_append_triton
from megatron_runtime.models.layers.paged_attention import RotaryEmbedding

from .conftest import few

PAGES, PAGE = 3, 16


def angles(tokens, pairs, generator):
    positions = torch.randint(0, 5000, (tokens,), generator=generator)
    return RotaryEmbedding(1.0 / 10000 ** (torch.arange(pairs) / pairs)).rotation(positions, torch.float32)


def views(rotary, pairs):
    """Return views of the runtime's tables. Only the second half of its sin is not negated."""
    return rotary.cos_T1D[:, 0, :pairs], rotary.sin_T1D[:, 0, pairs:]


@given(
    slots=st.lists(st.one_of(st.just(-1), st.integers(0, PAGES * PAGE - 1)), max_size=4, unique=True),
    heads=st.sampled_from([(1, 1), (9, 3), (4, 2)]),
    head_dim=st.sampled_from([64, 128, 80]),
    norm=st.sampled_from([None, "of each head", "of all heads"]),
)
@few
def test_rope_append(slots, heads, head_dim, norm, dtype, tolerance, generator):
    num_heads, num_kv_heads = heads
    width = (num_heads + 2 * num_kv_heads) * head_dim
    qkv = torch.randn(len(slots), width + 8, generator=generator).to(dtype)[:, :width]
    norms, means = [None, None], None
    if norm is not None:
        sizes = [head_dim, head_dim] if norm == "of each head" else [num_heads * head_dim, num_kv_heads * head_dim]
        norms = [torch.randn(size, generator=generator).to(dtype) for size in sizes]
    if norm == "of all heads":
        means = torch.rand(len(slots), 2, generator=generator) + 0.1
    cos, sin = views(angles(len(slots), head_dim // 2, generator), head_dim // 2)
    cache = torch.randn(PAGES, PAGE, 2 * num_kv_heads * head_dim, generator=generator).to(dtype)
    results = []
    for module in (qk_norm_rope_append, qk_norm_rope_append_triton):
        own_qkv, own_cache = qkv.clone(), cache.clone()
        module.qk_norm_rope_append(
            own_qkv,
            cos,
            sin,
            own_cache,
            torch.tensor(slots, dtype=torch.int64),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            q_norm_C=norms[0],
            k_norm_C=norms[1],
            mean_squares_T2=means,
        )
        results.append((own_qkv, own_cache))
    (expected_qkv, expected_cache), (actual_qkv, actual_cache) = results
    tolerance.check(actual_qkv, expected_qkv)
    tolerance.check(actual_cache, expected_cache)
    q_width, kv_width = num_heads * head_dim, num_kv_heads * head_dim
    assert torch.equal(actual_qkv[:, q_width:], qkv[:, q_width:])
    for row, slot in enumerate(slots):
        if slot >= 0:
            values = actual_cache.flatten(0, 1)[slot, kv_width:]
            assert torch.equal(values, qkv[row, q_width + kv_width :])


def test_the_reference_equals_the_runtimes_layers(generator):
    rotary = angles(5, 32, generator)
    qkv = torch.randn(5, 4 * 64, generator=generator)
    cache = torch.zeros(PAGES, PAGE, 2 * 64)
    slots = torch.tensor([40, 3, 7, 0, 16])
    expected = qkv.clone()
    rotary.apply_(expected.unflatten(1, (-1, 64))[:, :3])
    qk_norm_rope_append.qk_norm_rope_append(qkv, *views(rotary, 32), cache, slots, num_heads=2, num_kv_heads=1)
    torch.testing.assert_close(qkv[:, :128], expected[:, :128])
    torch.testing.assert_close(cache.flatten(0, 1)[slots], expected[:, 128:])


@pytest.mark.parametrize(
    ("width", "norm", "message"),
    [(200, None, "qkv has 200 columns: must be 3 heads x 2 x 32"), (192, torch.ones(64), "both or neither")],
)
def test_inconsistent_shapes_are_rejected(width, norm, message):
    with pytest.raises(ValueError, match=message):
        qk_norm_rope_append_triton.qk_norm_rope_append(
            torch.zeros(1, width),
            torch.zeros(1, 32),
            torch.zeros(1, 32),
            torch.zeros(1, PAGE, 128),
            torch.zeros(1, dtype=torch.int64),
            num_heads=1,
            num_kv_heads=1,
            q_norm_C=norm,
        )
