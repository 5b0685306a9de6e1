"""OpenAI-compatible HTTP server: tokenizes, forwards to the coordinator, detokenizes and streams. No torch import."""
