"""A click group whose help needs none of its subcommands' modules."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

import click


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
