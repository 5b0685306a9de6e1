"""The command `megatron`. It imports the module of a subcommand only when the subcommand runs, so `--help` is fast."""

from __future__ import annotations

import click

import megatron_runtime
from megatron_runtime.cli.options import LazyGroup
from megatron_runtime.process.children import end_with_parent
from megatron_runtime.process.environment import prepare_process


@click.group(
    cls=LazyGroup,
    commands={
        "serve": ("serve", "Run a coordinator, engines and an OpenAI server on this machine."),
        "run": ("run", "Serve a model on this machine and chat with it."),
        "chat": ("terminal", "Chat with a model in the terminal."),
        "generate": ("terminal", "Complete one prompt."),
        "status": ("servers", "Show the servers on this machine."),
        "convert": ("models", "Convert a model to another checkpoint format."),
        "fetch": ("models", "Download a model, or verify a downloaded one."),
        "bench": ("bench", "Measure the coordinator, an engine or a server."),
        "coordinator": ("containers", "Run the coordinator (container entry point)."),
        "engine": ("containers", "Run one engine (container entry point)."),
        "preflight": ("containers", "Check that the pods of one engine can communicate (init container)."),
        "server": ("containers", "Run the OpenAI server (container entry point)."),
    },
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
)
@click.version_option(megatron_runtime.__version__, prog_name="megatron")
def main() -> None:
    """Serve large language models over the OpenAI API.

    The shortest way to an answer:

    \b
      megatron run builtin:smollm2-135m
    """
    prepare_process()
    end_with_parent()
