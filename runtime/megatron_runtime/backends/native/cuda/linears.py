"""Matrices on a device, dense: products are torch's (cuBLAS)."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from megatron_runtime.models.layers.embedding import Embedding
from megatron_runtime.models.layers.linear import DenseLinears, Linear, Weight


class StackedLinear(Linear):
    """One of several matrices that lie in `stack_XNK`, one after the other."""

    def __init__(self, stack_XNK: torch.Tensor, number: int) -> None:
        super().__init__(stack_XNK[number], packed=False)
        self.stack_XNK = stack_XNK


class DeviceLinears(DenseLinears):
    """Implements LinearFactory. Each matrix goes to the device as soon as it is read."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype)
        self._device = device

    def linear(self, weight_NK: Weight) -> Linear:
        return super().linear(self._moved(weight_NK))

    def several(self, weights: Iterable[Weight], *, count: int) -> tuple[Linear, ...]:
        stack_XNK: torch.Tensor | None = None
        for number, weight_NK in enumerate(weights):
            if stack_XNK is None:
                stack_XNK = torch.empty(count, *weight_NK.shape, dtype=self.dtype, device=self._device)
            stack_XNK[number].copy_(_dense(weight_NK))
        assert stack_XNK is not None, "a layer has experts"
        return tuple(StackedLinear(stack_XNK, number) for number in range(count))

    def embedding(self, weight_VD: Weight) -> Embedding:
        return super().embedding(self._moved(weight_VD))

    def tied(self, weight_VD: Weight) -> tuple[Embedding, Linear]:
        return super().tied(self._moved(weight_VD))

    def _moved(self, weight: Weight) -> torch.Tensor:
        return _dense(weight).to(self._device, self.dtype)


def _dense(weight: Weight) -> torch.Tensor:
    assert isinstance(weight, torch.Tensor), "quantized_kinds is empty"
    return weight
