"""The interfaces through which the core checks keys and tokenizes texts."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Protocol, TypeAlias

from megatron_runtime.process.logs import of_request
from megatron_runtime.protocol.messages import (
    KeyReport,
    MalformedMessageError,
    PackedTokens,
    RequestMeta,
    tokens_to_bytes,
    unpack_tokens,
)

logger = logging.getLogger(__name__)

PeerId: TypeAlias = tuple[int, bytes]
"""Identifies one connection by port number and routing id."""
MAX_TEXT_CHARACTERS = 512 * 1024
"""Maximum length of a prompt that is sent as text. It is limited because other requests wait while a prompt is
tokenized.
"""


class Access:
    """The interface that checks the keys of connections.

    This base class is for operation without encryption. Transport overrides its methods.
    """

    def key_of(self, peer: PeerId) -> bytes:
        """Return the public key of a connection."""
        return b""

    def admits(self, peer: PeerId, key: bytes) -> bool:
        """Return whether the key of a connection is still accepted, so that the connection can stay open."""
        return True

    def is_trainer(self, key: bytes) -> bool:
        """Return whether this key belongs to a trainer. A trainer may send only some messages to the admin port."""
        return False

    def report(self, connected: Iterable[bytes]) -> KeyReport | None:
        """Return the report on keys for STATUS, which includes the keys of the `connected` peers.

        Returns None without encryption.
        """
        return None

    def rejected(self) -> int:
        """Return the number of connections that were rejected because of their keys."""
        return 0


class PromptTokenizer(Protocol):
    """A tokenizer of text prompts.

    If it also has `detokenize(tokens)`, answers to Megatron-Core's clients contain text.
    """

    def tokenize(self, text: str) -> list[int]: ...


class PromptReader:
    """The reader of prompts.

    It checks prompts, and converts text prompts and prompts of Megatron-Core's clients to tokens if needed.

    tokenizer:    tokenizes text prompts; None if engines tokenize them.
    needs_tokens: whether the routing policy needs the tokens of prompts.
    """

    def __init__(self, tokenizer: PromptTokenizer | None, *, needs_tokens: bool) -> None:
        self.tokenizer = tokenizer
        self.needs_tokens = needs_tokens

    def accept(self, meta: RequestMeta, prompt: bytes) -> tuple[RequestMeta, bytes]:
        """Return the metadata and the prompt of a request in the form in which the coordinator stores them.

        Raises MalformedMessageError if the prompt is invalid.
        """
        if not meta.text:
            return meta, self.tokens_of(meta, prompt)
        characters = len(prompt.decode("utf-8", "replace"))
        if characters > MAX_TEXT_CHARACTERS:
            raise MalformedMessageError(
                f"the prompt is a text of {characters} characters: at most {MAX_TEXT_CHARACTERS} are accepted, so send "
                "token ids"
            )
        if self.tokenizer is None or not self.needs_tokens:
            return meta, prompt
        return meta._replace(text=False), self.tokens_of(meta, prompt)

    def tokens_of(self, meta: RequestMeta, prompt: bytes) -> bytes:
        """Return the tokens of a prompt, little-endian int32. Raises MalformedMessageError if the prompt is invalid."""
        if not meta.text:
            return unpack_tokens(prompt) if isinstance(prompt, PackedTokens) else prompt
        if self.tokenizer is None:
            raise MalformedMessageError("this coordinator has no tokenizer: send token ids")
        text = prompt.decode("utf-8", "replace")
        try:
            return tokens_to_bytes(list(map(int, self.tokenizer.tokenize(text))))
        except BaseException as error:  # a panic of the tokenizers library is not an Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            extra = of_request(meta.request_id)
            logger.warning("a prompt of %d characters cannot be tokenized: %r", len(text), error, extra=extra)
            raise MalformedMessageError(f"the prompt cannot be tokenized: {error}; send token ids") from error
