"""Support for Megatron-Core's clients and engines. Each connection has a translator between its socket and the core."""
