"""Triton kernels, one a file, each beside its torch reference."""
