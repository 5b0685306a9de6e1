"""GPT models that run the steps of an engine, under Megatron-Core's package path."""
