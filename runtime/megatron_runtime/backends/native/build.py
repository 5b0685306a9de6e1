"""From settings to the native backend: model source, device, executor, core. Imports torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_runtime.backends.native.backend import NativeBackend
from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.backends.native.select import select_executor
from megatron_runtime.backends.native.text import ModelText
from megatron_runtime.backends.native.torch_executor import TorchExecutor
from megatron_runtime.checkpoints.source import resolve
from megatron_runtime.distributed.shard import IndivisibleError, RankIdentity, rank_identity
from megatron_runtime.engine.settings import EngineSettings

if TYPE_CHECKING:
    from megatron_runtime.distributed.groups import Groups


def build_native(settings: EngineSettings) -> NativeBackend:
    """Return the backend that runs the model of `settings`; its weights are not loaded yet.

    Raises:
        ValueError: a setting or the model is not usable; the message names it and the remedy.
    """
    if settings.echo_faults or settings.echo_ranks != 1 or settings.echo_step_seconds:
        raise ValueError(
            f"executor {settings.executor!r} takes no faults, simulated ranks or step time: "
            "leave --fault, MEGATRON_ENGINE_FAULTS, --echo-ranks and --echo-step-seconds out, or use --executor echo"
        )
    controller, config = ModelText.of_model(settings.model), settings.inference_config
    if settings.parallel.world == 1:
        return NativeBackend(EngineCore(_executor(settings, controller), config), controller)
    identity = rank_identity(settings.parallel)
    if identity is None or identity.rank != 0:
        raise IndivisibleError(
            f"an engine of {settings.parallel.world} ranks is scheduled by its rank 0: start it by `megatron engine`, "
            "which starts all ranks of one machine, or by torchrun"
        )
    # Sockets and process groups, which only an engine of several ranks needs.
    from megatron_runtime.backends.native.ranked.process import lead

    ranks = lead(settings, identity, lambda groups: _executor(settings, controller, groups=groups, identity=identity))
    return NativeBackend(EngineCore(ranks, config), controller, ranks=ranks)


def run_other_rank(settings: EngineSettings, identity: RankIdentity) -> None:
    """Be a rank that is not the first, until the engine ends.

    Raises RankError, and ValueError as build_native() does.
    """
    from megatron_runtime.backends.native.ranked.process import follow

    controller = ModelText.of_model(settings.model)
    follow(settings, identity, lambda groups: _executor(settings, controller, groups=groups, identity=identity))


def _executor(
    settings: EngineSettings,
    controller: ModelText,
    *,
    groups: Groups | None = None,
    identity: RankIdentity | None = None,
) -> TorchExecutor:
    source = resolve(settings.model)
    if settings.model_format not in ("Auto", source.format):
        raise ValueError(
            f"model {settings.model!r} is {source.format}, format says {settings.model_format}: "
            f"use Auto or {source.format}"
        )
    threads = settings.threads
    if threads is not None and identity is not None:
        threads = max(1, threads // identity.local_world)
    return select_executor(
        source,
        controller,
        settings.inference_config,
        device=settings.device,
        dtype=settings.dtype,
        kv_cache_memory=settings.kv_cache_memory,
        max_sequence_length=settings.max_sequence_length,
        threads=threads,
        groups=groups,
        local_rank=identity.local_rank if identity is not None else 0,
    )
