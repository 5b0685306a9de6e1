"""The Python API with which a training script publishes weights, and a program with engines loads the weights."""

from megatron_runtime.checkpoints.source import Trainer
from megatron_runtime.trainer.published import PublishError
from megatron_runtime.trainer.weight_server import WeightServer

__all__ = ["PublishError", "Trainer", "WeightServer"]
