"""Connections between peers: the connection of a registered peer, the coordinator's router, and CURVE keys."""
