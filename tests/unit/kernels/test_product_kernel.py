"""Products: one row in Triton equals the reference, and runs only for the shapes of the table."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_kernels import product, product_triton

from .conftest import few


@given(outputs=st.sampled_from([1, 7, 8, 33]), inputs=st.sampled_from([1, 16, 512, 700]))
@few
def test_one_row(outputs, inputs, dtype, tolerance, generator):
    x = torch.randn(1, inputs, generator=generator).to(dtype)
    weight = torch.randn(outputs, inputs, generator=generator).mul_(inputs**-0.5).to(dtype)
    expected = product.product(x.float(), weight.float())
    tolerance.check(product_triton.one_row_product(x, weight), expected)


@pytest.mark.parametrize(("rows", "is_in_triton"), [(1, True), (2, False)])
def test_only_one_row_of_a_shape_in_the_table_runs_in_triton(monkeypatch, generator, rows, is_in_triton):
    launched = []
    one_row = product_triton.one_row_product
    monkeypatch.setattr(product_triton, "one_row_product", lambda x, w: launched.append(w.shape) or one_row(x, w))
    monkeypatch.setattr(product_triton, "ONE_ROW_PRODUCTS", frozenset({("cpu", 24, 40)}))
    x = torch.randn(rows, 40, generator=generator)
    for outputs in (24, 25):
        weight = torch.randn(outputs, 40, generator=generator)
        torch.testing.assert_close(product_triton.product(x, weight), product.product(x, weight))
    assert launched == [(24, 40)] * is_in_triton
