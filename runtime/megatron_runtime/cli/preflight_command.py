"""`megatron preflight`."""

from __future__ import annotations

import asyncio

import click

from megatron_runtime.cli.options import log_level, readable_errors


@click.command()
@click.option("--name", "template", required=True, help="Host name of a pod, {node} for its number.")
@click.option("--node", type=click.IntRange(min=0), envvar="NODE_RANK", required=True, help="Number of this pod.")
@click.option("--nodes", type=click.IntRange(min=2), envvar="NNODES", required=True, help="Pods of the engine.")
@click.option("--port", type=click.IntRange(1, 65535), envvar="MASTER_PORT", default=29500)
@click.option("--timeout-seconds", type=click.FloatRange(0, min_open=True), default=15.0, help="For each pair.")
@click.option("--listen", default="0.0.0.0", help="Address of both ports.")
@log_level
@readable_errors
def command(*, template: str, node: int, nodes: int, port: int, timeout_seconds: float, listen: str) -> None:
    """See whether every two pods of an engine can talk, before its ranks load anything (init container)."""
    from megatron_runtime.distributed.preflight import PreflightError, PreflightPlan, preflight
    from megatron_runtime.engine.termination import write_termination_message

    names = tuple(template.replace("{node}", str(number)) for number in range(nodes))
    plan = PreflightPlan(node=node, names=names, port=port, timeout_seconds=timeout_seconds, listen=listen)
    try:
        found = asyncio.run(preflight(plan))
    except PreflightError as error:
        write_termination_message(error)
        raise click.ClickException(str(error)) from error
    for name, outcome in found.items():
        click.echo(f"{name} {outcome.value}")
