"""Sampling: from logits to tokens, with counter-based random numbers and the filters of each request. No torch."""
