"""`megatron generate`."""

from __future__ import annotations

import sys
from contextlib import closing

import click

from megatron_runtime.cli.api_client import ApiClient, connection_options


@click.command()
@click.argument("prompt")
@connection_options
@click.option("--max-tokens", type=click.IntRange(min=1), default=128, show_default=True)
@click.option("--temperature", type=click.FloatRange(min=0), default=0, show_default=True, help="0 is greedy.")
@click.option("--seed", type=int, help="Makes a sampled answer repeatable.")
@click.option("--stop", multiple=True, help="Text that ends the answer; may be given several times.")
def command(
    *,
    prompt: str,
    url: str,
    model: str | None,
    api_key: str | None,
    max_tokens: int,
    temperature: float,
    seed: int | None,
    stop: tuple[str, ...],
) -> None:
    """Continue PROMPT (- reads it from standard input) and print the text as it comes."""
    text = sys.stdin.read() if prompt == "-" else prompt
    client = ApiClient(url, api_key=api_key)
    body = {
        "model": model or client.first_model(),
        "prompt": text,
        "max_tokens": max_tokens,
        "temperature": temperature,
        "seed": seed,
        "stop": list(stop) or None,
    }
    with closing(client.stream("completions", body)) as choices:
        for choice in choices:
            click.echo(choice["text"], nl=False)
    click.echo()
