"""y = x W^T: the products of a dense layer (queries with keys and values, output, gate with up, down) and of the head.

Shapes: T tokens, K inputs, N outputs.
Types:  float32, bfloat16, float16 alike; sums in float32, rounded once.
Bound:  memory with few tokens; bytes = (N K + T (N + K)) s: at decode, these are nearly all bytes of a step. Compute
        with many; 2 T N K operations.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


def bytes_moved(tokens: int, outputs: int, inputs: int, *, element_size: int) -> int:
    return (outputs * inputs + tokens * (outputs + inputs)) * element_size


def flops(tokens: int, outputs: int, inputs: int) -> int:
    return 2 * tokens * outputs * inputs


def product(x_TK: torch.Tensor, weight_NK: torch.Tensor) -> torch.Tensor:
    """Return y_TN."""
    return F.linear(x_TK, weight_NK)
