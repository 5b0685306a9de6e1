"""What one operator process is told at its start. Read from flags and environment by the command line, fixed after."""

from __future__ import annotations

import os
import secrets
import socket
from dataclasses import dataclass, field
from pathlib import Path

from megatron_operator.link.connection import LinkTimings
from megatron_operator.model.settings import Settings


def default_identity() -> str:
    """In a pod its name and UID, so that the next process of the same pod may take over at once. Elsewhere unique."""
    name, uid = os.environ.get("POD_NAME"), os.environ.get("POD_UID")
    return f"{name}_{uid}" if name and uid else f"{socket.gethostname()}_{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True)
class RunOptions:
    """Everything `run` needs."""

    settings: Settings
    namespaces: tuple[str, ...] = ()
    """Namespaces to serve; empty means all. Named ones need no cluster-wide permission at all."""
    kubeconfig: Path | None = None
    """None: the service account when in a pod, else $KUBECONFIG or ~/.kube/config."""
    context: str | None = None
    lease_name: str = "megatron-operator"
    lease_seconds: float = 10.0
    """After the death of a leader, its successor begins this much later, and a fifth of it at most."""
    identity: str = field(default_factory=default_identity)
    coordinator_address_template: str | None = None
    """None: the cluster IP of each coordinator's Service."""
    health_host: str = "0.0.0.0"
    health_port: int = 8080
    resync_seconds: float = 300.0
    """How often each resource's objects are listed afresh, in case a watch missed something."""
    watch_seconds: float = 40.0
    """How long a watch lasts before it is asked for anew, and so how long one that fell silent goes unnoticed."""
    link: LinkTimings = field(default_factory=LinkTimings)
