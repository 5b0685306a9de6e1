"""The child process with limits in which chat templates run, in Jinja's immutable sandbox.

A template comes with the weights, so it is data: it gets the helpers that published templates rely on
(`raise_exception`, `strftime_now`, `tojson`, loop controls, `{% generation %}`) and no others. A template that loops or
builds huge values ends this process, which chat_template.py starts again.
"""

from __future__ import annotations

import json
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron_runtime.process.sacrificial_process import serve

MAX_RENDERED_CHARACTERS = 8 * 1024 * 1024

TEXT, FAILURE = b"T", b"F"
"""First byte of a reply: the rendered text in UTF-8, or JSON that says what is wrong."""


class _GenerationBlock(Extension):
    """`{% generation %}…{% endgeneration %}` marks training targets; serving renders what is inside."""

    tags = {"generation"}  # noqa: RUF012 - the name and type are Jinja's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _RenderingError(Exception):
    """The template rejects the messages, or fails on them."""


@lru_cache(maxsize=4)
def _compiled(source: str) -> tuple[Template, list[str]]:
    """The template, and the variables it reads. Raises whatever Jinja and Python raise for a bad one."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock]
    )

    def raise_exception(message: str) -> NoReturn:
        raise _RenderingError(message)

    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda layout: datetime.now().strftime(layout)
    return environment.from_string(source), sorted(meta.find_undeclared_variables(environment.parse(source)))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _handle(request: bytes) -> bytes:
    """Compile a template, and render it if the request has a scope.

    request: JSON of `source` and maybe `scope`, all the variables of a rendering.
    Returns TEXT and the text (without a scope: the template's variables as JSON), or FAILURE and
    `{"stage": "compile" | "render", "message"}`.
    """
    fields = json.loads(request)
    try:
        template, variables = _compiled(fields["source"])
    except Exception as error:  # Jinja's own, and Python's for deeply nested code
        line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
        return _failure("compile", line + _shown(error))
    if "scope" not in fields:
        return TEXT + json.dumps(variables).encode()
    try:
        return TEXT + _rendered(template, fields["scope"]).encode("utf-8", "surrogatepass")
    except _RenderingError as error:
        return _failure("render", str(error))
    except Exception as error:  # whatever its type, the template's own code raised it over these messages
        return _failure("render", f"the chat template cannot render these messages: {_shown(error)}")


def _rendered(template: Template, scope: dict[str, Any]) -> str:
    pieces: list[str] = []
    size = 0
    for piece in template.generate(scope):
        size += len(piece)
        if size > MAX_RENDERED_CHARACTERS:
            raise _RenderingError(f"the rendered prompt is longer than {MAX_RENDERED_CHARACTERS} characters")
        pieces.append(piece)
    return "".join(pieces)


def _shown(error: Exception) -> str:
    text = str(error) or type(error).__name__
    return text if len(text) <= 1000 else text[:1000] + "..."


def _failure(stage: str, message: str) -> bytes:
    return FAILURE + json.dumps({"stage": stage, "message": message[:4000]}).encode()


if __name__ == "__main__":
    serve(lambda _setup: _handle)
