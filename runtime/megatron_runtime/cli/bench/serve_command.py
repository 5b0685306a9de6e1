"""`megatron bench serve`."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
import httpx

from megatron_runtime.cli.api_client import ApiClient, connection_options
from megatron_runtime.cli.bench.report import Counts, print_table, write_json
from megatron_runtime.cli.bench.serve_load import LoadOptions, run
from megatron_runtime.cli.options import readable_errors

_COUNT = click.IntRange(min=1)


@click.command()
@connection_options
@click.option("--concurrency", type=Counts(), default="1,8,32", show_default=True, help="Clients at once, each a run.")
@click.option("--requests", type=_COUNT, default=32, show_default=True, help="Of each run; at least two a client.")
@click.option("--prompt-words", type=_COUNT, default=64, show_default=True)
@click.option("--new-tokens", type=_COUNT, default=64, show_default=True, help="Of each answer; nothing ends early.")
@click.option("--seed", type=int, default=0, show_default=True, help="Prompts of another seed are others.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures there.")
@readable_errors
def command(*, json_file: Path | None, url: str, model: str | None, api_key: str | None, **values: Any) -> None:
    """How a server answers clients that wait for each answer before they ask again."""
    model = model or ApiClient(url, api_key=api_key).first_model()
    options = LoadOptions(url=url.rstrip("/").removesuffix("/v1"), model=model, api_key=api_key, **values)
    try:
        figures = run(options)
    except httpx.HTTPError as error:
        raise click.ClickException(f"the connection to {url} failed: {error!r}") from error
    print_table(f"Server at {options.url}, {model}", figures)
    if json_file is not None:
        shown = {name: value for name, value in asdict(options).items() if name != "api_key"}
        write_json(json_file, benchmark="serve", options=shown, figures=figures)
