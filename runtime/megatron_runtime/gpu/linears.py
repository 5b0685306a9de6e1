"""Matrices on a device, dense: products are torch's (cuBLAS)."""

from __future__ import annotations

import torch

from megatron_runtime.layers.embedding import Embedding
from megatron_runtime.layers.linear import DenseLinears, Linear, Weight


class DeviceLinears(DenseLinears):
    """Implements LinearFactory. Each matrix goes to the device as soon as it is read."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(dtype)
        self._device = device

    def linear(self, weight_NK: Weight) -> Linear:
        return super().linear(self._moved(weight_NK))

    def embedding(self, weight_VD: Weight) -> Embedding:
        return super().embedding(self._moved(weight_VD))

    def tied(self, weight_VD: Weight) -> tuple[Embedding, Linear]:
        return super().tied(self._moved(weight_VD))

    def _moved(self, weight: Weight) -> torch.Tensor:
        assert isinstance(weight, torch.Tensor), "quantized_kinds is empty"
        return weight.to(self._device, self.dtype)
