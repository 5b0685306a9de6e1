"""Connections between peers: the link of a registered peer, ZMTP sockets, and CURVE keys."""
