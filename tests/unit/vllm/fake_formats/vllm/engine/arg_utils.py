"""See the README."""

from __future__ import annotations

from vllm.config import ModelConfig


class AsyncEngineArgs:
    def __init__(self, *, model: str, mm_processor_cache_gb: float) -> None:
        assert mm_processor_cache_gb == 0
        self.model = model

    def create_model_config(self) -> ModelConfig:
        return ModelConfig(self.model)
