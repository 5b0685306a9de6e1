"""Torch layers that the model families share."""
