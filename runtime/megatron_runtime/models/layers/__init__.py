"""Layers in torch that the model families share."""
