"""The options that the operator passes to the runtime's commands. Each option is declared once."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from megatron_operator.render.context import RenderContext


@dataclass(frozen=True, slots=True)
class Option:
    """One option of a command line.

    flag: long name of the option. A flag that begins with `--no-` is passed if the value is false, as in `click`.
    value: returns the value for a resource and the name of the process (a coordinator's component or an engine name).
        None omits the option. A bool passes only the flag, without a text. A list repeats the option for each element.
    field: path of the spec field that has the value, by attribute names; empty if the value has another source.
    write: converts the value to text, if the text on the command line differs from the text in the spec.
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
    """Return the option whose value is a field of the spec.

    If the field, or an object in its path, is absent, the option is omitted.

    field: path of the field, by attribute names.
    unless_default: omit the option if the field has its default, so that a new field changes no pod.
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
    """Return the arguments of a container: the command and its options, in the order of `options`.

    process: name of the process, which is passed to the function `value` of each option.
    """
    return [command, *(argument for option in options for argument in option.arguments(ctx, process))]
