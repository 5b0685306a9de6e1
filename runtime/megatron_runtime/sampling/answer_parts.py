"""Determines the parts of an answer (reasoning, then text or tool calls), and the token at which a grammar begins.

The tokens before a token determine the token's part, so a request that moves to another engine continues in the same
part. This module does not import torch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import Any, Self

from megatron_runtime.protocol import strict_json as json
from megatron_runtime.requests.sampling_params import SamplingParams

_SPACE = b" \t\n\r"


class AnswerPart(Enum):
    """The part of an answer to which the next token belongs."""

    REASONING = auto()
    BEGIN = auto()
    """The start of the answer after the reasoning, until it is known whether the answer is a tool call."""
    TEXT = auto()
    """Free text, up to the end of the answer."""
    STRUCTURE = auto()
    """Text that a grammar describes, up to the end of the answer."""


class AnswerParts:
    """A state machine that determines the part to which each token of an answer belongs.

    part:   part to which the next token belongs.
    tokens: number of tokens so far.
    free:   number of tokens before the structured output. Valid only after the structured output has begun.
    """

    def __init__(self, params: SamplingParams, *, token_bytes: Callable[[int], bytes]) -> None:
        structure, calls, reasoning = _parts_of(params)
        after = () if structure is None else structure.get("after", ())
        self.tokens = self.free = 0
        self._structure, self._calls = structure, calls
        self._token_bytes = token_bytes
        self._opening = list(reasoning.get("opening", ()))
        self._closing = list(after or reasoning.get("closing", ()))
        self._ending = list(reasoning.get("ending", self._closing))
        self._budget: int | None = reasoning.get("budget")
        self._last: deque[int] = deque(maxlen=max(len(self._closing), len(self._ending)))
        self._reasoned = 0
        """Number of reasoning tokens so far."""
        self._markers = {} if calls is None else {text.encode(): rule for text, rule in calls["markers"].items()}
        self._rule = ""
        """The grammar rule for the rest of an answer, which depends on the marker with which the answer begins."""
        self._begun: list[int] = []
        """The first tokens of the answer, as long as they can still be the opening of the reasoning."""
        self._text = b""
        """The first bytes of the answer, as long as they can still be the start of a marker."""
        self._remaining = b""
        """The part of the marker with which the structure begins."""
        self.part = (
            AnswerPart.REASONING if self._closing and (after or reasoning["is_open"]) else self._after_reasoning()
        )

    @classmethod
    def of(cls, params: SamplingParams, *, token_bytes: Callable[[int], bytes]) -> Self | None:
        """Return the AnswerParts for an answer with these parameters. Return None if the answer has only one part.

        token_bytes: returns the bytes of a token.
        """
        if params.reasoning is None and params.call_structure is None and params.structured_output is None:
            return None
        parts = cls(params, token_bytes=token_bytes)
        return None if parts.part in (AnswerPart.TEXT, AnswerPart.STRUCTURE) else parts

    @property
    def is_best_effort(self) -> bool:
        """Whether the structured output describes tool calls. If so, an engine may ignore the description."""
        return self._structure is None

    @property
    def structure(self) -> dict[str, Any] | None:
        """The description of the structured output. All tokens from index `free` on must match the description.

        The value is None until the structured output has begun.
        """
        if self.part is not AnswerPart.STRUCTURE:
            return None
        if self._structure is not None:
            return {name: value for name, value in self._structure.items() if name != "after"}
        assert self._calls is not None
        rest = ""
        if self._remaining:
            space = "" if self._text else r"/[ \t\r\n]{0,20}/ "
            rest = f"{space}{json.dumps(self._remaining.decode(errors='replace'), ensure_ascii=False)} "
        return {"type": "grammar", "value": f"start: {rest}{self._rule}\n{self._calls['grammar']}"}

    @property
    def forced(self) -> int | None:
        """The token that must come next because the reasoning budget is used up; None if any token is allowed."""
        if self.part is not AnswerPart.REASONING or self._budget is None or self._reasoned < self._budget:
            return None
        last, ending = list(self._last), self._ending
        sizes = range(len(ending) - 1, -1, -1)
        return ending[next(size for size in sizes if last[len(last) - size :] == ending[:size])]

    def feed(self, token: int) -> None:
        """Process the next token of the answer, and set `part` for the token after it."""
        self.tokens += 1
        if self.part is AnswerPart.REASONING:
            self._reasoned += 1
            self._last.append(token)
            if list(self._last)[-len(self._closing) :] == self._closing:
                self._opening = []
                self.part = self._after_reasoning()
                self.free = self.tokens
        elif self.part is AnswerPart.BEGIN:
            self._feed_begin(token)

    def feed_all(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.feed(int(token))

    def give_up(self) -> None:
        """Allow any token from now on, because the grammar of the tool calls is not available."""
        self.part = AnswerPart.TEXT

    def _after_reasoning(self) -> AnswerPart:
        if self._structure is not None:
            return AnswerPart.STRUCTURE
        return AnswerPart.BEGIN if self._markers or self._opening else AnswerPart.TEXT

    def _feed_begin(self, token: int) -> None:
        self._begun.append(token)
        if (may_open := self._begun == self._opening[: len(self._begun)]) and len(self._begun) == len(self._opening):
            self.part = AnswerPart.REASONING
            self._text = b""
            return
        before, text = self._text, (self._text + self._token_bytes(token)).lstrip(_SPACE)
        for marker, rule in self._markers.items():
            if text.startswith(marker):
                self.part, self.free, self._rule = AnswerPart.STRUCTURE, self.tokens, rule
                if len(text) > len(marker):  # the token extends beyond the marker, so the grammar describes it too
                    self.free -= 1
                    self._remaining = marker[len(before) :]
                return
        self._text = text
        if not may_open:
            self._opening, self._begun = [], []
            if not any(marker.startswith(text) for marker in self._markers):
                self.part = AnswerPart.TEXT


def _parts_of(params: SamplingParams) -> tuple[dict[str, Any] | None, dict[str, Any] | None, dict[str, Any]]:
    """Return the fields `structured_output`, `call_structure` and `reasoning` of the parameters, as they apply to an
    answer.

    With allowed_token_ids, `call_structure` and `reasoning` have no effect, because the tokens that they need may not
    be allowed.
    """
    structure, calls, reasoning = params.structured_output, params.call_structure, params.reasoning or {}
    if params.allowed_token_ids is not None or (structure is not None and "after" not in structure):
        return structure, None, {}
    if structure is not None:
        calls = None
    return structure, calls, reasoning if calls is not None or reasoning.get("budget") is not None else {}
