"""What a training script imports to publish weights, and a program with engines to get them."""

from megatron_runtime.checkpoints.source import Trainer
from megatron_runtime.trainer.published import PublishError
from megatron_runtime.trainer.weight_server import WeightServer

__all__ = ["PublishError", "Trainer", "WeightServer"]
