"""Builds the backend that `--backend` names. This module alone imports backends, each when it is chosen.

A backend from outside is passed to worker.run() as a factory.
"""

from __future__ import annotations

import os
from functools import partial
from importlib.util import find_spec
from typing import TYPE_CHECKING

from megatron_runtime.engine.backend import EngineBackend
from megatron_runtime.engine.settings import EngineSettings

if TYPE_CHECKING:
    from megatron_runtime.distributed.shard import RankIdentity
    from megatron_runtime.engine.worker import MakeLink


def build_backend(settings: EngineSettings) -> EngineBackend:
    """Return the backend of `settings`; its weights are not loaded yet.

    Raises:
        ValueError: a setting or the model is not usable; the message has the setting, the value and the remedy.
    """
    if settings.backend == "echo":
        from megatron_runtime.backends.echo.backend import EchoBackend

        return EchoBackend(settings)
    if settings.backend == "vllm":
        from megatron_runtime.backends.vllm.backend import VllmBackend

        if find_spec("vllm") is None:
            raise ValueError("backend vllm: vLLM is not installed: use an image that has it, or --backend native")
        return VllmBackend(settings)
    # The OpenMP runtime of torch reads it when it is loaded. Threads that spin between operators would use the CPUs of
    # the coordinator, the server and other engines on the same machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from megatron_runtime.backends.native.build import build_native

    return build_native(settings)


def link_for(settings: EngineSettings) -> MakeLink | None:
    """Return the factory of a coordinator connection with the faults of `settings`; None for the default factory."""
    if not settings.echo_faults:
        return None
    from megatron_runtime.backends.echo.faults import FaultyLink, parse_faults

    return partial(FaultyLink, faults=parse_faults(settings.echo_faults))


def run_other_rank(settings: EngineSettings, identity: RankIdentity) -> None:
    """Run a rank other than rank 0 until the engine ends. Raises RankError, ValueError."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from megatron_runtime.backends.native.build import run_other_rank as run

    run(settings, identity)
