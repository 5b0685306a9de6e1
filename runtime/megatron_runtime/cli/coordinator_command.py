"""`megatron coordinator`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from megatron_runtime.cli.options import (
    COUNT,
    DIRECTORY,
    PORT,
    ROUTING_POLICIES,
    Memory,
    OptionalPort,
    log_level,
    readable_errors,
)


@click.command()
@click.option("--listen", default="0.0.0.0", help="Address of every port.")
@click.option("--client-port", type=PORT, default=5555, help="For servers and clients.")
@click.option("--engine-port", type=PORT, default=5556, help="For engines.")
@click.option("--admin-port", type=PORT, default=5557, help="For the operator.")
@click.option("--health-port", type=OptionalPort(), default="8080", help="Probes and metrics.")
@click.option("--keys-dir", type=DIRECTORY, help="server.key and every role's .pub; absent: no encryption.")
@click.option("--routing-policy", type=click.Choice(ROUTING_POLICIES), default="LoadBalanced")
@click.option("--alpha", type=click.FloatRange(0, 1), default=0.5, help="Weight of a cached prefix.")
@click.option("--pause-mode", type=click.Choice(["Hold", "Reject"]), default="Hold")
@click.option("--max-queued", type=COUNT, default=10_000, help="Requests held.")
@click.option("--max-wait-seconds", type=click.FloatRange(0, min_open=True), default=300, help="Of a request.")
@click.option("--journal-memory", "journal_bytes", type=Memory(), default="1Gi", help="Of all open requests.")
@log_level
@readable_errors
def command(*, keys_dir: Path | None, routing_policy: str, **options: Any) -> None:
    """Run the coordinator until SIGTERM."""
    from megatron_runtime.coordinator.core.settings import CoordinatorSettings, RoutingPolicy
    from megatron_runtime.coordinator.service import run

    run(CoordinatorSettings(keys_dir=keys_dir, routing_policy=RoutingPolicy(routing_policy), **options))
