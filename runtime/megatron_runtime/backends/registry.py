"""The backends by the name of `--executor`: the one place that imports them, each when it is chosen.

A backend that is not listed here is passed to worker.run() as a factory of its own.
"""

from __future__ import annotations

import os
from functools import partial
from typing import TYPE_CHECKING

from megatron_runtime.engine.backend import EngineBackend
from megatron_runtime.engine.settings import EngineSettings

if TYPE_CHECKING:
    from megatron_runtime.distributed.shard import RankIdentity
    from megatron_runtime.engine.worker import MakeLink


def build_backend(settings: EngineSettings) -> EngineBackend:
    """Return the backend that `settings` choose; its weights are not loaded yet.

    Raises:
        ValueError: a setting or the model is not usable; the message names it and the remedy.
    """
    if settings.executor == "echo":
        from megatron_runtime.backends.echo.backend import EchoBackend

        return EchoBackend(settings)
    # torch reads it when it loads its OpenMP runtime: threads that spin between operators take the CPU from the
    # coordinator, the server and other engines of the same machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from megatron_runtime.backends.native.build import build_native

    return build_native(settings)


def link_for(settings: EngineSettings) -> MakeLink | None:
    """Return what makes the connection to the coordinator, for faults that concern it; None for the usual one."""
    if not settings.echo_faults:
        return None
    from megatron_runtime.backends.echo.faults import FaultyLink, parse_faults

    return partial(FaultyLink, faults=parse_faults(settings.echo_faults))


def run_other_rank(settings: EngineSettings, identity: RankIdentity) -> None:
    """Be a rank of several that is not the first, until the engine ends. Raises RankError, ValueError."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from megatron_runtime.backends.native.build import run_other_rank as run

    run(settings, identity)
