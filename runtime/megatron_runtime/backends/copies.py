"""The port on which a rank of an engine offers the weights of a trainer to other engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.transport.addresses import coordinator_address

if TYPE_CHECKING:
    from megatron_runtime.distributed.weight_port import WeightPort


def open_weight_port(settings: EngineSettings, local_rank: int = 0) -> WeightPort:
    """Open the port on which a rank offers the weights of a trainer.

    Raises KeyFileError for an unusable key file, and OSError if the port cannot be opened.
    """
    # Only engines with weights of a trainer need the connection code.
    from megatron_runtime.distributed.weight_port import WeightPort, address_towards

    host = address_towards(coordinator_address(settings.coordinator))
    port = settings.weights_port + local_rank if settings.weights_port else 0
    return WeightPort(host, port, keys_dir=settings.keys_dir, role="engine")
