"""Implementations of the EngineBackend protocol: the native engine and vLLM."""
