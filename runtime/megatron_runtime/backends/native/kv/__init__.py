"""KV pages, the prefix cache and the slots of open requests."""
