"""The native engine: scheduler, KV cache, step plans and executors."""
