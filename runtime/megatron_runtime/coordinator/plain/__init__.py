"""Clients and engines of Megatron-Core: one translator for each connection, between its socket and the core."""
