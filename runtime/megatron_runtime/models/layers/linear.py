"""Linear layers without bias, embeddings, and the factory that a model's matrices are made by."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F

from megatron_kernels.cpu.switches import Switch, is_on
from megatron_kernels.quantized import QuantizedTensor

Weight = torch.Tensor | QuantizedTensor


class Linear:
    """y_TN = x_TK @ weight_NK.T

    On the CPU the weight is packed once for oneDNN's matrix product. `packed=False` keeps the dense weight, for a
    weight that is used as a table too.
    """

    def __init__(self, weight_NK: torch.Tensor, *, packed: bool = True) -> None:
        self.out_features, self.in_features = weight_NK.shape
        self._packed = packed and is_on(Switch.PACKED_LINEAR) and _can_pack(weight_NK)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight_NK) if self._packed else weight_NK

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise(x_TK, self._weight, None, "none", [], "")
        return F.linear(x_TK, self._weight)

    @property
    def num_bytes(self) -> int:
        """Bytes that a product reads."""
        return self.out_features * self.in_features * self._weight.dtype.itemsize

    def dense(self) -> torch.Tensor:
        """weight_NK as it was given; a copy where it is packed."""
        return self._weight.to_dense() if self._packed else self._weight


class Embedding:
    """x_TD = weight_VD[ids_T], of type `dtype`. A quantised table stays quantised: a lookup decodes only its rows."""

    def __init__(self, weight_VD: Weight, dtype: torch.dtype) -> None:
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


class LinearFactory(Protocol):
    """Makes a model's matrices, one after the other while weights are loaded.

    dtype:           type of the activations and of dense weights.
    quantized_kinds: GGML types whose blocks the factory takes as they are; it gets dense weights of all other types.

    Blocks may be a view of their file, and their rows need not be contiguous: the factory copies what it keeps.
    """

    @property
    def dtype(self) -> torch.dtype: ...
    @property
    def quantized_kinds(self) -> frozenset[int]: ...

    def linear(self, weight_NK: Weight) -> Linear: ...

    def several(self, weights: Iterable[Weight], *, count: int) -> tuple[Linear, ...]:
        """`count` matrices of one shape, the experts of a layer: a device may keep them in one tensor."""

    def fused(self, parts: Sequence[QuantizedTensor]) -> Linear:
        """One matrix of the rows of all parts, which have one GGML type."""

    def embedding(self, weight_VD: Weight) -> Embedding: ...

    def tied(self, weight_VD: Weight) -> tuple[Embedding, Linear]:
        """A table that is the head too."""


class DenseLinears:
    """Implements LinearFactory: every weight is dense."""

    quantized_kinds: frozenset[int] = frozenset()

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def linear(self, weight_NK: Weight) -> Linear:
        assert isinstance(weight_NK, torch.Tensor), "quantized_kinds is empty"
        return Linear(weight_NK)

    def several(self, weights: Iterable[Weight], *, count: int) -> tuple[Linear, ...]:
        return tuple(map(self.linear, weights))

    def fused(self, parts: Sequence[QuantizedTensor]) -> Linear:
        raise TypeError("quantized_kinds is empty: dense weights are fused before")

    def embedding(self, weight_VD: Weight) -> Embedding:
        return Embedding(weight_VD, self.dtype)

    def tied(self, weight_VD: Weight) -> tuple[Embedding, Linear]:
        assert isinstance(weight_VD, torch.Tensor), "quantized_kinds is empty"
        return self.embedding(weight_VD), Linear(weight_VD, packed=False)


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype is torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype is torch.float32
