"""Megatron-Core's name for a model that runs the steps of an engine."""
