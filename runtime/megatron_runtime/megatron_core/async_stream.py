"""Megatron-Core name: `AsyncStream`."""

from megatron_runtime.requests.async_stream import AsyncStream

__all__ = ["AsyncStream"]
