"""Megatron-Core's names for the state of open requests."""
