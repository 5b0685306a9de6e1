"""Messages, headers, codec, limits and lifecycle tables of docs/reference/protocol.md.

Imports nothing of the project.
"""
