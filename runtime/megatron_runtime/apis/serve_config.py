"""`ServeConfig`: how MegatronLLM.serve() offers HTTP."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field


@dataclass(kw_only=True)
class ServeConfig:
    """Settings of the HTTP front end that serve() starts on the primary rank.

    host, port:        where it listens; port 0 picks a free one, which `url` then names.
    parsers:           how the model writes tool calls: the name of one parser; none leaves it to its chat template.
    verbose:           log each request.
    frontend_replicas: HTTP servers on the socket: one in the program, the others processes. They need a tokenizer that
                       has a reference; a tokenizer that only the program holds has the one server.
    sock:              a bound socket to use instead of host and port.
    model_name:        the name in /v1/models; None takes the model's own.
    """

    host: str = "0.0.0.0"
    port: int = 5000
    parsers: list[str] = field(default_factory=list)
    verbose: bool = False
    frontend_replicas: int = 4
    sock: socket.socket | None = None
    model_name: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"ServeConfig.port={self.port}: want 0 to 65535")
        if self.frontend_replicas < 1:
            raise ValueError(f"ServeConfig.frontend_replicas={self.frontend_replicas}: want at least 1")
        if len(self.parsers) > 1:
            raise ValueError(f"ServeConfig.parsers={self.parsers!r}: want at most one")
