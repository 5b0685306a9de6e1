"""Connections between peers: the registered peer connection, the coordinator's router, CURVE keys."""
