"""Sampling, from logits to tokens, with counter-based random numbers and the filters of each request.

This package does not import torch.
"""
