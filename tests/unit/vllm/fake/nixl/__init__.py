"""Stands for NIXL, which the engine only looks for."""
