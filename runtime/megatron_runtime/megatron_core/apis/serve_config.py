"""`ServeConfig`, under its Megatron-Core module path."""

from megatron_runtime.in_process.front_end import ServeConfig

__all__ = ["ServeConfig"]
