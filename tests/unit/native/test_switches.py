"""Optimisations can be switched off, and no answer depends on them."""

import pytest
import torch

from megatron_kernels.cpu.records import BFLOAT16, INT8
from megatron_kernels.cpu.switches import OF_A_STEP, InvalidSwitchError, Switch, is_on
from megatron_kernels.cpu.tuning import TUNING_VARIABLE, Tuning, tuning
from megatron_runtime.coordinator.scheduler_hints import request_scheduler_slices
from megatron_runtime.models.layers.cpu import select_numbers
from megatron_runtime.models.layers.linear import Linear

from .native_models import PLAIN, STEPS, Sequences, caches, native, step

needs_native = pytest.mark.skipif(not is_supported(), reason="needs AVX2 and Linux")


def test_a_switch_is_on_unless_it_is_zero() -> None:
    assert is_on(Switch.TILES, {})
    assert is_on(Switch.TILES, {"MEGATRON_TILES": "1"})
    assert not is_on(Switch.TILES, {"MEGATRON_TILES": "0"})
    with pytest.raises(InvalidSwitchError, match="MEGATRON_TILES='off': use 0"):
        is_on(Switch.TILES, {"MEGATRON_TILES": "off"})


def test_tuning_follows_switches_and_the_tuning_variable() -> None:
    assert tuning({}) == Tuning()
    assert tuning({Switch.TILES: "0", Switch.PREFETCH: "0"}) == Tuning(tile_rows=1, ahead=0)
    assert tuning({TUNING_VARIABLE: "query_block=4,ahead=512"}) == Tuning(query_block=4, ahead=512)
    assert tuning({TUNING_VARIABLE: "query_block=4", Switch.SHARED_KEYS: "0"}).query_block == 1
    assert (Tuning(tile_rows=9).rows_of(BFLOAT16), Tuning().rows_of(INT8), Tuning(tile_rows=2).rows_of(INT8)) == (
        6,
        3,
        2,
    )
    for wrong in ("speed=4", "query_block=", "query_block=0", "query_block=-1", "query_block"):
        with pytest.raises(InvalidSwitchError, match=TUNING_VARIABLE):
            tuning({TUNING_VARIABLE: wrong})


@torch.inference_mode()
def logits_of_steps(format: str) -> torch.Tensor:
    model, _ = native(PLAIN, format)
    cache, _ = caches(PLAIN)
    sequences = Sequences(PLAIN)
    return torch.cat([step(model, sequences.plan(new), cache) for new in STEPS])


@pytest.fixture(scope="module")
def usual() -> dict[str, torch.Tensor]:
    return {format: logits_of_steps(format) for format in ("float32", "bfloat16", "int8", "int4")}


@needs_native
@pytest.mark.parametrize("switch", OF_A_STEP)
def test_an_answer_has_the_same_bits_without_an_optimisation(
    switch: Switch, usual: dict[str, torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(switch, "0")
    for format, logits in usual.items():
        assert torch.equal(logits_of_steps(format), logits)


@needs_native
def test_the_cache_of_integer_weights_can_use_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(Switch.CACHE_IN_BFLOAT16, "0")
    assert select_numbers("int4").cache is torch.float32


def test_torch_can_use_unpacked_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(32, 16, generator=torch.Generator().manual_seed(0))
    x_TK = torch.randn(3, 16, generator=torch.Generator().manual_seed(1))
    expected = Linear(weight)(x_TK)
    monkeypatch.setenv(Switch.PACKED_LINEAR, "0")
    linear = Linear(weight)
    assert linear.dense() is weight
    torch.testing.assert_close(linear(x_TK), expected)


def test_the_coordinators_scheduler_hint_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(Switch.SHORT_SLICES, "0")
    assert request_scheduler_slices() is False
