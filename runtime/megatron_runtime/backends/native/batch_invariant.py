"""A processor whose answers in float32 do not depend on what runs beside them."""

from __future__ import annotations

import torch

from megatron_runtime.backends.native.device import ModelRunner, Processor
from megatron_runtime.models.batch_invariant import BatchInvariantDecoder
from megatron_runtime.models.config import ModelConfig
from megatron_runtime.models.decoder import DecoderWeights
from megatron_runtime.models.layers.batch_invariant import BatchInvariantLinears
from megatron_runtime.models.layers.linear import LinearFactory


class BatchInvariantProcessor(Processor):
    def select_dtype(self, name: str) -> torch.dtype:
        if name not in ("auto", "float32"):
            raise ValueError(f"dtype={name!r}: batch_invariant=True is for float32: use float32 or auto")
        return torch.float32

    def linears(self, dtype: torch.dtype) -> LinearFactory:
        return BatchInvariantLinears(dtype)

    def runner(
        self, config: ModelConfig, weights: DecoderWeights, *, page_size: int, dtype: torch.dtype, max_length: int
    ) -> ModelRunner:
        return self._wrapper_class(BatchInvariantDecoder(config, weights), page_size=page_size, dtype=dtype)
