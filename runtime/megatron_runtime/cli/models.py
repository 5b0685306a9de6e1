"""`megatron convert` and `megatron fetch`: convert and download models."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from megatron_runtime.cli.options import DIRECTORY, FILE, NEW_DIRECTORY, PORT

if TYPE_CHECKING:
    from megatron_runtime.checkpoints.remote.files import Progress


@click.command()
@click.argument("source")
@click.argument("destination", type=NEW_DIRECTORY)
@click.option(
    "--to",
    type=click.Choice(["safetensors", "torch_dist", "packed"]),
    required=True,
    help="Format to write. safetensors is for transformers and vLLM, torch_dist for Megatron-LM; packed is a "
    "memory-mapped format for CPU engines that loads fastest.",
)
@click.option(
    "--dtype",
    type=click.Choice(["keep", "float32", "bfloat16", "float16", "int8", "int4"]),
    default="keep",
    help="Data type of the written weights. keep does not change the type, except that quantised weights become "
    "float32, or bfloat16 in a packed model. int8 and int4 are for packed models only; matrices that are already "
    "quantised keep their quantisation blocks.",
)
@click.option(
    "--replace",
    is_flag=True,
    help="Replace an existing DESTINATION when the conversion has succeeded. Without it, an existing DESTINATION is "
    "an error.",
)
def convert(*, source: str, destination: Path, to: str, dtype: str, replace: bool) -> None:
    """Write the model SOURCE (a GGUF file, a directory, hf:ORG/NAME, builtin:NAME) to the directory DESTINATION.

    If the command fails, it does not write DESTINATION. The conversion holds one tensor in memory at a time.
    """
    from megatron_runtime.checkpoints import convert as conversion
    from megatron_runtime.tokenization.loader import write_gguf_tokenizer

    if to != "packed" and dtype in ("int8", "int4"):
        raise click.UsageError(f"--dtype {dtype} is for --to packed")
    with _shown_progress(f"{source} -> {to}") as progress:
        conversion.convert(
            source,
            destination,
            to=to,  # type: ignore[arg-type]  # click.Choice allows only these
            dtype=dtype,
            replace=replace,
            write_gguf_tokenizer=write_gguf_tokenizer,
            progress=lambda done, size: progress(done, size, 1),
        )
    click.echo(f"{destination} holds the model as {to}")


@click.command()
@click.argument("source", required=False, metavar="[SOURCE")
@click.argument("directory", required=False, type=NEW_DIRECTORY, metavar="DIRECTORY]")
@click.option(
    "--cache",
    type=NEW_DIRECTORY,
    help="Model cache to which the command downloads, instead of DIRECTORY. Engines use the cache if "
    "MEGATRON_MODEL_CACHE has its path.",
)
@click.option(
    "--include",
    multiple=True,
    metavar="PATTERN",
    help="Download only files that match this pattern, such as *.json. Repeatable.",
)
@click.option("--token-file", type=FILE, help="File with the access token of the hub. Default: the token in HF_TOKEN.")
@click.option("--endpoint", help="URL of the hub. Default: HF_ENDPOINT, or the public hub.")
@click.option(
    "--progress-port",
    type=PORT,
    help="Port on which the command offers its progress as JSON at /progress. Default: none.",
)
@click.option(
    "--verify",
    type=DIRECTORY,
    help="Verify the digest of every file in a directory that was downloaded earlier, and download nothing.",
)
def fetch(
    *,
    source: str | None,
    directory: Path | None,
    cache: Path | None,
    include: tuple[str, ...],
    token_file: Path | None,
    endpoint: str | None,
    progress_port: int | None,
    verify: Path | None,
) -> None:
    """Download a model to DIRECTORY.

    SOURCE is ORG/NAME[@REVISION] of the Hugging Face hub, or s3://BUCKET/PREFIX, gs://BUCKET/PREFIX,
    az://CONTAINER/PREFIX or https://HOST/PATH. Run the command again to continue an interrupted download. The
    command verifies the digest of each file. If an object store has no digest, the command verifies that the version of
    the object did not change.
    Exit codes: 0 if the directory is complete; 75 if the source cannot be reached (retry later); 1 after an error that
    a retry does not correct.
    """
    from megatron_runtime.checkpoints.remote import download
    from megatron_runtime.checkpoints.remote.files import HubUnavailableError, choose, verify_directory

    if verify is not None:
        if source is not None:
            raise click.UsageError("--verify takes the directory itself: leave the source out")
        with _shown_progress("checking") as progress:
            manifest = verify_directory(verify, progress=progress)
        click.echo(f"{len(manifest.files)} files of {manifest.repository}@{manifest.commit} are as they were fetched")
        return
    if source is None or (directory is None) == (cache is None):
        raise click.UsageError("name a source and either a directory or --cache DIRECTORY, or --verify DIRECTORY")
    if cache is not None and (include or token_file or endpoint):
        raise click.UsageError("--cache takes no --include, --token-file or --endpoint: use HF_TOKEN and HF_ENDPOINT")
    reference = download.parse_reference(source)
    try:
        with _shown_progress(str(reference)) as shown, _served_progress(progress_port, shown) as progress:
            if directory is None:
                folder = download.cached_directory(source, cache=cache, progress=progress)
                click.echo(f"{folder} holds {reference}")
                return
            api = download.connect(reference, endpoint=endpoint, token_file=token_file)
            listing = api.list()
            manifest = download.fetch(api, listing, choose(listing.files, include), directory, progress=progress)
    except HubUnavailableError as error:
        click.echo(f"Error: {error}", err=True)
        raise SystemExit(os.EX_TEMPFAIL) from error
    click.echo(f"{directory} holds {len(manifest.files)} files of {manifest.repository}@{manifest.commit}")


@contextmanager
def _shown_progress(what: str) -> Iterator[Progress]:
    """Yield a Progress that shows a bar on a terminal, or else prints a line after each tenth of the transfer."""
    from rich import console, progress

    from megatron_runtime.checkpoints.remote.files import each_tenth

    terminal = console.Console(stderr=True)
    if not terminal.is_terminal:
        yield each_tenth(lambda done, size, files: click.echo(f"{what}: {done} of {size} bytes", err=True))
        return
    bar = progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        console=terminal,
    )
    with bar:
        task = bar.add_task(what, total=None)
        yield lambda done, size, files: bar.update(task, completed=done, total=size)


@contextmanager
def _served_progress(port: int | None, report: Progress) -> Iterator[Progress]:
    """Yield a Progress that calls `report` and serves the newest counts over HTTP at /progress on `port`.

    If `port` is None, no HTTP server is started.

    The server answers 503 until the download has locked the cache and reported its first counts.
    """
    if port is None:
        yield report
        return
    from megatron_runtime.process.health import HealthServer, serve_on_thread
    from megatron_runtime.process.progress import Stage, StartProgress

    start = StartProgress()

    def progress(done: int, size: int, files: int) -> None:
        start.report(Stage.DOWNLOAD, done, size)
        report(done, size, files)

    stop = serve_on_thread(HealthServer(missing=list, pages={"/progress": start.page}, port=port))
    try:
        yield progress
    finally:
        stop()
