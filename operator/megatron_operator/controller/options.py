"""Options of one operator process, which the command line reads from flags and environment."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass, field
from pathlib import Path

from megatron_operator.link.connection import LinkTimings
from megatron_operator.model.settings import Settings


def default_identity() -> str:
    """Return the identity of this process: in a pod its name and UID, so that a restarted container takes over at once;
    elsewhere a unique name."""
    name, uid = os.environ.get("POD_NAME"), os.environ.get("POD_UID")
    return f"{name}_{uid}" if name and uid else f"{socket.gethostname()}_{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Options of `run`."""

    settings: Settings
    namespaces: tuple[str, ...] = ()
    """Namespaces to serve; empty means all. Named ones need no cluster-wide permissions."""
    kubeconfig: Path | None = None
    """None: the service account in a pod, else $KUBECONFIG or ~/.kube/config."""
    context: str | None = None
    lease_name: str = "megatron-operator"
    lease_seconds: float = 10.0
    """Time after the death of a leader until its successor starts, plus at most a fifth of it."""
    identity: str = field(default_factory=default_identity)
    coordinator_address_template: str | None = None
    """None: the cluster IP of each coordinator's Service."""
    health_host: str | None = None
    """Address of probes and metrics; None means every address, IPv4 and IPv6."""
    health_port: int = 8080
    resync_seconds: float = 300.0
    """Interval at which each resource's objects are listed again, in case a watch missed something."""
    watch_seconds: float = 40.0
    """Duration of a watch before it is renewed, which bounds how long a dead watch goes unnoticed."""
    max_concurrent_updates: int = 1
    """Resources that are updated to the release of this operator at the same time."""
    link: LinkTimings = field(default_factory=LinkTimings)
