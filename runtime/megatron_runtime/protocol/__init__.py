"""Messages, headers, codec, limits and lifecycle tables of docs/reference/protocol.md.

This package imports no other package of the project.
"""
