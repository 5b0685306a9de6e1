"""The matrices of a model (embedding tables, and linear layers without bias), and the factory that creates them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F

from megatron_kernels.cpu.packing import PackedMatrix
from megatron_kernels.quantized import QuantizedTensor

Weight = torch.Tensor | Sequence[QuantizedTensor] | Sequence[PackedMatrix]
"""A dense matrix, or quantized or packed matrices whose rows together form one matrix. Their formats can differ."""


class Linear:
    """A linear layer without bias, y_TN = x_TK @ weight_NK.T, or an embedding table."""

    def __init__(self, weight_NK: torch.Tensor) -> None:
        self.out_features, self.in_features = weight_NK.shape
        self._weight = weight_NK

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        return F.linear(x_TK, self._weight)

    def look_up(self, ids_T: torch.Tensor) -> torch.Tensor:
        """Return the rows x_TK = weight_NK[ids_T] of an embedding table."""
        return F.embedding(ids_T, self._weight)

    @property
    def num_bytes(self) -> int:
        """Number of bytes of weights that a matrix product reads."""
        return self._weight.nbytes

    def dense(self) -> torch.Tensor:
        """Return the dense matrix, weight_NK."""
        return self._weight

    def stored(self) -> list[tuple[str, torch.Tensor]]:
        """Return the parts of the matrix as they are in memory, not copied, as pairs (name of the format, tensor)."""
        return [("dense", self._weight)]


class LinearFactory:
    """A factory that creates a model's matrices while its weights are loaded. This base class creates dense matrices.

    quantized_kinds: GGML types that the factory accepts in stored form. Weights of all other types are passed to it
                     dense.
    dense_dtypes:    types of dense weights that the factory accepts unchanged. Weights of other types are converted to
                     the model's type first.
    panel_formats:   formats of packed weights that the factory accepts.
    checks_values:   whether dense weights are checked for non-finite values while they are read. If False, the matrices
                     are checked after loading, as on a GPU.

    The factory copies dense and quantized weights. Quantized weights can be a view of their file. The rows of this view
    need not be contiguous. The caller overwrites dense weights after the call. Packed weights can be a view of their
    file. The factory keeps a view of packed weights.
    """

    quantized_kinds: frozenset[int] = frozenset()
    dense_dtypes: frozenset[torch.dtype] = frozenset()
    panel_formats: frozenset[int] = frozenset()
    checks_values: bool = True

    def value_bytes(self, dtype: torch.dtype) -> float:
        """Return the approximate number of bytes in memory per weight, for a model of type `dtype`."""
        return dtype.itemsize

    def dense(self, weight: Weight) -> torch.Tensor:
        """Return a weight as one dense matrix, on the device and in the data type that a step needs."""
        return dense(weight)

    def linear(self, weight_NK: Weight) -> Linear:
        return Linear(self.dense(weight_NK))

    def several(self, weights: Iterable[Weight], *, count: int) -> tuple[Linear, ...]:
        """Return the matrices of the `count` experts of a layer. All have the same shape.

        A factory for a device can store the matrices in one tensor.
        """
        return tuple(map(self.linear, weights))

    def embedding(self, weight_VD: Weight) -> Linear:
        """Return an embedding table. The table can also be used as the output head."""
        return Linear(self.dense(weight_VD))


def dense(weight: Weight) -> torch.Tensor:
    """Return a weight as one dense matrix."""
    if isinstance(weight, torch.Tensor):
        return weight
    return torch.cat([part.dequantize() for part in weight])
