"""Number formats of weights and cache on a CPU, by the name of a dtype and the type of the checkpoint."""

import pytest
import torch

from megatron_runtime.models.layers.cpu import select_numbers


def test_float32_is_exact_everywhere() -> None:
    numbers = select_numbers("float32", torch.bfloat16, is_quantized=True)
    assert (numbers.weights, numbers.cache) == ("float32", torch.float32)


@pytest.mark.parametrize("format", ["float32", "bfloat16", "float16"])
def test_auto_keeps_the_precision_of_the_checkpoint(format: str) -> None:
    numbers = select_numbers("auto", getattr(torch, format))
    assert (numbers.weights, numbers.cache) == (format, getattr(torch, format))


def test_auto_rounds_quantized_weights_to_bfloat16() -> None:
    assert select_numbers("auto", is_quantized=True).weights == "bfloat16"


def test_integer_weights_have_a_bfloat16_cache() -> None:
    for name in ("int8", "int4"):
        assert select_numbers(name).cache is torch.bfloat16


def test_an_unknown_dtype_is_rejected_by_name() -> None:
    with pytest.raises(ValueError, match=r"dtype='float8' .* use auto, float32, bfloat16, float16, int8, int4"):
        select_numbers("float8")
