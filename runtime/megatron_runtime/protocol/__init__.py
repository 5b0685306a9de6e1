"""The protocol that docs/reference/protocol.md describes: messages, headers, codec, limits and lifecycle tables.

This package imports no other package of the project.
"""
