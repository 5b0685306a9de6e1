"""EngineBackend implemented with vLLM's AsyncLLM."""
