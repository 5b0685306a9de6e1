"""Classes that hold a model and its tokenizer. The package path is the same as in Megatron-Core."""
