"""Re-exports `AsyncStream` under the module path that the class has in Megatron-Core."""

from megatron_runtime.requests.async_stream import AsyncStream

__all__ = ["AsyncStream"]
