"""The list of servers that `megatron serve` and `megatron run` have started on this machine, and `megatron status`.

Each server writes a file that describes it, and holds a lock on the file until its process exits for any reason.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from megatron_runtime.cli.options import json_output, say_table
from megatron_runtime.protocol import strict_json as json

_ANSWER_SECONDS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Server:
    """A running `megatron serve`.

    url:         URL of the OpenAI API, without /v1.
    model:       model reference that the engines load.
    name:        name of the model in /v1/models.
    coordinator: address of the coordinator's client port.
    started:     start time in seconds since 1970.
    """

    pid: int
    url: str
    model: str
    name: str
    engines: int
    coordinator: str
    started: float


def _directory() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron" / "servers"


@contextmanager
def listed(server: Server) -> Iterator[None]:
    """Return a context that keeps `server` in the list of running servers until the `with` block ends."""
    directory = _directory()
    directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = directory / f"{server.pid}.json"
    fresh = path.with_suffix(".new")
    with fresh.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(json.dumps(asdict(server)))
        file.flush()
        fresh.replace(path)  # other processes see only a complete, locked file
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def running_servers() -> list[Server]:
    """Return the running servers of this user in the order of their start. Deletes the files of killed servers."""
    servers = []
    for path in _directory().glob("*.json"):
        with suppress(FileNotFoundError), path.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                with suppress(ValueError, TypeError):  # another release may have written the file
                    servers.append(Server(**json.loads(file.read())))
            else:
                path.unlink(missing_ok=True)
    return sorted(servers, key=lambda server: server.started)


@click.command()
@json_output
def status(*, output: str | None) -> None:
    """Show the servers that this user has started with `megatron serve` or `megatron run` and that still run."""
    servers = running_servers()
    engines = asyncio.run(_all_engines(servers))
    if output == "json":
        entries = [{**asdict(server), "engines": each} for server, each in zip(servers, engines, strict=True)]
        click.echo(json.dumps(entries, indent=2))
        return
    if not servers:
        click.echo("no server runs: start one with 'megatron serve MODEL'", err=True)
        return
    say_table(
        ["ADDRESS", "MODEL", "PID", "AGE", "ENGINES"],
        [
            [
                server.url,
                server.name,
                str(server.pid),
                f"{max(0, time.time() - server.started):.0f}s",
                ", ".join(f"{engine['name']} {engine['state']}" for engine in each),
            ]
            for server, each in zip(servers, engines, strict=True)
        ],
    )


async def _all_engines(servers: list[Server]) -> list[list[dict[str, Any]]]:
    return await asyncio.gather(*map(_engines, servers))


async def _engines(server: Server) -> list[dict[str, Any]]:
    """Return the engines of a server with the states that its coordinator reports.

    An engine that has not registered has the state STARTING. If the coordinator does not answer, all engines have the
    state UNKNOWN.
    """
    from megatron_runtime.client.coordinator_client import CoordinatorClient

    entries: dict[str, dict[str, Any]] = {}
    absent = "STARTING"
    client = CoordinatorClient(server.coordinator)
    try:
        async with asyncio.timeout(_ANSWER_SECONDS):
            await client.start(connect_timeout_seconds=_ANSWER_SECONDS)
            for engine in (await client.status()).engines:
                entries[engine.name] = {
                    "name": engine.name,
                    "state": engine.state,
                    "serving": engine.serving,
                    "ranks": engine.ranks,
                    "requests": engine.in_flight,
                }
    except OSError:
        absent = "UNKNOWN"
    finally:
        client.stop()
    for name in (f"engine-{index}" for index in range(server.engines)):
        entries.setdefault(name, {"name": name, "state": absent, "serving": False, "ranks": 0, "requests": 0})
    return sorted(entries.values(), key=lambda engine: engine["name"])
