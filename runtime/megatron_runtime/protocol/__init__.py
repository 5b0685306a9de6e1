"""Messages, headers, codec, limits and lifecycle tables of docs/protocol.md. Imports nothing of the project."""
