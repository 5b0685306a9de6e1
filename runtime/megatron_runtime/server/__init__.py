"""OpenAI-compatible HTTP front end: tokenizes, forwards to the coordinator, detokenizes, streams. No torch."""
