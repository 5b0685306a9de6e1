"""The echo backend: the native engine's thread and core on an executor without a model, with fault injection."""

from __future__ import annotations

from megatron_runtime.backends.echo.echo_executor import EchoExecutor
from megatron_runtime.backends.echo.faults import parse_faults
from megatron_runtime.backends.echo.simulated_ranks import SimulatedRanks
from megatron_runtime.backends.native.backend import NativeBackend
from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.backends.native.text import ModelText
from megatron_runtime.engine.settings import EngineSettings

PAGE_SIZE = 16
TOKEN_BYTES = 4
MAX_CACHE_BYTES = 16 << 20
"""Four million tokens. A cache of a model's usual size holds hundreds of millions, which take seconds to allocate."""


class EchoBackend(NativeBackend):
    """Implements EngineBackend.

    Raises:
        ValueError: a setting is not usable; the message names it and the remedy.
    """

    def __init__(self, settings: EngineSettings) -> None:
        if settings.parallel.world != 1:
            raise ValueError("executor 'echo' runs in one process: use --echo-ranks for ranks that it simulates")
        faults = parse_faults(settings.echo_faults)
        memory = min(settings.kv_cache_memory, MAX_CACHE_BYTES)
        executor = EchoExecutor(
            max_sequence_length=settings.max_sequence_length or 4096,
            page_size=PAGE_SIZE,
            num_pages=1 + max(1, memory // (PAGE_SIZE * TOKEN_BYTES)),
            step_seconds=settings.echo_step_seconds,
            faults=faults,
        )
        super().__init__(
            EngineCore(executor, settings.inference_config),
            ModelText.of_model(settings.model),
            ranks=SimulatedRanks(settings.echo_ranks, faults),
            name="echo",
        )
