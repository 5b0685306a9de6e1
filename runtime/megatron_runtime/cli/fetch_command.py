"""`megatron fetch`."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path

import click

from megatron_runtime.cli.options import readable_errors, transfer_bar


@click.command()
@click.argument("repository", required=False, metavar="[ORG/NAME[@REVISION]")
@click.argument("directory", required=False, type=click.Path(file_okay=False, path_type=Path), metavar="DIRECTORY]")
@click.option(
    "--include", multiple=True, metavar="PATTERN", help="Only such files, as *.json; may be given repeatedly."
)
@click.option("--token-file", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Else HF_TOKEN.")
@click.option("--endpoint", help="URL of another hub than HF_ENDPOINT or the public one.")
@click.option(
    "--verify",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIRECTORY",
    help="Read a fetched directory again and compare every file with its digest.",
)
@readable_errors
def command(
    *,
    repository: str | None,
    directory: Path | None,
    include: tuple[str, ...],
    token_file: Path | None,
    endpoint: str | None,
    verify: Path | None,
) -> None:
    """Download a model from the Hugging Face hub to DIRECTORY.

    An interrupted download goes on where it was when this is run again. Each file is checked by its digest.
    Exit codes: 0 all is there, 75 the hub cannot be reached for now, 1 asking again does not help.
    """
    from megatron_runtime.checkpoints.hub.client import HubApi, HubUnavailableError, Reference, read_token
    from megatron_runtime.checkpoints.hub.download import fetch, verify_directory

    if verify is not None:
        if repository is not None:
            raise click.UsageError("--verify takes the directory itself: leave the repository out")
        with _Bar("checking") as bar:
            manifest = verify_directory(verify, progress=bar)
        click.echo(f"{len(manifest.files)} files of {manifest.repository}@{manifest.commit} are as they were fetched")
        return
    if repository is None or directory is None:
        raise click.UsageError("name a repository and a directory, or --verify DIRECTORY")
    reference = Reference.parse(repository)
    with closing(HubApi(endpoint=endpoint, token=read_token(token_file))) as api, _Bar(str(reference)) as bar:
        try:
            manifest = fetch(reference, directory, api=api, include=include, progress=bar)
        except HubUnavailableError as error:
            click.echo(f"Error: {error}", err=True)
            raise SystemExit(os.EX_TEMPFAIL) from error
    click.echo(f"{directory} holds {len(manifest.files)} files of {manifest.repository}@{manifest.commit}")


class _Bar:
    """Implements Progress as a bar on a terminal, else as a line for every tenth of the download."""

    def __init__(self, what: str) -> None:
        from rich.console import Console

        console = Console(stderr=True)
        self._what = what
        self._is_terminal = console.is_terminal
        self._bar = transfer_bar(console=console, disable=not self._is_terminal)
        self._task = self._bar.add_task(what, total=None)
        self._size = self._done = self._tenths = 0

    def __enter__(self) -> _Bar:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def begin(self, *, files: int, size: int) -> None:
        self._size = size
        self._bar.update(self._task, total=size, description=f"{self._what}, {files} files")

    def received(self, count: int) -> None:
        self._done += count
        self._bar.update(self._task, completed=self._done)
        tenths = self._done * 10 // self._size if self._size else 10
        if tenths > self._tenths:
            self._tenths = tenths
            if not self._is_terminal:
                click.echo(f"{self._what}: {self._done} of {self._size} bytes", err=True)
