"""What a training script imports to publish weights to the engines of a coordinator."""

from megatron_runtime.trainer.weight_server import PublishError, WeightServer

__all__ = ["PublishError", "WeightServer"]
