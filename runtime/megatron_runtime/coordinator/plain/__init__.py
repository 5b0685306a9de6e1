"""Support for Megatron-Core's clients and engines: each connection has a translator between its socket and the core."""
