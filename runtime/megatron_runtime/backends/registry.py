"""Builds the backend that `--backend` names.

Only this module imports backends, and it imports only the selected one. An external backend is passed to worker.run()
as a factory.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.util import find_spec
from typing import TYPE_CHECKING

from megatron_runtime.checkpoints.remote import REMOTE_PREFIXES
from megatron_runtime.engine.backend import EngineBackend
from megatron_runtime.engine.settings import EngineSettings

if TYPE_CHECKING:
    from megatron_runtime.distributed.shard import RankIdentity


def build_backend(settings: EngineSettings) -> EngineBackend:
    """Return the backend that `settings` selects. The backend has not loaded the weights yet.

    Raises:
        ValueError: a setting or the model is not usable. The message has the setting, the value and the remedy.
    """
    if settings.backend == "vllm":
        _require_vllm()
        from megatron_runtime.backends.vllm.backend import VllmBackend

        return VllmBackend(settings)
    # The OpenMP runtime reads this variable when torch is imported. Threads that spin between operators take CPU time
    # from the coordinator, the server and other engines on the same machine.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from megatron_runtime.backends.native.build import build_native

    return build_native(settings)


def check_backend(settings: EngineSettings) -> None:
    """Validate the settings and the model as an engine does at its start.

    This function reads no weights and needs no GPU.

    Raises:
        ValueError: a setting or the model is not usable. The message has the setting, the value and the remedy.
        OSError: the model cannot be read now, for example HubUnavailableError.
        VllmError: vLLM's process exited during the check; VllmKilledError if it was killed.
    """
    with _described(settings) as described:
        if settings.backend == "vllm":
            _require_vllm()
            from megatron_runtime.backends.vllm.process import VllmProcess

            VllmProcess(described, checks_only=True).kill()
        else:
            from megatron_runtime.backends.native.build import check_native

            check_native(described)


@contextmanager
def _described(settings: EngineSettings) -> Iterator[EngineSettings]:
    """Yield the settings to check. They name a directory with only the model's metadata if the model is remote."""
    if not settings.model.startswith(REMOTE_PREFIXES):
        yield settings
        return
    # The HTTP client takes a tenth of a second to import.
    from megatron_runtime.checkpoints.remote.metadata import metadata_directory

    with metadata_directory(settings.model) as directory:
        try:
            yield replace(settings, model=str(directory))
        except ValueError as error:
            error.args = (str(error).replace(str(directory), settings.model),)
            raise


def _require_vllm() -> None:
    if find_spec("vllm") is None:
        raise ValueError("backend vllm: vLLM is not installed: use an image that has it, or --backend native")


def run_other_rank(settings: EngineSettings, identity: RankIdentity) -> None:
    """Run a rank other than rank 0 until the engine ends. Raises RankError or ValueError."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from megatron_runtime.backends.native.build import run_other_rank as run

    run(settings, identity)
