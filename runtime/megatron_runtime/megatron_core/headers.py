"""Megatron-Core name: `Headers`, the integers that come first in messages."""

from megatron_runtime.protocol.headers import Header as Headers

__all__ = ["Headers"]
