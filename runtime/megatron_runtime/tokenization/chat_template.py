"""Chat templates, rendered the way the transformers library renders them, in a sandbox (chat_sandbox.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

MAX_RENDERED_CHARACTERS = 32 * 1024 * 1024

_RESERVED = frozenset({"messages", "tools"})


class ChatTemplateError(ValueError):
    """The conversation cannot be rendered: the message says what the template objected to.

    variable: the variable at fault, where it is one that the request gave.
    """

    def __init__(self, message: str, *, variable: str | None = None) -> None:
        super().__init__(message)
        self.variable = variable


class ChatTemplate:
    """A compiled chat template.

    source:  the Jinja text.
    special: variables every template may use, such as `bos_token` and `eos_token`.
    """

    def __init__(self, source: str, *, special: Mapping[str, str]) -> None:
        # Jinja is large, and an engine process renders nothing.
        from megatron_runtime.tokenization.chat_sandbox import TemplateSyntaxError, compile_template

        self.source = source
        self.special = dict(special)
        try:
            self._template, variables = compile_template(source, refuse=ChatTemplateError)
        except TemplateSyntaxError as error:
            raise ChatTemplateError(
                f"the model's chat template is not valid Jinja, line {error.lineno}: {error}"
            ) from error
        self.reads_tools = "tools" in variables
        """Whether the template has a way to tell the model of tools."""

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
