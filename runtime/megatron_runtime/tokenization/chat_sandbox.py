"""The program of the child process in which chat templates run, with limits and in Jinja's immutable sandbox.

A template is part of the model and therefore not trusted. It gets only the helpers that published templates need:
`raise_exception`, `strftime_now`, `tojson`, loop controls and `{% generation %}`. If a template loops forever or builds
huge values, this process is killed, and chat_template.py restarts it.
"""

from __future__ import annotations

from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

from jinja2 import Template, TemplateSyntaxError, meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from megatron_runtime.process.sacrificial_process import serve
from megatron_runtime.protocol import strict_json as json

MAX_RENDERED_CHARACTERS = 8 * 1024 * 1024


class _GenerationBlock(Extension):
    """The tag `{% generation %}…{% endgeneration %}`, which marks training targets.

    The content of the tag is rendered unchanged.
    """

    tags = {"generation"}  # noqa: RUF012 - the name and type are Jinja's

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's immutable sandbox, except that a template may append to a list, as Kimi K2's templates do.

    Each rendering has its own objects, so a template cannot affect other renderings.
    """

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return (isinstance(obj, list) and attr == "append") or super().is_safe_attribute(obj, attr, value)


class _RenderingError(Exception):
    """Raised if the template rejects the messages or fails on them."""


@lru_cache(maxsize=4)
def _compiled(source: str) -> tuple[Template, list[str]]:
    """Compile a template. Return the compiled template, and the names of the variables that it reads.

    Raises errors of Jinja and Python if the template is invalid.
    """
    environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _GenerationBlock])

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
    """Compile a template. Also render the template if the request has a scope. Return the reply.

    request: JSON with the template's `source` and, for a rendering, `scope`, which contains all variables.

    The reply is a JSON object. After a rendering, it has the `text`. Without a scope, it has the `variables` of the
    template. After a failure, it has the `stage` that failed ("compile" or "render") and the `message`.
    """
    fields = json.loads(request.decode("utf-8", "surrogatepass"))
    try:
        template, variables = _compiled(fields["source"])
    except Exception as error:  # Jinja's errors, and Python's for deeply nested code
        line = f"line {error.lineno}: " if isinstance(error, TemplateSyntaxError) else ""
        return _reply(stage="compile", message=line + _shown(error))
    if "scope" not in fields:
        return _reply(variables=variables)
    try:
        return _reply(text=_rendered(template, fields["scope"]))
    except _RenderingError as error:
        return _reply(stage="render", message=str(error)[:4000])
    except Exception as error:  # the template's code can raise any exception
        return _reply(stage="render", message=f"the chat template cannot render these messages: {_shown(error)}")


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


def _reply(**fields: Any) -> bytes:
    return json.dumps(fields, ensure_ascii=False).encode("utf-8", "surrogatepass")


if __name__ == "__main__":
    serve(lambda _setup: _handle)
