"""The activation of a gated feed-forward block: SwiGLU, silu(gate) * up (Shazeer 2020, arXiv:2002.05202), or GeGLU.

GeGLU has the tanh approximation of gelu (Hendrycks and Gimpel 2016, arXiv:1606.08415) instead of silu.

Shapes: T tokens, F feed-forward width, G = 2 F. Each row contains gate, then up, as a fused product returns them.
Types:  float32, bfloat16 or float16; computed in float32, rounded once.
Bound:  memory; bytes = 3 T F s for elements of s bytes (two read, one written).
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F

Activation = Literal["silu", "gelu_tanh"]


def bytes_moved(tokens: int, width: int, *, element_size: int) -> int:
    return 3 * tokens * width * element_size


def swiglu(
    gate_up_TG: torch.Tensor, *, activation: Activation = "silu", out_TF: torch.Tensor | None = None
) -> torch.Tensor:
    """Return activation(gate) * up, [T, F].

    gate_up_TG: [T, 2 F]. Each row must be contiguous; the distance between rows is arbitrary.
    out_TF:     receives the result; None allocates it.
    """
    gate_TF, up_TF = gate_up_TG.float().chunk(2, dim=-1)
    gate_TF = F.silu(gate_TF) if activation == "silu" else F.gelu(gate_TF, approximate="tanh")
    result_TF = (gate_TF * up_TF).to(gate_up_TG.dtype)
    return result_TF if out_TF is None else out_TF.copy_(result_TF)
