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
    frontend_replicas: HTTP servers on the socket; this one runs in the program, for more there is `megatron serve`.
    sock:              a bound socket to use instead of host and port.
    model_name:        the name in /v1/models; None takes the model's own.
    """

    host: str = "0.0.0.0"
    port: int = 5000
    parsers: list[str] = field(default_factory=list)
    verbose: bool = False
    frontend_replicas: int = 1
    sock: socket.socket | None = None
    model_name: str | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"ServeConfig.port={self.port}: want 0 to 65535")
        if self.frontend_replicas != 1:
            raise ValueError(
                f"ServeConfig.frontend_replicas={self.frontend_replicas}: one runs in this program; for more start "
                "`megatron server` processes at the coordinator's address"
            )
        if len(self.parsers) > 1:
            raise ValueError(f"ServeConfig.parsers={self.parsers!r}: want at most one")
