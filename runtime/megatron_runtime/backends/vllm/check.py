"""Validates the settings of an engine on vLLM without starting it."""

from __future__ import annotations

import asyncio

from megatron_runtime.backends.vllm.backend import VllmBackend
from megatron_runtime.engine.settings import EngineSettings


def check(settings: EngineSettings) -> None:
    """Build vLLM's engine configuration. Raises ValueError as VllmBackend does."""
    backend = VllmBackend(settings)
    asyncio.run(backend.stop())
