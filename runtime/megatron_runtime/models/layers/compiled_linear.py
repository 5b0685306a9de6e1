"""Packed linear layers and embeddings for compiled code on the CPU, and their factory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from megatron_kernels.cpu.compiled import entry
from megatron_kernels.cpu.entry_points import LOOK_UP
from megatron_kernels.cpu.memory import WeightMemory
from megatron_kernels.cpu.packing import QUANTIZED_KINDS, PackedMatrix, fits, pack
from megatron_kernels.cpu.records import PRODUCT
from megatron_kernels.cpu.switches import Switch, is_on
from megatron_kernels.cpu.thread_pool import shared_thread_pool
from megatron_kernels.quantized import QuantizedTensor
from megatron_runtime.models.layers.linear import Embedding, Linear, LinearFactory, Weight

Format = Literal["float32", "bfloat16", "int8", "int4"]


class NativeLinear(Linear):
    """y_TN = x_TK @ weight_NK.T on a packed matrix; activations are float32."""

    def __init__(self, matrix: PackedMatrix) -> None:
        self.matrix = matrix
        self.out_features, self.in_features = matrix.outputs, matrix.inputs
        self._record = matrix.record

    def __call__(self, x_TK: torch.Tensor) -> torch.Tensor:
        x_TK = x_TK.to(torch.float32).contiguous()
        count, width = x_TK.shape
        y_TN = torch.empty(count, self.out_features)
        inputs = np.empty(count * (5 * width + width // 4), dtype=np.uint8)
        job = np.zeros(1, dtype=PRODUCT)
        job["matrix"] = self._record.ctypes.data
        job["tokens"], job["width"] = count, width
        job["x"], job["y"], job["shared_inputs"] = x_TK.data_ptr(), y_TN.data_ptr(), inputs.ctypes.data
        shared_thread_pool().run_product(job)
        return y_TN

    @property
    def num_bytes(self) -> int:
        return self.matrix.data.nbytes

    def dense(self) -> torch.Tensor:
        """Return weight_NK in float32, as it was rounded."""
        return _rows(self._record, torch.arange(self.out_features), self.in_features)


class NativeEmbedding(Embedding):
    """x_TD = weight_VD[ids_T] of a packed table, float32."""

    def __init__(self, matrix: PackedMatrix) -> None:
        self.matrix = matrix
        self._record = matrix.record

    def __call__(self, ids_T: torch.Tensor) -> torch.Tensor:
        return _rows(self._record, ids_T, self.matrix.inputs)

    def dense(self) -> torch.Tensor:
        return self(torch.arange(self.matrix.outputs))


def _rows(record: npt.NDArray[Any], ids_T: torch.Tensor, inputs: int) -> torch.Tensor:
    y_TK = np.empty((len(ids_T), inputs), dtype=np.float32)
    ids = ids_T.to(torch.int64).numpy()
    entry()(LOOK_UP, record.ctypes.data, ids.ctypes.data, len(ids), y_TK.ctypes.data)
    return torch.from_numpy(y_TK)


class NativeLinears(LinearFactory):
    """Creates packed matrices. A matrix whose size cannot be packed stays dense, of type float32.

    format: of dense weights. Quantized weights keep their blocks if the format is an integer one, else they are
            unpacked into the format.
    """

    def __init__(self, format: Format) -> None:
        # Four bits are too few for embeddings, whose values are less evenly distributed than other weights.
        self._format, self._table_format = format, "int8" if format == "int4" else format
        self.quantized_kinds = QUANTIZED_KINDS
        self._memory = WeightMemory()

    def settle(self) -> None:
        """Join the pages of the weights into larger ones, after the last matrix."""
        if is_on(Switch.LARGE_PAGES):
            self._memory.join_pages()

    def linear(self, weight_NK: Weight) -> Linear:
        matrix = self._pack(weight_NK, self._format)
        return super().linear(weight_NK) if matrix is None else NativeLinear(matrix)

    def embedding(self, weight_VD: Weight) -> Embedding:
        matrix = self._pack(weight_VD, self._table_format)
        return super().embedding(weight_VD) if matrix is None else NativeEmbedding(matrix)

    def tied(self, weight_VD: Weight) -> tuple[Embedding, Linear]:
        matrix = self._pack(weight_VD, self._table_format)
        return super().tied(weight_VD) if matrix is None else (NativeEmbedding(matrix), NativeLinear(matrix))

    def _pack(self, weight: Weight, format: str) -> PackedMatrix | None:
        parts: Sequence[torch.Tensor | QuantizedTensor] = [weight] if isinstance(weight, torch.Tensor) else weight
        return pack(weight, format, self._memory) if all(fits(*part.shape) for part in parts) else None
