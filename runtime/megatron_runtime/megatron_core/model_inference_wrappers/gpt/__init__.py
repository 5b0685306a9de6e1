"""Megatron-Core's name for a GPT model that runs the steps of an engine."""
