"""Megatron-Core's engine, which runs prompts in the calling thread or serves a coordinator."""
