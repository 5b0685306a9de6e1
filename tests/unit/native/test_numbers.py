"""Number formats of weights, activations and cache on a CPU, by the name of a dtype."""

import pytest
import torch

from megatron_runtime.models.layers.cpu import computes_in_bfloat16, select_numbers


def test_float32_is_exact_everywhere() -> None:
    numbers = select_numbers("float32")
    assert (numbers.weights, numbers.activations, numbers.cache) == ("float32", torch.float32, torch.float32)


def test_auto_is_bfloat16_where_the_cpu_computes_in_it() -> None:
    assert select_numbers("auto").weights == ("bfloat16" if computes_in_bfloat16() else "float32")


def test_integer_weights_have_a_bfloat16_cache_and_float32_activations() -> None:
    for name in ("int8", "int4"):
        numbers = select_numbers(name)
        assert numbers.is_native
        assert (numbers.activations, numbers.cache) == (torch.float32, torch.bfloat16)


def test_compiled_steps_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_NATIVE", "0")
    assert not select_numbers("float32").is_native
    with pytest.raises(ValueError, match=r"dtype='int4' is not supported.*use auto, float32, bfloat16"):
        select_numbers("int4")


def test_an_unknown_dtype_is_rejected_by_name() -> None:
    with pytest.raises(ValueError, match="dtype='float8'"):
        select_numbers("float8")
