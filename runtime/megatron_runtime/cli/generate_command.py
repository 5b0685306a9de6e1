"""`megatron generate`."""

from __future__ import annotations

import json
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

import click

from megatron_runtime.cli.api_client import ApiClient, connection_options, echo_text
from megatron_runtime.cli.options import COUNT, SECONDS


@click.command()
@click.argument("prompt")
@connection_options
@click.option("--max-tokens", type=COUNT, default=128)
@click.option("--temperature", type=SECONDS, default=0, help="0 is greedy.")
@click.option("--top-p", type=click.FloatRange(0, 1), help="Sample from the likeliest tokens of this much probability.")
@click.option("--seed", type=int, help="Makes a sampled answer repeatable.")
@click.option("--stop", multiple=True, help="Text that ends the answer; may be given several times.")
@click.option(
    "--schema",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="A file with a JSON schema that the answer must follow.",
)
@click.option("--regex", help="A regular expression that the answer must match.")
def command(
    *,
    prompt: str,
    url: str,
    model: str | None,
    api_key: str | None,
    stop: tuple[str, ...],
    schema: Path | None,
    regex: str | None,
    **sampling: Any,
) -> None:
    """Continue PROMPT (- reads it from standard input) and print the text as it comes."""
    text = sys.stdin.read() if prompt == "-" else prompt
    client = ApiClient(url, api_key=api_key)
    body = {
        "model": model or client.first_model(),
        "prompt": text,
        **sampling,
        "stop": list(stop) or None,
        "guided_json": None if schema is None else _read_schema(schema),
        "guided_regex": regex,
    }
    with closing(client.stream("completions", body)) as texts:
        for piece in texts:
            echo_text(piece)
    click.echo()


def _read_schema(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise click.BadParameter(f"{str(path)!r} is not valid JSON: {error}", param_hint="--schema") from error
