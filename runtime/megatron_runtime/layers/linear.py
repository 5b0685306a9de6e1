"""A linear layer without bias whose weight is laid out once for the processor's matrix product."""

from __future__ import annotations

import torch
import torch.nn.functional as F


class Linear:
    """y_TN = x_TK @ weight_NK.T

    On the CPU the weight is re-laid for oneDNN. Measured in float32 on a busy AVX2 machine, one thread, best of 25,
    plain to packed, ten layers of a 135M model: 35 -> 23 ms at T = 8; within the noise at T = 1, 32 and 256.
    `packed=False` keeps the dense weight, for one that is used as a table too.
    """

    def __init__(self, weight_NK: torch.Tensor, *, packed: bool = True) -> None:
        self.out_features, self.in_features = weight_NK.shape
        self._packed = packed and _can_pack(weight_NK)
        self._weight = torch.ops.mkldnn._reorder_linear_weight(weight_NK) if self._packed else weight_NK

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        if self._packed:
            return torch.ops.mkldnn._linear_pointwise(x_TK, self._weight, None, "none", [], "")
        return F.linear(x_TK, self._weight)

    def dense(self) -> torch.Tensor:
        """weight_NK as it was given; a copy where it is packed."""
        return self._weight.to_dense() if self._packed else self._weight


def _can_pack(weight: torch.Tensor) -> bool:
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype is torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype is torch.float32
