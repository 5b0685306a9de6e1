"""`megatron serve`: runs a coordinator, engines and an OpenAI server on this machine with one command."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import time
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click

from megatron_runtime.cli import containers
from megatron_runtime.cli.devices import VISIBLE, assign_gpus, count_gpus, device_option, show_only
from megatron_runtime.cli.options import (
    ADAPTER,
    PORT,
    ROUTING_POLICIES,
    SECONDS,
    arguments_of,
    check_parsers,
    config_option,
    engine_options,
    model_reference,
    server_options,
    tensor_parallel,
)
from megatron_runtime.cli.processes import Child, ChildFailedError, Supervisor
from megatron_runtime.cli.servers import Server, listed
from megatron_runtime.process.listening import private_folder
from megatron_runtime.protocol.adapters import AdapterList
from megatron_runtime.server.settings import LOOPBACK_HOSTS, default_model_name, is_loopback, listen, url_of

_LOOPBACK = "127.0.0.1"
_GRACE_SECONDS = 10.0


@click.command()
@click.argument("reference", required=False, metavar="[MODEL]")
@engine_options
@click.option(
    "--adapter",
    "adapters",
    type=ADAPTER,
    multiple=True,
    help='LoRA adapter to load, as NAME=SOURCE. Requests select it with "model": "NAME". SOURCE is '
    "hf:ORG/NAME[@REVISION] or a directory. Requires --backend vllm. Repeatable.",
)
@click.option(
    "--host",
    default=_LOOPBACK,
    help="Address on which the server listens. Use 0.0.0.0 to accept connections from other machines.",
)
@click.option("--port", type=PORT, default=8000, help="Port on which the server listens; 0 picks a free port.")
@click.option(
    "--engines",
    type=click.IntRange(1, 64),
    default=1,
    help="Number of data-parallel engines, each of which has a copy of the weights. Raise it for more throughput if "
    "there are enough CPUs or GPUs.",
)
@tensor_parallel
@device_option
@click.option(
    "--routing-policy",
    type=ROUTING_POLICIES,
    default="LeastCost",
    help="Policy that chooses an engine for each request. LeastCost suits most loads.",
)
@server_options
@click.option(
    "--allowed-host",
    "allowed_hosts",
    multiple=True,
    help="Additional host name that requests may have in their Host header. On a loopback address, the server "
    "otherwise accepts only localhost and rejects other names with 403. Repeatable.",
)
@click.option(
    "--drain-seconds",
    type=SECONDS,
    default=5,
    help="Seconds that open requests get to finish after Ctrl-C. Then the server aborts them.",
)
@config_option()
@click.option("-v", "--verbose", is_flag=True, help="Print the logs of all processes. Use it to diagnose a problem.")
def serve(**options: Any) -> None:
    """Serve MODEL on this machine with a coordinator, engines and a server. Print a line when the server is ready.

    MODEL is ORG/NAME[@REVISION] of the Hugging Face hub, builtin:NAME, a GGUF file or a directory, as for --model.
    """
    reference = options.pop("reference")
    if reference is not None:
        if click.get_current_context().get_parameter_source("model") is click.core.ParameterSource.COMMANDLINE:
            raise click.UsageError("give MODEL or --model, not both.")
        options["model"] = reference
    options["model"] = model_reference(options["model"])
    options["model_names"] = options["model_names"] or (default_model_name(options["model"]),)
    options["model_name"] = options["model_names"][0]
    try:
        options["adapters"] = AdapterList(options["adapters"])
    except ValueError as error:
        raise click.UsageError(f"--adapter: {error}.") from error
    for name in options["model_names"]:
        if options["adapters"].find(name) is not None:
            raise click.UsageError(f"--adapter {name} has the name of the model: give it another one.")
    check_parsers(**{name: options[name] for name in ("backend", "tool_call_parser", "reasoning_parser")})
    if options["adapters"].adapters and options["backend"] == "vllm":
        options["vllm_arguments"] = {"enable_lora": True, **options["vllm_arguments"]}
    if is_loopback(options["host"]) or options["allowed_hosts"]:
        # A server on loopback rejects other host names, so that a web page cannot reach it (DNS rebinding).
        options["allowed_hosts"] = (*LOOPBACK_HOSTS, *options["allowed_hosts"])
    options["gpus"] = assign_gpus(
        options["device"], engines=options["engines"], ranks=options["tensor_parallel"], gpus=count_gpus()
    )
    options["device"] = options["device"].kind  # the environment of each engine process selects its GPUs
    options["threads"] = options["threads"] or max(1, len(os.sched_getaffinity(0)) // options["engines"])
    try:
        asyncio.run(_serve(SimpleNamespace(**options)))
    except ChildFailedError as error:
        raise click.ClickException(str(error)) from error


async def _serve(options: SimpleNamespace) -> None:
    started = time.monotonic()
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def say(name: str | None, line: str) -> None:
        if name is None:
            click.echo(f"megatron: {line}", err=True)
        elif options.verbose:
            click.echo(f"{click.style(name, dim=True)}: {line}", err=True)

    with listen(host=options.host, port=options.port) as listener, ExitStack() as stack:
        url = url_of(listener)
        sockets = stack.enter_context(private_folder())
        supervisor = Supervisor(say=say)

        def on_signal() -> None:
            if stop.is_set():
                supervisor.signal_all(signal.SIGKILL)
            stop.set()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, on_signal)
        engines = "1 engine" if options.engines == 1 else f"{options.engines} engines"
        say(None, f"starting a coordinator, {engines} and a server for {options.model}")
        server = Server(
            pid=os.getpid(),
            url=url,
            model=options.model,
            name=options.model_name,
            engines=options.engines,
            coordinator=_address(sockets, "client"),
            started=time.time(),
        )
        try:
            try:
                stack.enter_context(listed(server))
            except OSError as error:  # for example, a cache folder is not writable
                say(None, f"'megatron status' does not show this server: {error}")
            for child in _children(options, sockets=sockets, listener=listener):
                await supervisor.start(child)
            addresses = {"coordinator": server.coordinator, "admin": _address(sockets, "admin")}
            # While the children start, this process imports the modules with which it communicates with them.
            from megatron_runtime.cli.readiness import until_ready

            ready = until_ready(options, url=url, **addresses, say=say)
            if await _unless(stop, supervisor.failed, ready):
                supervisor.are_ready = True
                _print_usage(options, url=url, seconds=time.monotonic() - started)
                await _unless(stop, supervisor.failed, asyncio.Event().wait())
            say(None, "stopping; press Ctrl-C again to stop immediately")
        finally:
            await supervisor.stop(grace_seconds=options.drain_seconds + _GRACE_SECONDS)


def _address(sockets: Path, role: str) -> str:
    """Return the coordinator's address for a role: a Unix socket in `sockets`, which only this user can access."""
    return f"ipc://{sockets}/{role}"


def _children(options: SimpleNamespace, *, sockets: Path, listener: socket.socket) -> list[Child]:
    values = {**vars(options), "log_level": "info" if options.verbose else "warning", "health_port": "off"}

    def arguments(command: click.Command, **own: Any) -> list[str]:
        """Return the command-line arguments of a child process.

        The arguments set the options that `serve` and `command` share, and the options in `own`.
        """
        return [str(command.name), *arguments_of(command, {**values, **own})]

    engines = []
    for index, gpus in enumerate(options.gpus):
        variables = {name: value for name, value in os.environ.items() if name == VISIBLE}
        if gpus is not None:
            show_only(gpus, variables)
        name = f"engine-{index}"
        command = arguments(containers.engine, name=name, coordinator=_address(sockets, "engine"))
        engines.append(Child(name, command, variables=variables))
    server = arguments(
        containers.server,
        coordinator=_address(sockets, "client"),
        port=None,
        listen_fd=listener.fileno(),
        linger_seconds=0,
    )
    return [
        Child("coordinator", arguments(containers.coordinator, socket_dir=sockets)),
        *engines,
        Child("server", server, pass_fds=(listener.fileno(),)),
    ]


async def _unless(stop: asyncio.Event, failed: asyncio.Future[None], work: Any) -> bool:
    """Return True when `work` has finished. If `stop` is set earlier, cancel `work` and return False.

    Raises the exception of `failed` or `work`.
    """
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


def _print_usage(options: SimpleNamespace, *, url: str, seconds: float) -> None:
    name = options.model_name
    key = "" if options.api_keys_file is None else " -H 'Authorization: Bearer KEY'"
    body = f'{{"model": "{name}", "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'
    default_url = "" if url == "http://127.0.0.1:8000" else f" --url {url}"
    click.echo(
        f"\nready in {seconds:.1f} s: {name} at {url}/v1 (a chat page at {url}/)\n\n"
        f"  megatron chat{default_url}\n"
        f"  curl {url}/v1/chat/completions{key} -H 'Content-Type: application/json' -d '{body}'\n"
    )
