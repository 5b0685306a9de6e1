"""Where requests live while they generate: slots, token columns and the blocks of the KV cache. No torch."""
