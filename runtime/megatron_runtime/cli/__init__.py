"""The `megatron` command. One file per subcommand, imported when the subcommand runs."""

from __future__ import annotations

import click

import megatron_runtime
from megatron_runtime.cli.options import LazyGroup
from megatron_runtime.process.parent import end_with_parent


@click.group(
    cls=LazyGroup,
    commands_by_name={
        "serve": "Run everything on this machine: coordinator, engines, OpenAI server.",
        "chat": "Talk to a model in the terminal.",
        "generate": "Complete one prompt.",
        "convert": "Write a model in another checkpoint format.",
        "fetch": "Download a model from the Hugging Face hub, or check one.",
        "bench": "Measure the coordinator, an engine or a server.",
        "coordinator": "Run the coordinator (container entry point).",
        "engine": "Run one engine (container entry point).",
        "preflight": "See whether the pods of one engine can talk (init container).",
        "server": "Run the OpenAI server (container entry point).",
    },
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110, "show_default": True},
)
@click.version_option(megatron_runtime.__version__, prog_name="megatron")
def main() -> None:
    """Serve large language models over the OpenAI API.

    The shortest way to an answer:

    \b
      megatron serve --model builtin:smollm2-135m
      megatron chat
    """
    end_with_parent()
