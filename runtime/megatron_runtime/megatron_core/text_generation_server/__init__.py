"""HTTP servers, under Megatron-Core's package path."""
