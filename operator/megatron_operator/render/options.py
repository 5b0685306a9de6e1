"""Options of the runtime's commands that the operator sets: each is declared once, as flag, source and condition."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from megatron_operator.render.context import RenderContext


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a command line.

    flag: its long name. One that begins with `--no-` is passed if its value is false, as `click` has it.
    value: returns the value, given a resource and the name of the process: a coordinator's component or an engine
        name. None: the option is not passed. A bool has no text of its own: the flag alone. A list repeats the option.
    field: path of the field of the spec that has the value, by the names of the models; empty if it has another source.
    write: text of a value of the field, if the command line has another than the spec.
    """

    flag: str
    value: Callable[[RenderContext, str], Any]
    field: str = ""
    write: Callable[[Any], str] = str

    def arguments(self, ctx: RenderContext, process: str) -> list[str]:
        value = self.value(ctx, process)
        if value is None:
            return []
        if isinstance(value, list):
            return [part for each in value for part in (self.flag, self.write(each))]
        if isinstance(value, bool):
            return [self.flag] if value is not self.flag.startswith("--no-") else []
        return [self.flag, self.write(value)]


def of_field(flag: str, field: str, *, write: Callable[[Any], str] = str, unless_default: bool = False) -> Option:
    """Return the option that passes a field of the spec on. An absent field, or a part of its path, passes nothing.

    unless_default: the default of the field is not passed, so that a new field changes no pod.
    """

    def value(ctx: RenderContext, _process: str) -> Any:
        *path, name = field.split(".")
        part: BaseModel = ctx.spec
        for step in path:
            inner = getattr(part, step)
            if inner is None:
                return None
            part = inner
        found = getattr(part, name)
        return None if unless_default and found == type(part).model_fields[name].default else found

    return Option(flag, value, field, write)


SEQUENCE_LENGTH_OPTION = Option(
    "--max-sequence-length", lambda ctx, _: ctx.spec.max_sequence_length, "model.max_sequence_length"
)


def command_line(command: str, options: Iterable[Option], ctx: RenderContext, process: str) -> list[str]:
    """Return the arguments of a container: the command and its options, in the order of their declaration."""
    return [command, *(argument for option in options for argument in option.arguments(ctx, process))]
