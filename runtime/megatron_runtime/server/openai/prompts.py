"""Tokenizes prompts and renders conversations in threads, with fair shares for tenants.

The work is divided into four lanes: parsing of large request bodies, rendering of conversations, tokenization of texts
up to MAX_MEDIUM_BYTES, and tokenization of longer texts. A text of a few kilobytes therefore never waits for a text of
megabytes. `BodyBudget` limits the size of the requests that wait for a lane.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeAlias, TypeVar

from megatron_runtime.process.fair_lanes import BudgetExceededError, FairLanes
from megatron_runtime.protocol.media import Media
from megatron_runtime.server.errors import ApiError, context_length_error, invalid_value, try_again
from megatron_runtime.server.formats.chat_format import ChatFormat, RenderedChat
from megatron_runtime.server.formats.conversation import ChatTemplateInput
from megatron_runtime.server.openai.bodies import TOKEN_BYTES, Lease
from megatron_runtime.server.openai.content import MediaPart, MixedContent, check_supported
from megatron_runtime.server.openai.jobs import check_vocabulary
from megatron_runtime.server.openai.media import MediaLoader
from megatron_runtime.server.openai.schema import ChatMessage, GenerationRequest, Tool
from megatron_runtime.tokenization import (
    ChatTemplateError,
    ChatTemplateRejectedError,
    ChatTemplateUnusableError,
    Tokenizer,
)
from megatron_runtime.tokenization.chat_template import RENDERERS

TEXT_TOKENIZED_IN_PLACE = 4096
"""Maximum number of characters of a text that is tokenized on the event loop.

Threads of `TextLanes` tokenize longer texts.
"""
MAX_MEDIUM_BYTES = 64 * 1024
"""Maximum number of bytes of a text in the lane for medium texts. Tokenizing such a text takes about 50 ms."""
MAX_WAIT_SECONDS = 30.0
"""Maximum number of seconds that a request waits for a lane. The server then answers with 503."""
TEXT_SECONDS_PER_MINUTE = 60.0
"""Maximum number of seconds per minute of parsing, rendering and tokenization for each tenant in one server process.

Short texts do not count.
"""
_DECODED_AT_ONCE = 256
"""Number of tokens that are decoded on the event loop before other requests run."""

_T = TypeVar("_T")


Lane: TypeAlias = Literal["parse", "render", "medium", "long"]
_THREADS: Mapping[str, int] = {"parse": 1, "render": RENDERERS, "medium": 3, "long": 1}


class TextLanes:
    """The lanes of one server process: thread pools that parse large bodies, render conversations and tokenize texts.

    Call all methods on the event loop.
    """

    def __init__(self) -> None:
        self._lanes = FairLanes(
            _THREADS, what="Parsing, rendering and tokenization", seconds_per_minute=TEXT_SECONDS_PER_MINUTE
        )

    async def run(self, lane: Lane, lease: Lease, work: Callable[[], _T]) -> _T:
        """Call `work` in a thread of `lane`, and return its result.

        If the caller is cancelled while `work` is waiting, `work` is removed from the lane.

        lease: lease of the request. Each tenant has a fair share of the lane, and a time limit. Requests without a
               tenant have no time limit.

        Raises ApiError 429 if the tenant has used up its time, ApiError 503 if `work` has waited too long, and the
        errors of `work`.
        """
        try:
            async with asyncio.timeout(MAX_WAIT_SECONDS):
                return await self._lanes.run(lane, lease.tenant, work, is_metered=bool(lease.tenant))
        except BudgetExceededError as error:
            seconds = error.retry_after_seconds
            raise ApiError(429, f"{error}.", code="rate_limit_exceeded", retry_after_seconds=seconds) from error
        except TimeoutError as error:
            message = f"The text was not tokenized within {MAX_WAIT_SECONDS:g} s: try again, or shorten it."
            raise try_again(503, message, code="too_much_text") from error

    def close(self) -> None:
        self._lanes.close()


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """The tokenized prompt for a conversation. media: images, audio and video of the conversation."""

    tokens: list[int]
    media: Media | None = None


class Prompts:
    """Converts the texts and conversations of requests to tokens, and tokens to text.

    chat_format: renders conversations, and encodes the rendered text.
    max_sequence_length: maximum number of tokens of prompt plus answer; None means the limit of the model.
    media_hosts: as `allowed_hosts` of MediaLoader.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        chat_format: ChatFormat,
        *,
        max_sequence_length: int | None,
        media_hosts: Sequence[str] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self._chat_format = chat_format
        self._media = MediaLoader(media_hosts)
        limits = [limit for limit in (max_sequence_length, tokenizer.context_length) if limit is not None]
        self.sequence_limit = min(limits, default=None)
        self.lanes = TextLanes()

    async def encode(
        self,
        text: str,
        *,
        lease: Lease,
        param: str,
        add_special: bool = True,
        in_place: bool | None = None,
        is_cut: bool = False,
    ) -> list[int]:
        """Return the tokens of a text.

        lease:    lease of the request, to which the bytes of the tokens are added.
        param:    the request field that contains the text, for errors.
        in_place: whether to tokenize on the event loop; None: only if the text is short.
        is_cut:   whether the caller truncates the prompt later, so that the text can exceed the sequence limit.

        Raises ApiError 400 if the text cannot be tokenized or is certain to exceed the sequence limit. Raises ApiError
        429 if the server would hold too many bytes of requests, and the errors of TextLanes.run().
        """
        encode = partial(self._encode, text, param=param, add_special=add_special, is_cut=is_cut)
        if len(text) <= TEXT_TOKENIZED_IN_PLACE if in_place is None else in_place:
            tokens = encode()
        else:
            lane: Lane = "medium" if _bytes_at_most(text) <= MAX_MEDIUM_BYTES else "long"
            tokens = await self.lanes.run(lane, lease, encode)
        lease.add(TOKEN_BYTES * len(tokens))
        return tokens

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        lease: Lease,
        tools: Sequence[Tool] = (),
        variables: Mapping[str, Any] | None = None,
        continues: bool = False,
        add_special: bool = False,
        is_cut: bool = False,
    ) -> ChatPrompt:
        """Return the prompt for a conversation, with a description of the tools.

        continues:           the prompt ends within the last message, which the answer continues.
        add_special, is_cut: as for encode().

        Raises ApiError 400, the errors of encode() and MediaLoader.load(), and ApiError 500 if the chat template cannot
        render any conversation.
        """
        takes = self._chat_format.takes
        parts = _media_parts(messages, takes)
        for param, part in parts:
            check_supported(part, takes, param=param)
        if parts and is_cut:
            problem = "it cannot be combined with images, audio or video: leave one of them out"
            raise invalid_value("truncate_prompt_tokens", problem)
        conversation = ChatTemplateInput(
            _for_template(messages, takes),
            tools=[tool.model_dump(exclude_none=True, exclude={"function": {"strict"}}) for tool in tools],
            variables=variables or {},
            continues=continues,
            media=await self._media.load(parts, lease=lease) if parts else (),
        )
        try:
            rendered = await self._rendered(conversation, messages, lease=lease)
        except ChatTemplateUnusableError as error:
            raise ApiError(500, f"{error}.", code="chat_template_unusable") from error
        except ChatTemplateError as error:
            raise ApiError(400, f"{error}.", param=error.variable or "messages", code="invalid_value") from error
        if rendered.tokens is not None:
            lease.add(TOKEN_BYTES * len(rendered.tokens))
            return ChatPrompt(rendered.tokens, rendered.media)
        size = _bytes_at_most(rendered.text)
        lease.add(size)
        tokens = await self.encode(rendered.text, lease=lease, param="messages", add_special=add_special, is_cut=is_cut)
        lease.add(-size)
        return ChatPrompt(tokens)

    async def _rendered(
        self, conversation: ChatTemplateInput, messages: Sequence[ChatMessage], *, lease: Lease
    ) -> RenderedChat:
        """Return the rendered conversation. Raises ChatTemplateError.

        If the template rejects media in tool results, placeholders replace these media.
        """
        try:
            return await self.lanes.run("render", lease, partial(self._chat_format.render, conversation))
        except ChatTemplateRejectedError:
            if not conversation.media or _media_parts(messages, ()):
                raise
            text = replace(conversation, messages=_for_template(messages, ()), media=())
            return await self.lanes.run("render", lease, partial(self._chat_format.render, text))

    async def decode(
        self, tokens: Sequence[int], *, lease: Lease, skip_special: bool = True, is_whole: bool = True
    ) -> str:
        """Return the text of tokens. A long list is decoded in parts, and other requests can run between the parts.

        lease:    count of the bytes that the request holds, to which this method adds the bytes of the text.
        is_whole: whether the tokens are the whole text. If so, an incomplete character at the end is returned as
                  U+FFFD.

        Raises ApiError 429 if the server would hold too many bytes.
        """
        detokenizer = self._chat_format.decoder(skip_special=skip_special)
        parts = []
        for start in range(0, len(tokens), _DECODED_AT_ONCE):
            parts.append(detokenizer.feed(tokens[start : start + _DECODED_AT_ONCE]))
            lease.add(_bytes_at_most(parts[-1]))
            await asyncio.sleep(0)
        return "".join([*parts, detokenizer.finish() if is_whole else ""])

    def truncated(self, tokens: list[int], request: GenerationRequest) -> list[int]:
        """Return the tokens of a prompt, truncated if the request sets `truncate_prompt_tokens`."""
        kept = request.truncate_prompt_tokens
        if kept is None:
            return tokens
        if kept == -1:
            limit = len(tokens) if self.sequence_limit is None else self.sequence_limit
            kept = max(limit - max(request.answer_limit or 1, 1), 1)
        return tokens[:kept] if request.truncation_side == "right" else tokens[max(len(tokens) - kept, 0) :]

    def checked(self, tokens: list[int], *, param: str, add_bos: bool | None = False) -> list[int]:
        """Validate the tokens of a prompt and return them.

        Raises ApiError 400 if there are no tokens or a token is outside the vocabulary.

        add_bos: whether to prepend the model's begin-of-sequence token, if the model has one.
        """
        first = self.tokenizer.bos_id
        if add_bos and first is not None and tokens[:1] != [first]:
            tokens = [first, *tokens]
        if not tokens:
            raise invalid_value(param, "it has no tokens")
        check_vocabulary(tokens, self.tokenizer, param=param)
        return tokens

    def close(self) -> None:
        self.lanes.close()

    def _encode(self, text: str, *, param: str, add_special: bool, is_cut: bool) -> list[int]:
        limit = self.sequence_limit
        if not is_cut and limit is not None and len(text) > TEXT_TOKENIZED_IN_PLACE:
            minimum = self.tokenizer.bound.min_tokens(text)
            if minimum > limit:
                raise context_length_error(prompt_length=minimum, limit=limit, param=param, is_bound=True)
        try:
            return self._chat_format.encode(text, add_special=add_special)
        except ValueError as error:
            raise invalid_value(param, str(error)) from error


def _media_parts(messages: Sequence[ChatMessage], takes: Collection[str]) -> list[tuple[str, MediaPart]]:
    """Return the images, audio and video of a conversation, each with the name of its request field.

    takes: modalities that the model accepts.
    """
    return [
        (f"messages[{number}].content", part)
        for number, message in enumerate(messages)
        if isinstance(message.content, MixedContent)
        for part in message.content.media(takes)
    ]


def _for_template(messages: Sequence[ChatMessage], takes: Collection[str]) -> list[dict[str, Any]]:
    numbers = itertools.count()
    return [message.for_template(takes, numbers) for message in messages]


def _bytes_at_most(text: str) -> int:
    return len(text) if text.isascii() else 4 * len(text)
