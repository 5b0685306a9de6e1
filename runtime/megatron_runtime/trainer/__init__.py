"""The Python API for weights from a training script.

The training script publishes weights with WeightServer. A program with MegatronLLM loads these weights with Trainer.
"""

from megatron_runtime.checkpoints.source import Trainer
from megatron_runtime.trainer.published import PublishError
from megatron_runtime.trainer.weight_server import WeightServer

__all__ = ["PublishError", "Trainer", "WeightServer"]
