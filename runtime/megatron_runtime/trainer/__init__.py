"""Public names for publishing weights from a training script, and for loading them in a program with engines."""

from megatron_runtime.checkpoints.source import Trainer
from megatron_runtime.trainer.published import PublishError
from megatron_runtime.trainer.weight_server import WeightServer

__all__ = ["PublishError", "Trainer", "WeightServer"]
