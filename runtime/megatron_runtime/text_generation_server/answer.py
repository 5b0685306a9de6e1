"""From an engine's tokens to the text of one choice, whole or in pieces; both give the same text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from megatron_runtime.tokenization import Tokenizer


class AnswerText:
    """Text of one choice as its tokens arrive.

    end_ids: tokens that may end the answer. One is held until the next token shows that the answer went on (below
             min_tokens it may), because the token that ends an answer is no part of its text.
    """

    def __init__(self, tokenizer: Tokenizer, *, end_ids: Iterable[int]) -> None:
        self._detokenizer = tokenizer.detokenizer()
        self._end_ids = frozenset(end_ids)
        self._held: list[int] = []
        self._tokens = 0  # tokens seen, held ones included
        self._characters = 0  # characters given out

    def feed(self, tokens: Iterable[int]) -> str:
        """Return the text that these further tokens complete."""
        ready: list[int] = []
        for token in tokens:
            self._tokens += 1
            ready += self._held
            self._held = []
            if token in self._end_ids:
                self._held = [token]
            else:
                ready.append(token)
        return self._give(self._detokenizer.feed(ready))

    def finish(self, reply: Mapping[str, Any]) -> str:
        """Return the rest of the text, from the authoritative reply.

        A reply with `generated_text` matched a stop string: the engine held back what might belong to it, so the text
        given out so far is its beginning.
        """
        whole = reply.get("generated_text")
        if whole is not None:
            return self._give(whole[self._characters :])
        rest = self.feed(reply["generated_tokens"][self._tokens :])
        held = [] if reply.get("finish_reason") == "stop" else self._held
        self._held = []
        return rest + self._give(self._detokenizer.feed(held) + self._detokenizer.finish())

    def _give(self, text: str) -> str:
        self._characters += len(text)
        return text
