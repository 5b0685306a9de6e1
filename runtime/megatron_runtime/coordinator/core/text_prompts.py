"""Prompts that arrive as text: an engine tokenizes them, or the coordinator if it needs the tokens."""

from __future__ import annotations

import logging
from typing import Protocol

from megatron_runtime.process.logs import of_request
from megatron_runtime.protocol.messages import MalformedMessageError, RequestMeta, tokens_to_bytes

logger = logging.getLogger(__name__)

MAX_TEXT_CHARACTERS = 512 * 1024
"""Limit of a prompt that is sent as text: other requests wait while it is tokenized, here or at an engine."""


class Tokenizer(Protocol):
    """Tokenizes text prompts. With `detokenize(tokens)` too, plain clients get the text of their answers."""

    def tokenize(self, text: str) -> list[int]: ...


class TextPrompts:
    """Accepts and tokenizes texts.

    tokenizer: None: every text goes to an engine.
    needs_tokens: the choice of the engine needs them.
    """

    def __init__(self, tokenizer: Tokenizer | None, *, needs_tokens: bool) -> None:
        self.tokenizer = tokenizer
        self._needs_tokens = needs_tokens

    def accept(self, meta: RequestMeta, prompt: bytes) -> tuple[RequestMeta, bytes]:
        """Return the prompt of a request as text or as tokens. Raises MalformedMessageError."""
        characters = len(prompt.decode("utf-8", "replace"))
        if characters > MAX_TEXT_CHARACTERS:
            raise MalformedMessageError(
                f"the prompt is a text of {characters} characters: at most {MAX_TEXT_CHARACTERS} are accepted, so send "
                "token ids"
            )
        if self.tokenizer is None or not self._needs_tokens:
            return meta, prompt
        return meta._replace(text=False), self.tokenize(meta, prompt)

    def tokenize(self, meta: RequestMeta, prompt: bytes) -> bytes:
        """Return the tokens of a text, little-endian int32. Raises MalformedMessageError."""
        if self.tokenizer is None:
            raise MalformedMessageError("this coordinator has no tokenizer: send token ids")
        text = prompt.decode("utf-8", "replace")
        try:
            return tokens_to_bytes(list(map(int, self.tokenizer.tokenize(text))))
        except BaseException as error:  # a panic of the tokenizers library is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            extra = of_request(meta.request_id)
            logger.warning("a prompt of %d characters cannot be tokenized: %r", len(text), error, extra=extra)
            raise MalformedMessageError(f"the prompt cannot be tokenized: {error}; send token ids") from error
