"""`megatron convert`."""

from __future__ import annotations

from pathlib import Path

import click

from megatron_runtime.cli.options import readable_errors, transfer_bar


@click.command()
@click.argument("source")
@click.argument("destination", type=click.Path(file_okay=False, path_type=Path))
@click.option(
    "--to",
    "to",
    type=click.Choice(["safetensors", "torch_dist"]),
    required=True,
    help="safetensors: as transformers reads it; torch_dist: as Megatron-LM does.",
)
@click.option(
    "--dtype",
    type=click.Choice(["keep", "float32", "bfloat16", "float16"]),
    default="keep",
    help="Of the weights; keep: float32 where they are quantised.",
)
@click.option("--replace", is_flag=True, help="DESTINATION may exist, and goes once the new one is whole.")
@readable_errors
def command(*, source: str, destination: Path, to: str, dtype: str, replace: bool) -> None:
    """Write the model SOURCE (a GGUF file, a directory, hf:ORG/NAME, builtin:NAME) to the directory DESTINATION.

    The directory is there whole or not at all. One tensor is in memory at a time.
    """
    from megatron_runtime.checkpoints.convert import DTYPES, convert
    from megatron_runtime.tokenization.loader import write_gguf_tokenizer

    with transfer_bar() as bar:
        task = bar.add_task(f"{source} -> {to}", total=None)
        convert(
            source,
            destination,
            to=to,  # type: ignore[arg-type]  # click.Choice allows only these
            dtype=DTYPES.get(dtype),
            replace=replace,
            write_gguf_tokenizer=write_gguf_tokenizer,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    click.echo(f"{destination} holds the model as {to}")
