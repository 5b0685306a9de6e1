"""Matrices in the quantized formats of GGUF files. A row consists of blocks, each with small integers and a scale.

Shapes: N rows, K columns, B bytes of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod

import torch

F32, F16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0 = 0, 1, 2, 3, 6, 7, 8
Q2_K, Q3_K, Q4_K, Q5_K, Q6_K, BF16 = 10, 11, 12, 13, 14, 30
IQ2_XXS, IQ2_XS, IQ3_XXS, IQ1_S, IQ4_NL, IQ3_S, IQ2_S, IQ4_XS, IQ1_M = 16, 17, 18, 19, 20, 21, 22, 23, 29

KIND_NAMES = {
    F32: "F32",
    F16: "F16",
    BF16: "BF16",
    Q4_0: "Q4_0",
    Q4_1: "Q4_1",
    Q5_0: "Q5_0",
    Q5_1: "Q5_1",
    Q8_0: "Q8_0",
    Q2_K: "Q2_K",
    Q3_K: "Q3_K",
    Q4_K: "Q4_K",
    Q5_K: "Q5_K",
    Q6_K: "Q6_K",
    IQ1_S: "IQ1_S",
    IQ1_M: "IQ1_M",
    IQ2_XXS: "IQ2_XXS",
    IQ2_XS: "IQ2_XS",
    IQ2_S: "IQ2_S",
    IQ3_XXS: "IQ3_XXS",
    IQ3_S: "IQ3_S",
    IQ4_NL: "IQ4_NL",
    IQ4_XS: "IQ4_XS",
}
BLOCK_SIZES = {
    F32: (1, 4),
    F16: (1, 2),
    BF16: (1, 2),
    Q4_0: (32, 18),
    Q4_1: (32, 20),
    Q5_0: (32, 22),
    Q5_1: (32, 24),
    Q8_0: (32, 34),
    Q2_K: (256, 84),
    Q3_K: (256, 110),
    Q4_K: (256, 144),
    Q5_K: (256, 176),
    Q6_K: (256, 210),
    IQ1_S: (256, 50),
    IQ1_M: (256, 56),
    IQ2_XXS: (256, 66),
    IQ2_XS: (256, 74),
    IQ2_S: (256, 82),
    IQ3_XXS: (256, 98),
    IQ3_S: (256, 110),
    IQ4_NL: (32, 18),
    IQ4_XS: (256, 136),
}
"""Number of values and number of bytes of a block, by GGML type."""
SCALES = {
    Q4_0: slice(0, 2),
    Q4_1: slice(0, 4),
    Q5_0: slice(0, 2),
    Q5_1: slice(0, 4),
    Q8_0: slice(0, 2),
    Q2_K: slice(80, 84),
    Q3_K: slice(108, 110),
    Q4_K: slice(0, 4),
    Q5_K: slice(0, 4),
    Q6_K: slice(208, 210),
    **dict.fromkeys((IQ1_S, IQ2_XXS, IQ2_XS, IQ2_S, IQ3_XXS, IQ3_S, IQ4_NL, IQ4_XS), slice(0, 2)),
}
"""The bytes of a block that are float16 numbers, by quantized GGML type. All other bytes are small integers.

IQ1_M is missing, because its scale consists of parts of other bytes. Its values are validated instead.
"""
_HALF_EXPONENT = 0x7C00
PLAIN_DTYPES = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}


@dataclass(frozen=True, slots=True)
class QuantizedTensor:
    """A matrix in a quantized format of GGUF.

    kind:      GGML type number.
    shape:     (N, K).
    blocks_NB: uint8, a view of the file if possible.
    """

    kind: int
    shape: tuple[int, int]
    blocks_NB: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """Return weight_NK in float32."""
        return dequantize(self.kind, self.blocks_NB, self.shape)

    def is_finite(self) -> bool:
        """Return whether all values are finite. This method reads only the scales and offsets of the blocks."""
        where = SCALES[self.kind]
        words = self.blocks_NB.reshape(-1, BLOCK_SIZES[self.kind][1]).view(torch.int16)
        # A float16 is not finite if all bits of its exponent are set.
        exponents = words[:, where.start // 2 : where.stop // 2] & _HALF_EXPONENT
        return bool(exponents.amax() < _HALF_EXPONENT)

    def rows(self, index: torch.Tensor | slice) -> QuantizedTensor:
        """Return a matrix with the rows `index`, as a view if possible."""
        blocks_NB = self.blocks_NB[index]
        return QuantizedTensor(self.kind, (len(blocks_NB), self.shape[1]), blocks_NB)

    def columns(self, part: slice) -> QuantizedTensor:
        """Return a matrix with the columns `part`, which must be whole blocks."""
        values, size = BLOCK_SIZES[self.kind]
        start, stop, _ = part.indices(self.shape[1])
        if start % values or stop % values:
            raise ValueError(f"columns {start} to {stop} cut through blocks of {values}")
        blocks_NB = self.blocks_NB[:, start // values * size : stop // values * size]
        return QuantizedTensor(self.kind, (self.shape[0], stop - start), blocks_NB)


def concatenate(parts: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """Return one matrix with the rows of all `parts`, which have the same GGML type and the same number of columns."""
    shape = (sum(part.shape[0] for part in parts), parts[0].shape[1])
    return QuantizedTensor(parts[0].kind, shape, torch.cat([part.blocks_NB for part in parts]))


def dequantize(kind: int, blocks: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return the values of `blocks` (uint8), in float32 for quantized kinds.

    For the kinds F32, F16 and BF16, return a view of `blocks` in the type of the kind.
    """
    if kind in PLAIN_DTYPES:
        return blocks.reshape(-1).view(PLAIN_DTYPES[kind]).view(shape)
    if kind in _FORMATS:
        return _FORMATS[kind](blocks.reshape(-1, BLOCK_SIZES[kind][1])).view(shape)
    import gguf

    rows = blocks.reshape(prod(shape[:-1]), -1).contiguous().numpy()
    values = gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(kind))
    return torch.from_numpy(values).reshape(shape)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _nibbles(blocks[:, 2:]).sub_(8).mul_(_half(blocks[:, :2]))


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    scales = _half(blocks[:, :4])
    return _nibbles(blocks[:, 4:]).mul_(scales[:, :1]).add_(scales[:, 1:])


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return blocks[:, 2:].view(torch.int8) * _half(blocks[:, :2])


def _half(two_bytes: torch.Tensor) -> torch.Tensor:
    return two_bytes.contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """Return the 32 four-bit values of each block of 16 bytes.

    The values in the low halves of all bytes are first. The values in the high halves follow.
    """
    values = torch.empty(len(packed), 2, 16)
    values[:, 0] = packed & 15
    values[:, 1] = packed >> 4
    return values.view(-1, 32)


_FORMATS: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {Q4_0: _q4_0, Q4_1: _q4_1, Q8_0: _q8_0}
"""Dequantization function of each GGML type.

These functions are several times as fast as the gguf package, and return equal values.
"""
