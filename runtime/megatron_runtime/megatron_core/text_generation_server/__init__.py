"""HTTP servers. The package path is the same as in Megatron-Core."""
