"""Settings of a coordinator. They are checked once, when the object is created, and cannot change afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from megatron_runtime.protocol import limits
from megatron_runtime.requests.config import PrefixCachingCoordinatorPolicy, RoutingPolicy

__all__ = ["CoordinatorSettings", "PrefixCachingCoordinatorPolicy", "RoutingPolicy", "Timing"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """Intervals and timeouts in seconds. Tests shorten them; deployments use the defaults."""

    heartbeat: float = limits.HEARTBEAT_SECONDS
    suspect: float = limits.SUSPECT_SECONDS
    dead: float = limits.DEAD_SECONDS
    client_dead: float = limits.DEAD_SECONDS
    recovery: float = limits.RECOVERY_SECONDS
    """Duration of recovery after a start. With 0 the coordinator starts in RUNNING."""
    recovery_settle: float = 1.5
    """Time within which every live engine sends a message. Engines reconnect once per second and send two heartbeats
    per second.
    """
    slow_client: float = 30.0
    """Time after which a client whose buffer is full is removed."""
    key_check: float = 2.0
    """Interval at which the key files are checked for changes."""
    plain_reconnect: float = 5.0
    """Time within which a plain engine must reconnect after its connection ended. Otherwise it is removed."""
    connection_check: float = 5.0
    """Interval of connection checks. A connection that was cut, or whose host is gone, is closed within three
    intervals.
    """
    takeover: float = limits.SUSPECT_SECONDS
    """Time of silence of the other coordinator after which a standby takes over, if a peer asks it to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSettings:
    """Settings of `megatron coordinator`.

    listen:          address to bind; "::" is every address of the host.
    client_port, engine_port, admin_port: port of each role; 0 picks a free port.
    socket_dir:      directory of Unix sockets `client`, `engine` and `admin`, which replace the ports. Every process of
                     this user can connect without a key.
    single_port:     whether to use one socket, on client_port, for all roles and for the plain protocol; for loopback
                     and embedding.
    health_port:     port of HTTP probes and metrics; None disables them, 0 picks a free port.
    other_host:      host of the other coordinator of a pair, which has the same ports; None if there is no other.
    keys_dir:        directory of server.key and the public keys of all roles; None means no encryption.
    routing_policy:  see RoutingPolicy.
    alpha:           weight of a cached prefix against free capacity, 0 to 1.
    block_size_tokens: granularity of prefix hashes; None uses the size that the engines announce.
    pause_mode:      "Hold" queues requests while paused or suspended, "Reject" answers 503.
    max_queued:      maximum number of requests that wait for an engine; further requests get 429.
    max_wait_seconds: maximum time that a request waits for an engine before it gets 504.
    journal_bytes:   memory for prompts and tokens of open requests; beyond this limit requests get 429.
    max_clients:     maximum number of clients registered at the same time.
    plain_max_requests: maximum number of requests at a plain engine at the same time, because such an engine does not
                     report its limit. 0 means no limit.
    plain_release:   message format for plain engines, as a release of Megatron-Core: "0.17", or "0.20", which divides
                     messages into more frames. After a plain client has submitted a request, its format is used.
    deterministic:   whether engines alternate in the order of their names, so that decisions depend only on the order
                     of arrival.
    schedule_output_path: JSON file for the scheduling decisions, written at exit.
    """

    listen: str = "::"
    client_port: int = 5555
    engine_port: int = 5556
    admin_port: int = 5557
    socket_dir: Path | None = None
    single_port: bool = False
    health_port: int | None = None
    other_host: str | None = None
    keys_dir: Path | None = None
    routing_policy: RoutingPolicy = RoutingPolicy.LOAD_BALANCED
    alpha: float = 0.5
    block_size_tokens: int | None = None
    pause_mode: Literal["Hold", "Reject"] = "Hold"
    max_queued: int = 10_000
    max_wait_seconds: float = 300.0
    journal_bytes: int = 1 << 30
    max_clients: int = 10_000
    plain_max_requests: int = 0
    plain_release: Literal["0.17", "0.20"] = "0.17"
    deterministic: bool = False
    schedule_output_path: Path | None = None
    timing: Timing = field(default_factory=Timing)

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise ValueError(f"alpha {self.alpha}: want 0 to 1")
        if self.pause_mode not in ("Hold", "Reject"):
            raise ValueError(f"pause_mode {self.pause_mode!r}: want 'Hold' or 'Reject'")
        if self.plain_release not in ("0.17", "0.20"):
            raise ValueError(f"plain_release {self.plain_release!r}: want '0.17' or '0.20'")
        for name in ("max_queued", "journal_bytes", "max_clients"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: want at least 1")
        if self.socket_dir is not None and (self.single_port or self.other_host is not None):
            raise ValueError(f"socket_dir {self.socket_dir}: want neither single_port nor other_host")
        if self.other_host is not None and (self.single_port or not self.admin_port):
            raise ValueError(f"other_host {self.other_host!r}: want three ports, the same as those of that coordinator")
        if self.max_wait_seconds <= 0:
            raise ValueError(f"max_wait_seconds {self.max_wait_seconds}: want more than 0")
