"""`megatron serve`: coordinator, engines and OpenAI server on this machine, in one command."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from megatron_runtime.cli.options import (
    PORT,
    ROUTING_POLICIES,
    ApiKeysFile,
    Memory,
    allow_priority,
    readable_errors,
    share_prefix_cache,
    tool_call_parser,
)
from megatron_runtime.server.settings import LOOPBACK_HOSTS, default_model_name, is_loopback, listen

_LOOPBACK = "127.0.0.1"
_POLL_SECONDS = 0.05
_GRACE_SECONDS = 10.0
_CONNECT_SECONDS = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """The options of `megatron serve`; None leaves a choice to the process it is for."""

    model: str
    model_name: str | None
    host: str
    port: int
    engines: int
    executor: str
    dtype: str
    max_sequence_length: int | None
    max_requests: int
    max_tokens: int
    kv_cache_memory: int
    batch_invariant: bool
    prefix_caching: bool
    routing_policy: str
    threads: int | None
    api_keys_file: Path | None
    allowed_hosts: tuple[str, ...]
    share_prefix_cache: bool
    allow_priority: bool
    tool_call_parser: str
    drain_seconds: float
    verbose: bool

    @property
    def served_hosts(self) -> tuple[str, ...]:
        """Host headers that are accepted; empty: any. On loopback a web page must not get here under another name."""
        return (*LOOPBACK_HOSTS, *self.allowed_hosts) if is_loopback(self.host) or self.allowed_hosts else ()

    @property
    def served_name(self) -> str:
        return self.model_name or default_model_name(self.model)


@click.command()
@click.option(
    "--model",
    default="builtin:smollm2-135m",
    show_default=True,
    help="builtin:NAME, hf:ORG/NAME[@REVISION], a GGUF file or a directory.",
)
@click.option("--model-name", help="The name in /v1/models; by default the last part of the reference.")
@click.option("--host", default=_LOOPBACK, show_default=True, help="Where HTTP listens.")
@click.option("--port", type=PORT, default=8000, show_default=True, help="0 picks a free one.")
@click.option("--engines", type=click.IntRange(1, 64), default=1, show_default=True, help="Data-parallel engines.")
@click.option("--executor", type=click.Choice(["torch", "echo"]), default="torch", show_default=True)
@click.option(
    "--dtype", type=click.Choice(["auto", "float32", "bfloat16", "int8", "int4"]), default="auto", show_default=True
)
@click.option("--max-sequence-length", type=click.IntRange(min=1), help="Tokens of prompt and answer together.")
@click.option("--max-requests", type=click.IntRange(min=1), default=64, show_default=True, help="At once, per engine.")
@click.option("--max-tokens", type=click.IntRange(min=1), default=2048, show_default=True, help="Of one step.")
@click.option("--kv-cache-memory", type=Memory(), default="1Gi", show_default=True, help="Of each engine.")
@click.option(
    "--batch-invariant/--no-batch-invariant",
    default=False,
    show_default=True,
    help="Answers are the same to the bit whatever runs beside them; in float32, at some cost.",
)
@click.option("--prefix-caching/--no-prefix-caching", default=True, show_default=True, help="Keep computed prefixes.")
@click.option(
    "--routing-policy",
    type=click.Choice(ROUTING_POLICIES),
    default="LoadBalanced",
    show_default=True,
    help="How requests are spread over several engines.",
)
@click.option("--threads", type=click.IntRange(min=1), help="Torch threads of each engine; by default its share.")
@click.option("--api-keys-file", type=ApiKeysFile(), help="One key a line; absent: open to all.")
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    help="A further name of this server in requests (Host header); repeatable. On loopback, requests for any other "
    "name than localhost get a 403.",
)
@share_prefix_cache
@allow_priority
@tool_call_parser
@click.option("--drain-seconds", type=click.FloatRange(min=0), default=5, show_default=True, help="After Ctrl-C.")
@click.option("-v", "--verbose", is_flag=True, help="Show what each process logs.")
@readable_errors
def command(**options: Any) -> None:
    """Run everything on this machine and say when it is ready."""
    from megatron_runtime.cli.supervisor import ChildFailedError

    try:
        asyncio.run(_serve(ServeOptions(**options)))
    except ChildFailedError as error:
        raise click.ClickException(str(error)) from error


async def _serve(options: ServeOptions) -> None:
    from megatron_runtime.cli.supervisor import Supervisor

    started = time.monotonic()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def say(name: str | None, line: str) -> None:
        if name is None:
            click.echo(f"megatron: {line}", err=True)
        elif options.verbose:
            click.echo(f"{click.style(name, dim=True)}: {line}", err=True)

    with listen(host=options.host, port=options.port) as listener:
        url = _url(listener)
        client_port, engine_port, admin_port = _free_ports(3)
        supervisor = Supervisor(say=say)

        def on_signal() -> None:
            if stop.is_set():
                supervisor.signal_all(signal.SIGKILL)
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        say(None, f"starting a coordinator, {_engines_words(options.engines)} and a server for {options.model}")
        try:
            for child in _children(options, ports=(client_port, engine_port, admin_port), listener=listener):
                await supervisor.start(child)
            ready = _until_ready(options, url=url, coordinator=f"tcp://{_LOOPBACK}:{client_port}", say=say)
            if await _unless(stop, supervisor.failed, ready):
                supervisor.are_ready = True
                _tell_how_to_use(options, url=url, seconds=time.monotonic() - started)
                await _unless(stop, supervisor.failed, asyncio.Event().wait())
            say(None, "stopping (Ctrl-C again to end at once)")
        finally:
            await supervisor.stop(grace_seconds=options.drain_seconds + _GRACE_SECONDS)


def _children(options: ServeOptions, *, ports: Sequence[int], listener: socket.socket) -> list[Any]:
    from megatron_runtime.cli.supervisor import Child

    client_port, engine_port, admin_port = ports
    logs = ["--log-level", "info" if options.verbose else "warning"]
    drain = ["--drain-seconds", str(options.drain_seconds)]
    length = [] if options.max_sequence_length is None else ["--max-sequence-length", str(options.max_sequence_length)]
    threads = options.threads or max(1, len(os.sched_getaffinity(0)) // options.engines)
    coordinator = [
        "coordinator",
        *("--listen", _LOOPBACK, "--health-port", "off"),
        *("--routing-policy", options.routing_policy),
        *("--client-port", str(client_port), "--engine-port", str(engine_port), "--admin-port", str(admin_port)),
        *logs,
    ]
    engine = [
        "engine",
        *("--coordinator", f"{_LOOPBACK}:{engine_port}", "--health-port", "off"),
        *("--model", options.model, "--executor", options.executor, "--dtype", options.dtype),
        *("--max-requests", str(options.max_requests), "--max-tokens", str(options.max_tokens)),
        *("--kv-cache-memory", str(options.kv_cache_memory), "--threads", str(threads)),
        "--batch-invariant" if options.batch_invariant else "--no-batch-invariant",
        "--prefix-caching" if options.prefix_caching else "--no-prefix-caching",
        *(*length, *drain, *logs),
    ]
    server = [
        "server",
        *("--coordinator", f"{_LOOPBACK}:{client_port}", "--model", options.model),
        *("--model-name", options.served_name, "--linger-seconds", "0"),
        *("--tool-call-parser", options.tool_call_parser),
        *("--host", options.host, "--listen-fd", str(listener.fileno()), "--health-port", "off"),
        *(argument for host in options.served_hosts for argument in ("--allowed-host", host)),
        *([] if options.api_keys_file is None else ["--api-keys-file", str(options.api_keys_file)]),
        *(["--share-prefix-cache"] if options.share_prefix_cache else []),
        *(["--allow-priority"] if options.allow_priority else []),
        *(*length, *drain, *logs),
    ]
    return [
        Child("coordinator", coordinator),
        *(Child(f"engine-{i}", [*engine, "--name", f"engine-{i}"]) for i in range(options.engines)),
        Child("server", server, pass_fds=(listener.fileno(),)),
    ]


async def _until_ready(options: ServeOptions, *, url: str, coordinator: str, say: Any) -> bool:
    """Wait until every engine serves and the server reaches the coordinator; name each as it gets there."""
    import httpx

    from megatron_runtime.client.inference_client import InferenceClient

    client = InferenceClient(coordinator, deserialize=False)
    await client.start(connect_timeout_seconds=_CONNECT_SECONDS)
    try:
        serving: set[str] = set()
        while len(serving) < options.engines:
            status = await client.status()
            for engine in status.engines:
                if engine.serving and engine.name not in serving:
                    serving.add(engine.name)
                    say(None, f"{engine.name} has its weights ({len(serving)} of {options.engines})")
            await asyncio.sleep(_POLL_SECONDS)
    finally:
        client.stop()
    async with httpx.AsyncClient(trust_env=False, timeout=None) as http:
        # The socket listens already: the first answer comes when the server process is up.
        while (await http.get(f"{url}/readyz")).status_code != 200:  # noqa: ASYNC110 - another process's state
            await asyncio.sleep(_POLL_SECONDS)
    return True


async def _unless(stop: asyncio.Event, failed: asyncio.Future[None], work: Any) -> bool:
    """Return whether `work` ended before `stop` was set. Raises what `failed` or `work` raised."""
    task = asyncio.ensure_future(work)
    stopping = asyncio.create_task(stop.wait())
    try:
        await asyncio.wait({task, stopping, failed}, return_when=asyncio.FIRST_COMPLETED)
        if failed.done():
            failed.result()
        if task.done():
            task.result()
        return task.done()
    finally:
        stopping.cancel()
        task.cancel()
        await asyncio.gather(task, stopping, return_exceptions=True)


def _tell_how_to_use(options: ServeOptions, *, url: str, seconds: float) -> None:
    name = options.served_name
    key = "" if options.api_keys_file is None else " -H 'Authorization: Bearer KEY'"
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'
    default_url = "" if url == "http://127.0.0.1:8000" else f" --url {url}"
    click.echo(
        f"\nready in {seconds:.1f} s: {name} at {url}/v1 (a chat page at {url}/)\n\n"
        f"  megatron chat{default_url}\n"
        f"  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'\n"
    )


def _engines_words(count: int) -> str:
    return "1 engine" if count == 1 else f"{count} engines"


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    reachable = {"0.0.0.0": _LOOPBACK, "::": "::1"}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def _free_ports(count: int) -> list[int]:
    """Ports that were free a moment ago, all different."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind((_LOOPBACK, 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()
