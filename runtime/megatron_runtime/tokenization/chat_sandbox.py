"""Where chat templates run.

A template comes with the weights, so it is data: it runs in Jinja's immutable sandbox, with the helpers that templates
in the field rely on (`raise_exception`, `strftime_now`, `tojson`, loop controls, `{% generation %}`) and no others.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

__all__ = ["TemplateSyntaxError", "compile_template"]


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks training targets; serving renders what is inside."""

    tags = {"generation"}  # noqa: RUF012 - the name and type are Jinja's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def compile_template(source: str, *, refuse: Callable[[str], Exception]) -> tuple[Template, set[str]]:
    """The template, and the variables it reads.

    refuse: what a template that refuses a conversation raises, by the message it gives.

    Raises TemplateSyntaxError.
    """
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )

    def raise_exception(message: str) -> NoReturn:
        raise refuse(message)

    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment.from_string(source), meta.find_undeclared_variables(environment.parse(source))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
