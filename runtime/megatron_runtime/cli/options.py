"""What the subcommands share: lazily imported groups, option types, logging and readable errors."""

from __future__ import annotations

import functools
import logging
import os
import re
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from megatron_runtime.protocol.text import printable

if TYPE_CHECKING:
    from rich.progress import Progress

_F = TypeVar("_F", bound=Callable[..., Any])

_UNITS = {"": 1, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
_QUANTITY = re.compile(r"(\d+(?:\.\d+)?)(Ki|Mi|Gi|Ti|k|M|G|T|)")


class LazyGroup(click.Group):
    """Subcommand NAME is the object `command` of the module `NAME_command` in `package`.

    commands_by_name: the one line of help of each subcommand, in the order of the help page.
    """

    def __init__(
        self,
        *args: Any,
        commands_by_name: Mapping[str, str],
        package: str = "megatron_runtime.cli",
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self._package = package
        self._help_by_name = dict(commands_by_name)

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._help_by_name)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._help_by_name:
            return None
        module = import_module(f"{self._package}.{cmd_name}_command")
        command: click.Command = module.command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(self._help_by_name.items()))


class Memory(click.ParamType[int]):
    """A Kubernetes quantity of bytes: `2Gi`, `512Mi`, `1.5G`, `1073741824`."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = _QUANTITY.fullmatch(value)
        size = int(float(match[1]) * _UNITS[match[2]]) if match else 0
        if size < 1:
            self.fail(f"{value!r} is not a size: use bytes or a number with Ki, Mi, Gi or Ti, such as 2Gi.", param, ctx)
        return size


class Address(click.ParamType[str]):
    """Where a coordinator listens: `host:port`, with or without `tcp://`."""

    name = "host:port"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        bare = str(value).removeprefix("tcp://")
        host, _, port = bare.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 65536:
            self.fail(f"{value!r} is not an address: use host:port, such as demo-coordinator:5555.", param, ctx)
        return f"tcp://{bare}"


class OptionalPort(click.ParamType["int | None"]):
    """A TCP port; 0 picks a free one, `off` leaves it out."""

    name = "port|off"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | None:
        if value == "off":
            return None
        if isinstance(value, int):
            return value
        if not value.isdecimal() or int(value) > 65535:
            self.fail(f"{value!r} is not a port: use 0 to 65535 (0 picks a free one) or off.", param, ctx)
        return int(value)


class ApiKeysFile(click.ParamType[Path]):
    """A file of API keys, one a line; empty lines and lines that begin with # do not count."""

    name = "file"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path:
        from megatron_runtime.server.auth import NoKeysError, read_keys

        path = Path(value)
        try:
            read_keys(path)
        except NoKeysError as error:
            self.fail(f"{error}.", param, ctx)
        except (OSError, UnicodeDecodeError) as error:
            self.fail(f"{value!r} cannot be read ({error}): name a text file with one key a line.", param, ctx)
        return path


PORT = click.IntRange(0, 65535)
COUNT = click.IntRange(min=1)
SECONDS = click.FloatRange(min=0)
DIRECTORY = click.Path(exists=True, file_okay=False, path_type=Path)
ROUTING_POLICIES = ("LoadBalanced", "RoundRobin", "FirstPrefixBlock", "LongestPrefix")
TOOL_CALL_PARSERS = ("auto", "none", "hermes", "llama3_json", "mistral", "pythonic")


model = click.option(
    "--model", default="builtin:smollm2-135m", help="builtin:NAME, hf:ORG/NAME[@REVISION], a GGUF file or a directory."
)
batch_invariant = click.option(
    "--batch-invariant/--no-batch-invariant",
    default=False,
    help="Answers are the same to the bit whatever runs beside them; in float32, at some cost.",
)
tool_call_parser = click.option(
    "--tool-call-parser",
    type=click.Choice(TOOL_CALL_PARSERS),
    default="auto",
    help="How the model writes tool calls; auto: as its chat template says; none: no tools.",
)
share_prefix_cache = click.option(
    "--share-prefix-cache/--no-share-prefix-cache",
    default=False,
    help="API keys share cached prefixes, and see from cached_tokens which prompts others sent.",
)
allow_priority = click.option(
    "--allow-priority/--no-allow-priority", default=False, help="Requests may choose a priority other than 0."
)


def transfer_bar(**options: Any) -> Progress:
    """A progress bar of bytes. options: of rich's Progress."""
    from rich import progress

    return progress.Progress(
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.DownloadColumn(binary_units=True),
        progress.TransferSpeedColumn(),
        progress.TimeRemainingColumn(),
        **options,
    )


class LogFormatter(logging.Formatter):
    """One escaped line per record; tracebacks are indented. Names of peers and texts of clients can neither look like
    another record nor change what a terminal shows."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:
        return "\n".join(f"    {line}" for line in printable(super().formatException(ei), lines=True).split("\n"))


def log_level(command: _F) -> _F:
    """Add `--log-level` and set logging up."""

    def configure(ctx: click.Context, param: click.Parameter, value: str) -> None:
        handler = logging.StreamHandler()
        handler.setFormatter(LogFormatter("%(asctime)s %(levelname)s %(name)s: %(message)s", datefmt="%H:%M:%S"))
        logging.basicConfig(level=value.upper(), handlers=[handler])

    option = click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="info",
        envvar="MEGATRON_LOG_LEVEL",
        expose_value=False,
        callback=configure,
        help="Least level that is logged.",
    )
    return option(command)


def readable_errors(command: _F) -> _F:
    """Show what is wrong with an address, a model or a key file as one line; MEGATRON_DEBUG=1 keeps the traceback."""

    @functools.wraps(command)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        try:
            return command(*args, **kwargs)
        except (OSError, ValueError) as error:
            if os.environ.get("MEGATRON_DEBUG"):
                raise
            raise click.ClickException(str(error)) from error

    return wrapped  # type: ignore[return-value]
