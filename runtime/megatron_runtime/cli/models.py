"""`megatron convert` and `megatron fetch`: models on the disk."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import click

from megatron_runtime.cli.options import DIRECTORY, FILE, NEW_DIRECTORY


@click.command()
@click.argument("source")
@click.argument("destination", type=NEW_DIRECTORY)
@click.option(
    "--to",
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
@click.option("--replace", is_flag=True, help="Replace an existing DESTINATION when the new one is complete.")
def convert(*, source: str, destination: Path, to: str, dtype: str, replace: bool) -> None:
    """Write the model SOURCE (a GGUF file, a directory, hf:ORG/NAME, builtin:NAME) to the directory DESTINATION.

    If the command fails, DESTINATION is not written. One tensor is in memory at a time.
    """
    from megatron_runtime.checkpoints import convert as conversion
    from megatron_runtime.tokenization.loader import write_gguf_tokenizer

    with _Bar(f"{source} -> {to}") as bar:
        conversion.convert(
            source,
            destination,
            to=to,  # type: ignore[arg-type]  # click.Choice allows only these
            dtype=conversion.DTYPES.get(dtype),
            replace=replace,
            write_gguf_tokenizer=write_gguf_tokenizer,
            progress=bar.show,
        )
    click.echo(f"{destination} holds the model as {to}")


@click.command()
@click.argument("repository", required=False, metavar="[ORG/NAME[@REVISION]")
@click.argument("directory", required=False, type=NEW_DIRECTORY, metavar="DIRECTORY]")
@click.option("--include", multiple=True, metavar="PATTERN", help="Only these files, such as *.json; repeatable.")
@click.option("--token-file", type=FILE, help="A file with the access token; by default HF_TOKEN has it.")
@click.option("--endpoint", help="URL of the hub; by default HF_ENDPOINT or the public one.")
@click.option("--verify", type=DIRECTORY, help="Compare every file of a fetched directory with its digest.")
def fetch(
    *,
    repository: str | None,
    directory: Path | None,
    include: tuple[str, ...],
    token_file: Path | None,
    endpoint: str | None,
    verify: Path | None,
) -> None:
    """Download a model from the Hugging Face hub to DIRECTORY.

    Run it again to continue an interrupted download. Each file is checked by its digest.
    Exit codes: 0 the directory is complete; 75 the hub cannot be reached, try again later; 1 trying again does not
    help.
    """
    from megatron_runtime.checkpoints.hub import download
    from megatron_runtime.checkpoints.hub.client import HubApi, HubUnavailableError, Reference, read_token

    if verify is not None:
        if repository is not None:
            raise click.UsageError("--verify takes the directory itself: leave the repository out")
        with _Bar("checking") as bar:
            manifest = download.verify_directory(verify, progress=bar)
        click.echo(f"{len(manifest.files)} files of {manifest.repository}@{manifest.commit} are as they were fetched")
        return
    if repository is None or directory is None:
        raise click.UsageError("name a repository and a directory, or --verify DIRECTORY")
    reference = Reference.parse(repository)
    with closing(HubApi(endpoint=endpoint, token=read_token(token_file))) as api, _Bar(str(reference)) as bar:
        try:
            manifest = download.fetch(reference, directory, api=api, include=include, progress=bar)
        except HubUnavailableError as error:
            click.echo(f"Error: {error}", err=True)
            raise SystemExit(os.EX_TEMPFAIL) from error
    click.echo(f"{directory} holds {len(manifest.files)} files of {manifest.repository}@{manifest.commit}")


class _Bar:
    """Shows the progress of a transfer as a bar on a terminal, else as a line for every tenth of it."""

    def __init__(self, what: str) -> None:
        from rich import console, progress

        terminal = console.Console(stderr=True)
        self._what = what
        self._is_terminal = terminal.is_terminal
        self._bar = progress.Progress(
            progress.TextColumn("{task.description}"),
            progress.BarColumn(),
            progress.DownloadColumn(binary_units=True),
            progress.TransferSpeedColumn(),
            progress.TimeRemainingColumn(),
            console=terminal,
            disable=not self._is_terminal,
        )
        self._task = self._bar.add_task(what, total=None)
        self._size = self._done = self._tenths = 0

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, *, files: int, size: int) -> None:
        """Show that `size` bytes of `files` files follow."""
        self._size = size
        self._bar.update(self._task, total=size, description=f"{self._what}, {files} files")

    def received(self, count: int) -> None:
        """Show `count` more bytes."""
        self.show(self._done + count, self._size)

    def show(self, done: int, size: int) -> None:
        """Show that `done` of `size` bytes are complete."""
        self._done = done
        self._bar.update(self._task, completed=done, total=size)
        tenths = done * 10 // size if size else 10
        if tenths > self._tenths:
            self._tenths = tenths
            if not self._is_terminal:
                click.echo(f"{self._what}: {done} of {size} bytes", err=True)
