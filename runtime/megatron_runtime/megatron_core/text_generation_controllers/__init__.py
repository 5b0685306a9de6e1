"""Megatron-Core's name for a model with its tokenizer."""
