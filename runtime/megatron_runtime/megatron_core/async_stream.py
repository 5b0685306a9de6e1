"""`AsyncStream`, under its Megatron-Core module path."""

from megatron_runtime.requests.async_stream import AsyncStream

__all__ = ["AsyncStream"]
