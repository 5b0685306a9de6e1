"""`megatron server`."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import click

from megatron_runtime.cli.options import (
    COUNT,
    DIRECTORY,
    PORT,
    SECONDS,
    Address,
    ApiKeysFile,
    Memory,
    OptionalPort,
    allow_priority,
    log_level,
    readable_errors,
    share_prefix_cache,
    tool_call_parser,
)

FILE = click.Path(exists=True, dir_okay=False, path_type=Path)


@click.command()
@click.option("--coordinator", type=Address(), required=True, help="The coordinator's client port.")
@click.option("--model", default="builtin:smollm2-135m", help="Where the tokenizer is read from.")
@click.option("--model-name", help="The name in /v1/models; by default the last part of the reference.")
@click.option(
    "--model-hash", default="", show_default=False, help="Hash of the model; engines of another one do not answer."
)
@click.option("--host", default="0.0.0.0")
@click.option("--port", type=PORT, default=8000, help="0 picks a free one.")
@click.option(
    "--health-port",
    type=OptionalPort(),
    default="8080",
    help="Probes and metrics, without a key; off: metrics are on --port, behind the API key.",
)
@click.option("--keys-dir", type=DIRECTORY, help="client.key, client.pub and server.pub; absent: no encryption.")
@click.option("--tls-certificate-file", type=FILE, help="PEM chain; absent: plain HTTP. Read again when it changes.")
@click.option("--tls-key-file", type=FILE, help="Its key, in PEM.")
@click.option("--api-keys-file", type=ApiKeysFile(), help="One key a line; absent: open to all.")
@share_prefix_cache
@allow_priority
@tool_call_parser
@click.option("--max-sequence-length", type=COUNT, help="Tokens of prompt and answer together.")
@click.option("--max-body-size", "max_body_bytes", type=Memory(), default="4Mi")
@click.option("--max-open-requests", type=COUNT, default=10_000, help="Beyond that 429.")
@click.option(
    "--max-connections",
    type=COUNT,
    default=4096,
    help="Beyond that the one idle longest is closed, or the new one gets a 503.",
)
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    help="Serve only requests whose Host header has this name, and no web page of another origin; repeatable.",
)
@click.option("--drain-seconds", type=SECONDS, default=60)
@click.option(
    "--linger-seconds", type=SECONDS, default=2, help="After SIGTERM, shortest time that new connections are served."
)
@click.option("--vllm-metrics/--no-vllm-metrics", default=True, help="Aliases under vllm: names.")
@click.option("--listen-fd", type=click.IntRange(min=0), hidden=True, help="An already bound socket.")
@log_level
@readable_errors
def command(*, keys_dir: Path | None, listen_fd: int | None, max_connections: int, **options: Any) -> None:
    """Run the OpenAI server until SIGTERM."""
    if (options["tls_certificate_file"] is None) is not (options["tls_key_file"] is None):
        raise click.UsageError("--tls-certificate-file and --tls-key-file go together: give both or neither")
    from megatron_runtime.server.process import run
    from megatron_runtime.server.settings import ConnectionLimits, ServerSettings

    listener = None if listen_fd is None else socket.socket(fileno=listen_fd)
    limits = ConnectionLimits(max_connections=max_connections)
    run(ServerSettings(keys_dir=keys_dir, connections=limits, **options), listener=listener)
