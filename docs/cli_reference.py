"""The reference page of the operator's command lines, generated from the commands themselves. Pure text."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator

import click

from megatron_operator import cli, kubectl

PROGRAMS: tuple[tuple[str, click.Group], ...] = (("megatron-operator", cli.main), ("kubectl megatron", kubectl.main))


def _escape(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|").replace("{", "&#123;")


def _paragraph(text: str) -> list[str]:
    return textwrap.wrap(_escape(text), 100, break_long_words=False, break_on_hyphens=False)


def _default(option: click.Option) -> str:
    if option.required:
        return "required"
    given = option.default
    if option.is_flag and option.secondary_opts:
        return f"`{(option.opts if given else option.secondary_opts)[0]}`"
    plain = isinstance(given, str | int | float) and not isinstance(given, bool)
    return f"`{given}`" if plain else ""


def _options(command: click.Command) -> Iterator[str]:
    for option in command.params:
        if not isinstance(option, click.Option):
            continue
        names = ", ".join(f"`{name}`" for name in (*option.opts, *option.secondary_opts))
        choices = f" ({', '.join(option.type.choices)})" if isinstance(option.type, click.Choice) else ""
        variable = f" Also `${option.envvar}`." if isinstance(option.envvar, str) else ""
        yield f"| {names} | {_default(option)} | {_escape((option.help or '') + choices + variable)} |"


def section(program: str, name: str, command: click.Command) -> list[str]:
    """The lines of one command: usage, help and a table of its options."""
    arguments = [param.human_readable_name for param in command.params if isinstance(param, click.Argument)]
    usage = " ".join([program, name, *arguments])
    rows = list(_options(command))
    table = ["", "| option | default | |", "|---|---|---|", *rows] if rows else []
    return ["", f"### `{usage}`", "", *_paragraph(command.help or ""), *table]


def _commands(group: click.Group, prefix: str = "") -> Iterator[tuple[str, click.Command]]:
    """Yield the commands of a group and of the groups in it, by name."""
    for name, command in sorted(group.commands.items()):
        if isinstance(command, click.Group):
            yield from _commands(command, f"{prefix}{name} ")
        else:
            yield f"{prefix}{name}", command


def cli_page() -> str:
    """Return the page in Markdown."""
    lines = ["# Command lines of the operator", "", "Generated from the commands by `make generate`."]
    for program, group in PROGRAMS:
        lines += ["", f"## {program}", "", *_paragraph(group.help or "")]
        for name, command in _commands(group):
            lines += section(program, name, command)
    return "\n".join(lines) + "\n"
