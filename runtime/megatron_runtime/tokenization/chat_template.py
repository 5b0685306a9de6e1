"""Renders chat templates in the same way as transformers, in child processes with limits (chat_sandbox.py).

A template is part of the model and can be hostile. So each use of a template, including its compilation, has limits of
time, memory and output. A program has at most RENDERERS such child processes for all its templates. Each process starts
when it is first needed.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import queue
import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Self

from megatron_runtime.process.sacrificial_process import ProcessLostError, ProcessStartError, SacrificialProcess
from megatron_runtime.protocol import strict_json as json

logger = logging.getLogger(__name__)

RENDERERS = 2
"""Maximum number of child processes. Further renderings wait for a free process."""
RENDER_SECONDS = 5.0
"""Timeout of one compilation or rendering, in seconds."""
RENDER_MEMORY_BYTES = 512 << 20
"""Address space of each child process for templates and their output, in bytes."""
MAX_TEMPLATE_CHARACTERS = 1 << 20
DEFAULT_TEMPLATE, TOOL_TEMPLATE = "default", "tool_use"
"""Names of the templates in a model's list. The second template is for requests with tools."""

_MAX_REPLY_BYTES = 64 << 20
_BROKEN_SECONDS = 30.0
"""Seconds for which a template is not tried again after a failure to render even a trivial conversation."""
_TRIVIAL = ({"role": "user", "content": "Hello"},)
_PROBE = "probe 4821"
"""A text that no template writes itself."""
_RESERVED = frozenset({"messages", "tools"})


class ChatTemplateError(ValueError):
    """Raised if a conversation cannot be rendered. The message comes from the template, or names the exceeded limit.

    variable: name of the invalid template variable, if the request has set this variable.
    """

    def __init__(self, message: str, *, variable: str | None = None) -> None:
        super().__init__(message)
        self.variable = variable


class ChatTemplateRejectedError(ChatTemplateError):
    """Raised if the template rejects the messages or fails on them. It may accept them in another format."""


class ChatTemplateUnusableError(ChatTemplateError):
    """Raised if the model's chat template is invalid, or no process could run it. No conversation can be rendered."""


class ChatTemplate:
    """The chat template of a model. Thread-safe.

    If the template does not compile, the constructor logs the error. The model can still complete text, but every call
    of render() raises the error.

    source:  the Jinja text.
    special: variables that every template may use, such as `bos_token` and `eos_token`.

    Raises ChatTemplateUnusableError if no process can be started to compile the template.
    """

    def __init__(self, source: str, *, special: Mapping[str, str]) -> None:
        self.source = source
        self.special = dict(special)
        self.variables: frozenset[str] = frozenset()
        """Variables that the template reads, apart from the messages."""
        self._broken_until = 0.0
        self._broken_reason = ""
        try:
            self.variables = frozenset(self._variables())
        except ChatTemplateUnusableError as error:
            if isinstance(error.__cause__, ProcessStartError):
                raise
            logger.error("%s; chat requests are answered with this error", error)
            self._broken_until, self._broken_reason = math.inf, str(error)

    @classmethod
    def of(cls, sources: Mapping[str, Any], name: str, *, special: Mapping[str, str]) -> Self | None:
        """Return the template with this name from a model's templates, or None if there is no such template."""
        source = sources.get(name)
        return cls(source, special=special) if source and isinstance(source, str) else None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Return the prompt text, up to the position where the assistant's answer begins.

        All arguments must be values that JSON can express.

        variables: further template variables. The default of `add_generation_prompt` is True.

        Raises:
            ChatTemplateUnusableError: the template does not compile, or cannot render even a trivial conversation
                within the limits.
            ChatTemplateRejectedError: the template rejects the messages, or fails on them.
            ChatTemplateError: the template exceeds a limit with these messages.
        """
        if time.monotonic() < self._broken_until:
            raise ChatTemplateUnusableError(self._broken_reason)
        given = dict(variables or {})
        for name in sorted(_RESERVED & given.keys()):
            raise ChatTemplateError(
                f"chat template variable {name!r} is set by the request itself: remove it",
                variable=f"chat_template_kwargs.{name}",
            )
        written = list(map(_in_parts, messages)) if self.needs_parts else list(messages)
        try:
            return self._rendered({"messages": written, "tools": tools, **given})
        except ProcessLostError as error:
            self._check_usable()
            hint = " or leave chat_template_kwargs out" if given else ""
            raise ChatTemplateError(
                f"the chat template cannot render these messages: {_lost(error)}; shorten them{hint}"
            ) from error

    @cached_property
    def needs_parts(self) -> bool:
        """Whether the template drops the text of a message unless the content is a list of parts.

        Some templates of multimodal models do. The value comes from renderings of a short message.
        """
        message = {"role": "user", "content": _PROBE}
        for written in (message, _in_parts(message)):
            with contextlib.suppress(ChatTemplateRejectedError, ProcessLostError):
                if _PROBE in self._rendered({"messages": [written], "tools": None}):
                    return written is not message
        return False

    def _rendered(self, scope: Mapping[str, Any]) -> str:
        base = {"add_generation_prompt": True, "documents": None, **self.special}
        text: str = _run({"source": self.source, "scope": {**base, **scope}})["text"]
        return text

    def _check_usable(self) -> None:
        """Raise ChatTemplateUnusableError if the template cannot render even a trivial conversation within the
        limits.
        """
        try:
            self._rendered({"messages": _TRIVIAL, "tools": None})
        except ProcessLostError as error:
            self._broken_reason = f"the model's chat template cannot render any conversation: {_lost(error)}"
            self._broken_until = time.monotonic() + _BROKEN_SECONDS
            logger.error("%s", self._broken_reason)
            raise ChatTemplateUnusableError(self._broken_reason) from error
        except ChatTemplateUnusableError:
            raise
        except ChatTemplateError:
            return  # a rejection is fine: the rendering ended within the limits

    def _variables(self) -> list[str]:
        if len(self.source) > MAX_TEMPLATE_CHARACTERS:
            raise ChatTemplateUnusableError(
                f"the model's chat template has {len(self.source)} characters: at most {MAX_TEMPLATE_CHARACTERS} "
                "are allowed"
            )
        try:
            variables: list[str] = _run({"source": self.source})["variables"]
        except ProcessLostError as error:
            raise ChatTemplateUnusableError(f"the model's chat template cannot be compiled: {_lost(error)}") from error
        return variables


def _in_parts(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the message with its text as a list of one part."""
    text = message.get("content")
    return {**message, "content": [{"type": "text", "text": text}]} if isinstance(text, str) else message


def _run(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the reply of chat_sandbox.py to `request`.

    Raises ProcessLostError if the process died or exceeded a limit. Raises ChatTemplateError or a subclass of it for
    other failures.
    """
    try:
        data = json.dumps(request, ensure_ascii=False).encode("utf-8", "surrogatepass")
    except (TypeError, ValueError, RecursionError) as error:
        raise ChatTemplateError(f"the messages cannot be written as JSON: {error}") from error
    try:
        reply: dict[str, Any] = json.loads(_renderers.call(data).decode("utf-8", "surrogatepass"))
    except ProcessStartError as error:
        raise ChatTemplateUnusableError(f"no process can run the model's chat template: {error}") from error
    if reply.get("stage") == "compile":
        raise ChatTemplateUnusableError(f"the model's chat template is not valid Jinja, {reply['message']}")
    if "stage" in reply:
        raise ChatTemplateRejectedError(reply["message"])
    return reply


def _lost(error: ProcessLostError) -> str:
    limits = f"{RENDER_SECONDS:g} s and {RENDER_MEMORY_BYTES >> 20} MiB"
    return f"its process is limited to {limits}, and {error}"


class _Renderers:
    """The pool of child processes that render chat templates.

    Each process serves one caller at a time. If all processes are busy, another process is started, up to RENDERERS.
    """

    def __init__(self) -> None:
        self.processes: list[SacrificialProcess] = []
        self._idle: queue.LifoQueue[SacrificialProcess] = queue.LifoQueue()
        for _ in range(RENDERERS):
            self._add()

    def _add(self) -> None:
        process = SacrificialProcess(
            "megatron_runtime.tokenization.chat_sandbox",
            memory_bytes=RENDER_MEMORY_BYTES,
            max_reply_bytes=_MAX_REPLY_BYTES,
        )
        self.processes.append(process)
        self._idle.put(process)

    def call(self, request: bytes) -> bytes:
        process = self._idle.get()
        try:
            return process.call(request, timeout_seconds=RENDER_SECONDS)
        finally:
            self._idle.put(process)

    def end_idle(self) -> None:
        ended = []
        with contextlib.suppress(queue.Empty):
            while True:
                ended.append(self._idle.get_nowait())
        for process in ended:
            process.close()
            self.processes.remove(process)
            self._add()

    def close(self) -> None:
        for process in self.processes:
            process.close()


_renderers = _Renderers()


def _start_over() -> None:
    """Discard the connections after a fork, because parent and child must not share connections."""
    global _renderers
    _renderers = _Renderers()


def end_idle_renderers() -> None:
    """Stop the idle child processes. Call this when the program stops serving.

    A later rendering restarts the processes.
    """
    _renderers.end_idle()


os.register_at_fork(after_in_child=_start_over)
atexit.register(lambda: _renderers.close())
