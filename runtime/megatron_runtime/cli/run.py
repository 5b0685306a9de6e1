"""The command `megatron run`, which runs `megatron serve` in a child process and `megatron chat` in this process."""

from __future__ import annotations

import re
import subprocess
import threading
from typing import Any

import click

from megatron_runtime.cli.options import arguments_of, config_option
from megatron_runtime.cli.serve import serve
from megatron_runtime.cli.terminal import chat, chat_options
from megatron_runtime.process.children import END_SIGNAL, child_environment, module_command

_READY = re.compile(r"ready in \S+ s: .* at (\S+)/v1 ")
"""Matches the line that `serve` prints when the server is ready. The group is the URL."""


_OTHERS = ("reference", "model", "max_tokens", "config")
"""Parameters of `serve` that do not exist in `run`, or that have another meaning there."""


@click.command(params=[each for each in serve.params if each.name not in _OTHERS])
@click.argument("reference", metavar="MODEL")
@chat_options
@config_option()
@click.pass_context
def run(context: click.Context, reference: str, **options: Any) -> None:
    """Serve MODEL on this machine and chat with it until the end of the input.

    The server uses a free port unless --port is set.
    """
    conversation = {str(each.name): options.pop(str(each.name)) for each in chat.params if each.name in options}
    if context.get_parameter_source("port") is click.core.ParameterSource.DEFAULT:
        options["port"] = 0
    options["adapters"] = [f"{adapter.name}={adapter.source}" for adapter in options["adapters"]]
    arguments = ["serve", reference, *arguments_of(serve, options)]
    with subprocess.Popen(
        module_command("megatron_runtime.cli", *arguments),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=child_environment(ends_with_parent=True),
        start_new_session=True,
    ) as server:
        try:
            assert server.stdout is not None
            for line in server.stdout:
                if (ready := _READY.match(line)) is not None:
                    break
                click.secho(line.rstrip(), dim=True, err=True)
            else:
                raise click.ClickException(f"the server ended with status {server.wait()}")
            threading.Thread(target=server.stdout.read, daemon=True).start()  # keep the pipe from filling up
            context.invoke(chat, url=ready[1], model=None, api_key=None, **conversation)
        finally:
            server.send_signal(END_SIGNAL)
