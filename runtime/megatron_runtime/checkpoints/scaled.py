"""Reads scaled matrices: matrices that safetensors files store as FP8 or integer numbers with separate scales.

There are two layouts. DeepSeek and Qwen publish block-scaled FP8, with the tensors `weight` and `weight_scale_inv`.
Compressed-tensors (https://github.com/vllm-project/compressed-tensors) has `weight` or `weight_packed`, a
`weight_scale`, optionally a `weight_zero_point`, and a `weight_g_idx` if the columns are not in the order of the
groups.

In shapes, N is the number of outputs of a matrix, K the number of inputs, and G the number of groups of inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil

import torch

from megatron_runtime.models.config import UnsupportedModelError
from megatron_runtime.models.config_fields import OTHERS, Fields
from megatron_runtime.models.tensors import Part, TensorKind
from megatron_runtime.protocol.text import shown

Reader = Callable[[str, Part], torch.Tensor]

STORED_DTYPES = {"F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64}
"""Types of stored numbers that must be multiplied by a scale."""

_FP8, _COMPRESSED = "fp8", "compressed-tensors"
_FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_VALUES, _PACKED = ".weight", ".weight_packed"
_IGNORED = (".input_scale", ".activation_scale", ".weight_shape", ".input_zero_point", ".output_scale")
_WORD_BITS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class ScaledMatrix:
    """The description of how one scaled matrix is stored.

    shape:      (N, K).
    values:     name of the tensor of numbers, [N, K], or of int32 words, each of which has several numbers along K.
    bits:       bits per number in a word; None if the numbers are not packed.
    scale:      name of the scales. The matrix has one scale, or one per block of `rows` outputs and `columns` inputs.
    zero_point: name of the zero points, which have the layout of the scales but are packed along N; None if 0
                represents zero.
    groups:     name of the tensor that has the group of each input, int32 [K]; None if each `columns` consecutive
                inputs are a group.
    """

    shape: tuple[int, int]
    values: str
    scale: str
    rows: int
    columns: int
    bits: int | None = None
    zero_point: str | None = None
    groups: str | None = None

    def read(self, stored: Reader, part: Part = ()) -> torch.Tensor:
        """Return the values of a part of the matrix as bfloat16, the type that these models had before quantization."""
        outputs, inputs = (
            slice(*(part[axis] if axis < len(part) else slice(None)).indices(size)[:2])
            for axis, size in enumerate(self.shape)
        )
        if self.bits is None:
            numbers = stored(self.values, (outputs, inputs)).float()
        else:
            count = _WORD_BITS // self.bits
            words = stored(self.values, (outputs, slice(inputs.start // count, ceil(inputs.stop / count))))
            first = inputs.start // count * count
            numbers = _unpack(words, self.bits)[:, inputs.start - first : inputs.stop - first].float()
        row_of, column_of = self._places(stored, outputs, inputs)
        scales = stored(self.scale, ()).float()
        if scales.numel() == 1:
            scales = scales.view(1, 1)
        if self.zero_point is not None:
            zeros = stored(self.zero_point, ())
            if self.bits is not None:
                zeros = _unpack(zeros.T, self.bits).T
            numbers -= zeros.float()[row_of][:, column_of]
        return numbers.mul_(scales[row_of][:, column_of]).bfloat16()

    def _places(self, stored: Reader, outputs: slice, inputs: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the row of `scale` for each output in `outputs`, and the column of `scale` for each of `inputs`."""
        row_of = torch.arange(outputs.start, outputs.stop) // self.rows
        if self.groups is not None:
            return row_of, stored(self.groups, ())[inputs].long()
        return row_of, torch.arange(inputs.start, inputs.stop) // self.columns


def scaled_matrices(
    kinds: Mapping[str, TensorKind], quantization: Fields, stored: Reader
) -> tuple[dict[str, ScaledMatrix], set[str]]:
    """Return the scaled matrices by the name of the matrix, and the names of all stored tensors that belong to them.

    quantization: `quantization_config` of config.json; empty if config.json has none.

    Raises UnsupportedModelError, which names the unsupported quantization method, or a tensor whose scales do not fit.
    """
    if not quantization.values:
        return {}, set()
    method = quantization.get("quant_method")
    if method not in (_FP8, _COMPRESSED):
        raise UnsupportedModelError(
            f"{quantization.where} has quant_method {shown(method)}: supported are {_FP8!r} and {_COMPRESSED!r}; "
            f"{OTHERS}"
        )
    written = quantization.get("format", _FORMATS[0])
    if method == _COMPRESSED and written not in _FORMATS:
        raise UnsupportedModelError(
            f"{quantization.where} has format {shown(written)}: supported are {', '.join(map(repr, _FORMATS))}; "
            f"{OTHERS}"
        )
    # Its layers multiply their inputs by matrices that are not in the files.
    quantization.only("transform_config")
    quantization.below("sparsity_config").only("format", "dense")
    block = quantization.values.get("weight_block_size")
    matrices: dict[str, ScaledMatrix] = {}
    parts = {name for name in kinds if name.endswith(_IGNORED)}
    for name in kinds:
        for ending in (".weight_scale_inv", ".weight_scale"):
            if name.endswith(ending):
                module = name.removesuffix(ending)
                matrix = _matrix(module, name, kinds, stored, block)
                matrices[module + _VALUES] = matrix
                parts |= {each for each in (matrix.values, name, matrix.zero_point, matrix.groups) if each is not None}
    return matrices, parts


def _matrix(module: str, scale: str, kinds: Mapping[str, TensorKind], stored: Reader, block: object) -> ScaledMatrix:
    packed = module + _PACKED
    values = packed if packed in kinds else module + _VALUES
    if values not in kinds or len(kinds[values].shape) != 2:
        raise UnsupportedModelError(f"the checkpoint has tensor {scale!r} and no matrix {values!r} to scale")
    rows, columns = kinds[values].shape
    bits = None
    if values == packed:
        rows, columns = (int(size) for size in stored(f"{module}.weight_shape", ()))
        words = kinds[values].shape[1]
        bits = next((bits for bits in (4, 8) if words == ceil(columns * bits / _WORD_BITS)), None)
        if bits is None:
            raise UnsupportedModelError(
                f"tensor {values!r} has {words} words for {columns} numbers: supported are 4 and 8 bits"
            )
    shape = kinds[scale].shape
    down, across = (1, 1) if len(shape) < 2 and kinds[scale].shape in ((), (1,)) else (*shape, 1)[:2]
    blocks = (ceil(rows / down), ceil(columns / across))
    if isinstance(block, list) and len(block) == 2 and all(type(each) is int and each > 0 for each in block):
        blocks = (block[0], block[1])
    if (ceil(rows / blocks[0]), ceil(columns / blocks[1])) != (down, across):
        raise UnsupportedModelError(
            f"tensor {scale!r} has shape {shape}: it does not fit {values!r} of {rows} x {columns}"
        )
    zero_point, groups = f"{module}.weight_zero_point", f"{module}.weight_g_idx"
    return ScaledMatrix(
        shape=(rows, columns),
        values=values,
        scale=scale,
        rows=blocks[0],
        columns=blocks[1],
        bits=bits,
        zero_point=zero_point if zero_point in kinds else None,
        groups=groups if groups in kinds else None,
    )


def _unpack(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack int32 words [N, W], each with n numbers, to signed numbers [N, W * n].

    The lowest bits come first. Each number is stored with an offset of 2 ** (bits - 1).
    """
    shifts = torch.arange(0, _WORD_BITS, bits, dtype=torch.int32)
    numbers = (words[:, :, None] >> shifts) & ((1 << bits) - 1)
    return (numbers - (1 << (bits - 1))).flatten(1)
