"""Re-exports `ServeConfig` under the module path that the class has in Megatron-Core."""

from megatron_runtime.in_process.front_end import ServeConfig

__all__ = ["ServeConfig"]
