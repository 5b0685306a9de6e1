"""The wire: message headers, frames, limits, sockets and security of docs/protocol.md. No torch, no policy."""
