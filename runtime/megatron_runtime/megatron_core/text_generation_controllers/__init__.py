"""Models with their tokenizers, under Megatron-Core's package path."""
