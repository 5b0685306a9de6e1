"""Tokenization of prompts and rendering of conversations, off the event loop and with bounded queues.

The work runs in three thread pools ("lanes"), first in, first out: rendering of conversations, tokenization of texts up
to MAX_MEDIUM_BYTES, and tokenization of longer texts. So a text of a few kilobytes never waits for megabytes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

from megatron_runtime.server.errors import ApiError, context_length_error, invalid_value, try_again
from megatron_runtime.server.openai.jobs import check_vocabulary
from megatron_runtime.server.openai.schema import ChatMessage, Tool
from megatron_runtime.server.tool_prompts import without_tool_roles
from megatron_runtime.tokenization import ChatTemplateError, ChatTemplateUnusableError, Tokenizer
from megatron_runtime.tokenization.chat_template import RENDERERS

TEXT_TOKENIZED_IN_PLACE = 4096
"""Characters. Longer texts are tokenized in a thread of `TextWork`, while the event loop serves other requests."""
MAX_MEDIUM_BYTES = 64 * 1024
"""A text of this length is tokenized in about 50 ms."""
MAX_HELD_BYTES = 64 * 1024 * 1024
"""Text of a server process that is tokenized or rendered now, or waits for it; beyond that 503."""
MAX_WAIT_SECONDS = 30.0
"""A request that has not been tokenized after this time is answered with 503."""
_DECODED_AT_ONCE = 256
"""Tokens that are decoded before other requests run."""

_T = TypeVar("_T")


Lane: TypeAlias = Literal["render", "medium", "long"]
_THREADS: Mapping[Lane, int] = {"render": RENDERERS, "medium": 3, "long": 1}


class TextWork:
    """The lanes of one server process. Used on the event loop."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.held_bytes = 0
        self._threads = {lane: ThreadPoolExecutor(threads, f"text-{lane}") for lane, threads in _THREADS.items()}

    async def run(self, lane: Lane, size: int, work: Callable[[], _T]) -> _T:
        """Return the result of `work`, called in a thread of `lane`. A cancelled caller removes work that waits.

        size: bytes of text that it holds.
        Raises ApiError 503 if too much text is held already or the wait was too long, and what `work` raises.
        """
        with self._lock:
            if self.held_bytes and self.held_bytes + size > MAX_HELD_BYTES:
                message = f"This server has {MAX_HELD_BYTES} bytes of text to tokenize already: try again."
                raise try_again(503, message, code="too_much_text")
            self.held_bytes += size
        future = self._threads[lane].submit(work)
        future.add_done_callback(lambda _: self._release(size))
        try:
            async with asyncio.timeout(MAX_WAIT_SECONDS):
                return await asyncio.wrap_future(future)
        except TimeoutError as error:
            message = f"The text was not tokenized within {MAX_WAIT_SECONDS:g} s: try again, or shorten it."
            raise try_again(503, message, code="too_much_text") from error

    def close(self) -> None:
        for threads in self._threads.values():
            threads.shutdown(wait=False, cancel_futures=True)

    def _release(self, size: int) -> None:
        with self._lock:
            self.held_bytes -= size


class Prompts:
    """Turns the texts and conversations of requests into tokens, and tokens into text.

    max_sequence_length: most tokens of prompt and answer together; None means what the model was made for.
    """

    def __init__(self, tokenizer: Tokenizer, *, max_sequence_length: int | None) -> None:
        self.tokenizer = tokenizer
        limits = [limit for limit in (max_sequence_length, tokenizer.context_length) if limit is not None]
        self.sequence_limit = min(limits, default=None)
        self._work = TextWork()

    async def encode(
        self, text: str, *, param: str, add_special: bool = True, in_place: bool | None = None
    ) -> list[int]:
        """Return the tokens of a text.

        param:    the request field that has it, for errors.
        in_place: tokenize on the event loop; None means if the text is short.
        Raises ApiError 400 for a text that cannot be tokenized or whose least number of tokens exceeds the sequence
        limit, and 503 if too much text waits to be tokenized.
        """
        encode = partial(self._encode, text, param=param, add_special=add_special)
        if len(text) <= TEXT_TOKENIZED_IN_PLACE if in_place is None else in_place:
            return encode()
        size = _bytes_at_most(text)
        return await self._work.run("medium" if size <= MAX_MEDIUM_BYTES else "long", size, encode)

    async def encode_chat(
        self, messages: Sequence[ChatMessage], *, tools: Sequence[Tool] = (), variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Return the tokens of a conversation, with the tools described in it.

        Raises ApiError 400, and what encode() raises; 500 for a chat template that renders no conversation.
        """
        rendered = [message.for_template() for message in messages]
        described = [tool.model_dump(exclude_none=True) for tool in tools] or None
        template = self.tokenizer.chat_template
        if template is not None and "tools" not in template.variables:
            rendered, described = without_tool_roles(rendered, described), None
        render = partial(self.tokenizer.render_chat, rendered, tools=described, variables=variables)
        size = sum(
            _bytes_at_most(text) for message in messages for text in (message.content, message.reasoning_content or "")
        )
        try:
            text = await self._work.run("render", size, render)
        except ChatTemplateUnusableError as error:
            raise ApiError(500, f"{error}.", code="chat_template_unusable") from error
        except ChatTemplateError as error:
            raise ApiError(400, f"{error}.", param=error.variable or "messages", code="invalid_value") from error
        return await self.encode(text, param="messages", add_special=False)

    async def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """Return the text of tokens. Other requests run in between, however many tokens there are."""
        detokenizer = self.tokenizer.detokenizer(skip_special=skip_special)
        parts = []
        for start in range(0, len(tokens), _DECODED_AT_ONCE):
            parts.append(detokenizer.feed(tokens[start : start + _DECODED_AT_ONCE]))
            await asyncio.sleep(0)
        return "".join([*parts, detokenizer.finish()])

    def checked(self, tokens: list[int], *, param: str, add_bos: bool | None = False) -> list[int]:
        """Return the tokens of a prompt. Raises ApiError 400 if there are none or one is outside the vocabulary.

        add_bos: begin with the model's begin-of-sequence token, if it has one.
        """
        first = self.tokenizer.bos_id
        if add_bos and first is not None and tokens[:1] != [first]:
            tokens = [first, *tokens]
        if not tokens:
            raise invalid_value(param, "it has no tokens")
        check_vocabulary(tokens, self.tokenizer, param=param)
        return tokens

    def close(self) -> None:
        self._work.close()

    def _encode(self, text: str, *, param: str, add_special: bool) -> list[int]:
        limit = self.sequence_limit
        if limit is not None and len(text) > TEXT_TOKENIZED_IN_PLACE:
            fewest = self.tokenizer.bound.fewest_tokens(text)
            if fewest > limit:
                raise context_length_error(prompt_length=fewest, limit=limit, param=param, is_bound=True)
        try:
            return self.tokenizer.encode(text, add_special=add_special)
        except ValueError as error:
            raise invalid_value(param, str(error)) from error


def _bytes_at_most(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)
