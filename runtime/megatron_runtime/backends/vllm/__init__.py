"""vLLM's AsyncLLM behind EngineBackend."""
