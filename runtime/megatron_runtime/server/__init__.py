"""OpenAI-compatible HTTP server: tokenizes, forwards to the coordinator, detokenizes and streams.

The modules do not import torch.
"""
