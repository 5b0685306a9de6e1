"""Chat templates, rendered the way the transformers library renders them, in a sandbox.

A template comes with the weights, so it is data: it runs in Jinja's immutable sandbox, with the helpers that templates
in the field rely on (`raise_exception`, `strftime_now`, `tojson`, loop controls, `{% generation %}`) and no others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_RENDERED_CHARACTERS = 32 * 1024 * 1024

_RESERVED = frozenset({"messages", "tools"})


class ChatTemplateError(ValueError):
    """The conversation cannot be rendered: the message says what the template objected to.

    variable: the variable at fault, where it is one that the request gave.
    """

    def __init__(self, message: str, *, variable: str | None = None) -> None:
        super().__init__(message)
        self.variable = variable


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks training targets; serving renders what is inside."""

    tags = {"generation"}  # noqa: RUF012 - the name and type are Jinja's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled chat template.

    source:  the Jinja text.
    special: variables every template may use, such as `bos_token` and `eos_token`.
    """

    def __init__(self, source: str, *, special: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
        self.source = source
        self.special = dict(special)
        try:
            self._template = environment.from_string(source)
            self.reads_tools = "tools" in meta.find_undeclared_variables(environment.parse(source))
            """Whether the template has a way to tell the model of tools."""
        except jinja2.TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"the model's chat template is not valid Jinja, line {error.lineno}: {error}"
            ) from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text, up to where the assistant's answer begins.

        variables: further template variables (`add_generation_prompt` is True unless given here).
        Raises ChatTemplateError when the template refuses the messages or cannot digest them.
        """
        given = dict(variables or {})
        taken = sorted(_RESERVED & given.keys())
        if taken:
            name = taken[0]
            raise ChatTemplateError(
                f"chat template variable {name!r} is set by the request itself: remove it",
                variable=f"chat_template_kwargs.{name}",
            )
        scope = {"add_generation_prompt": True, "documents": None, **self.special, **given}
        try:
            # Any exception of the template's own code is a verdict on the messages, whatever its type.
            pieces: list[str] = []
            size = 0
            for piece in self._template.generate(messages=list(messages), tools=tools, **scope):
                size += len(piece)
                if size > MAX_RENDERED_CHARACTERS:
                    raise ChatTemplateError(f"the rendered prompt is longer than {MAX_RENDERED_CHARACTERS} characters")
                pieces.append(piece)
            return "".join(pieces)
        except ChatTemplateError:
            raise
        except Exception as error:
            raise ChatTemplateError(f"the chat template cannot render these messages: {error}") from error


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise ChatTemplateError(message)
