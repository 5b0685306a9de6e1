"""Megatron-Core's package of HTTP servers."""
