"""`megatron run`: `megatron serve` in a child process, and `megatron chat` with it."""

from __future__ import annotations

import re
import subprocess
import threading
from typing import Any

import click

from megatron_runtime.cli.options import PASSED_ON, config_option
from megatron_runtime.cli.processes import free_ports
from megatron_runtime.cli.serve import serve
from megatron_runtime.cli.terminal import chat, chat_options
from megatron_runtime.process.children import END_SIGNAL, child_environment, module_command

_READY = re.compile(r"ready in \S+ s: .* at (\S+)/v1 ")
"""The line that `serve` prints when it is ready."""


@click.command(context_settings={"ignore_unknown_options": True, "allow_extra_args": True})
@click.argument("reference", metavar="MODEL")
@chat_options
@config_option(passes_on=serve)
@click.pass_context
def run(context: click.Context, reference: str, **conversation: Any) -> None:
    """Serve MODEL on this machine, and talk to it until the end of the input.

    It takes the options of `megatron serve` too, except --max-tokens of that command. The server uses a free port of
    this machine unless --port is given.
    """
    given = {argument.partition("=")[0] for argument in context.args}
    configured: list[str] = []
    for option, values in context.meta.get(PASSED_ON, []):
        if given.isdisjoint((*option.opts, *option.secondary_opts)):
            configured += values
    arguments = ["serve", reference, "--port", str(free_ports(1)[0]), *configured, *context.args]
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
            threading.Thread(target=server.stdout.read, daemon=True).start()  # or its pipe becomes full
            context.invoke(chat, url=ready[1], model=None, api_key=None, **conversation)
        finally:
            server.send_signal(END_SIGNAL)
