"""Escaped output of the commands. All output of the commands goes through this module."""

from __future__ import annotations

import json
from typing import Any, NoReturn

import click
import yaml

from megatron_operator.model.text import printable


def say(line: str) -> None:
    """Write one line."""
    click.echo(printable(line))


def say_lines(lines: list[str]) -> None:
    """Write lines. Line breaks within a line are escaped."""
    for line in lines:
        say(line)


def document(text: str) -> None:
    """Write the output of as_yaml() or as_json()."""
    click.echo(text, nl=False)


def as_json(documents: list[dict[str, Any]]) -> str:
    """Return ASCII JSON: one object, or a list of several."""
    text = json.dumps(documents[0] if len(documents) == 1 else documents, indent=2)
    return text.replace("\x7f", "\\u007f") + "\n"


def as_yaml(documents: list[dict[str, Any]]) -> str:
    """Return ASCII YAML, with other characters escaped."""
    return yaml.safe_dump_all(documents, sort_keys=False, width=120, allow_unicode=False)


def fail(error: Exception, *, lines: bool = False) -> NoReturn:
    """End the command with exit code 1 and the error's message.

    Args:
        lines: the message has several lines that this program has composed.
    """
    raise click.ClickException(printable(str(error), lines=lines)) from error
