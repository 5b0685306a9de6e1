"""HTTP servers, under the names of Megatron-Core."""
