"""The executor on the CPU."""
