"""Writes the output of the commands, and escapes it. All output of the commands goes through this module."""

from __future__ import annotations

import re
from typing import Any, NoReturn

import click

from megatron_operator.resource.text import printable
from megatron_runtime.process.environment import missing_package, output_is_closed
from megatron_runtime.protocol import strict_json as json

_NUMBER = re.compile(r"[-+]?(0o[0-7_]+|(\.[0-9_]+|[0-9][0-9_]*(\.[0-9_]*)?)([eE][-+]?[0-9_]+)?)$")
_LETTER = re.compile(r"[yYnN]$")


class ReadableGroup(click.Group):
    """A group of commands that reports a missing package or a broken connection in one line."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            raise click.ClickException(missing_package(error, extra="dashboard")) from error
        except BrokenPipeError as error:
            if output_is_closed():
                raise  # click exits the command without a message
            raise click.ClickException(str(error)) from error


def say(line: str, *, err: bool = False) -> None:
    """Write one line to standard output, or to standard error if `err` is set."""
    click.echo(printable(line), err=err)


def say_lines(lines: list[str]) -> None:
    """Write lines of text. Line breaks within a line are escaped."""
    for line in lines:
        say(line)


def document(text: str) -> None:
    """Write a document, which as_yaml() or as_json() returned, to standard output."""
    click.echo(text, nl=False)


def say_candidates(candidates: list[tuple[str, str]]) -> None:
    """Write candidates of a shell completion and their help, in the format that kubectl reads."""
    for value, text in candidates:
        click.echo(f"{printable(value)}\t{printable(text)}" if text else printable(value))
    click.echo(":4")  # tells kubectl not to complete file names


def say_json(value: Any, *, indent: int | None = 2) -> None:
    """Write one JSON value, on one line if `indent` is None."""
    click.echo(json.dumps(value, indent=indent).replace("\x7f", "\\u007f"))


def clear() -> None:
    """Clear the terminal and move the cursor to its first line."""
    click.echo("\x1b[H\x1b[2J", nl=False)


def as_json(documents: list[dict[str, Any]]) -> str:
    """Return ASCII JSON text: one object, or a list if there are several objects."""
    text = json.dumps(documents[0] if len(documents) == 1 else documents, indent=2)
    return text.replace("\x7f", "\\u007f") + "\n"


def as_yaml(documents: list[dict[str, Any]]) -> str:
    """Return ASCII YAML, with other characters escaped. Text that kubectl would read as another type is quoted."""
    import yaml  # imported here, because most commands print no YAML

    class Dumper(yaml.SafeDumper):
        """A YAML dumper that quotes strings such as 1e3, 0o17 and y.

        PyYAML would write them without quotes, and kubectl would read them as numbers or booleans.
        """

    Dumper.add_implicit_resolver("tag:yaml.org,2002:float", _NUMBER, list("-+.0123456789"))
    Dumper.add_implicit_resolver("tag:yaml.org,2002:bool", _LETTER, list("yYnN"))
    return yaml.dump_all(documents, Dumper=Dumper, sort_keys=False, width=120, allow_unicode=False)


def fail(error: Exception, *, lines: bool = False) -> NoReturn:
    """Raise the exception that ends the command with exit code 1 and prints the error's message.

    Args:
        lines: whether line breaks in the message are printed. By default, they are escaped. Set this
            argument only if this program has composed the message.
    """
    raise click.ClickException(printable(str(error), lines=lines)) from error
