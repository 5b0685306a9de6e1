"""Reads and writes Megatron-Core's distributed checkpoints of GPT models (format `torch_dist`)."""
