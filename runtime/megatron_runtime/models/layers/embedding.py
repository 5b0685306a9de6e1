"""A table of vectors by token id."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from megatron_kernels.quantized import QuantizedTensor


class Embedding:
    """x_TD = weight_VD[ids_T], of type `dtype`. A quantised table stays so: only the rows asked for are decoded."""

    def __init__(self, weight_VD: torch.Tensor | QuantizedTensor, dtype: torch.dtype) -> None:
        self.num_rows = weight_VD.shape[0]
        self._weight = weight_VD
        self._dtype = dtype

    def __call__(self, ids_T: torch.Tensor) -> torch.Tensor:
        if isinstance(self._weight, QuantizedTensor):
            return self._weight.rows(ids_T).dequantize().to(self._dtype)
        return F.embedding(ids_T, self._weight)

    def dense(self) -> torch.Tensor:
        """The whole table, of type `dtype`."""
        if isinstance(self._weight, QuantizedTensor):
            return self._weight.dequantize().to(self._dtype)
        return self._weight
