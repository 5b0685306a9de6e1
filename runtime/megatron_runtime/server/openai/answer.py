"""From an engine's tokens to the text and the log-probabilities of one choice. Streamed and whole answers are equal."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeAlias

from megatron_runtime.server.errors import ApiError
from megatron_runtime.tokenization import Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot express."""

TopTokens: TypeAlias = Sequence[tuple[int, float]]
_Detail: TypeAlias = tuple[float, TopTokens]
"""Log-probability of a token, and the likeliest tokens at its place."""


@dataclass(frozen=True, slots=True)
class TokenLogProb:
    """One token of a choice.

    log_prob: None for the first token of a prompt, which follows nothing.
    top:      the likeliest tokens at this place and their log-probabilities, as many as the request asks for.
    offset:   characters before it in the text of the choice.
    """

    token: int
    log_prob: float | None
    top: TopTokens
    offset: int


@dataclass(slots=True)
class Fragment:
    """Some text, and the tokens that it is made of: always their ids, and log-probabilities if the request wants them.

    A token belongs to the fragment in which it was taken, which may be before its character is complete.
    """

    text: str = ""
    log_probs: list[TokenLogProb] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


class Answer:
    """Text of one choice as its tokens arrive.

    end_ids: tokens that may end the answer. One is held until the next token shows that the answer continued (below
             min_tokens it may), because the token that ends an answer is not part of it.
    visible: special tokens that the answer shows as text.
    wants_log_probs: tokens without their log-probability wait for the final reply, which has it.
    offset:  characters of the choice before this answer.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        end_ids: Iterable[int],
        visible: Collection[int] = (),
        wants_log_probs: bool = False,
        offset: int = 0,
    ) -> None:
        self._detokenizer = tokenizer.detokenizer(visible=visible)
        self._marker_length = {id_: len(tokenizer.token_bytes(id_).decode()) for id_ in visible}
        self._end_ids = frozenset(end_ids)
        self._wants_log_probs = wants_log_probs
        self._is_plain = not wants_log_probs and not visible  # single tokens need no attention
        self._held: tuple[int, _Detail | None] | None = None
        self._received = 0  # tokens taken or held
        self._is_waiting = False  # a token came without its log-probability
        self._offset = offset
        self._plain = 0  # characters given out without markers: what the engine counts

    def feed(
        self,
        tokens: Sequence[int],
        log_probs: Sequence[float] | None = None,
        top: Sequence[TopTokens] | None = None,
    ) -> Fragment:
        """Return what these further tokens complete."""
        fragment = Fragment()
        if self._is_plain:
            self._advance_all(tokens, fragment)
            return fragment
        details = _details(log_probs, top) if self._wants_log_probs else None
        for place, token in enumerate(tokens):
            self._is_waiting |= details is not None and place >= len(details)
            if self._is_waiting:
                break
            self._advance(token, None if details is None else details[place], fragment)
        return fragment

    def finish(self, reply: Mapping[str, Any]) -> Fragment:
        """Return the rest, from the authoritative reply.

        A reply with `generated_text` matched a stop string. The engine held back what might belong to it, so the text
        given out so far is the beginning of `generated_text`.
        """
        fragment = Fragment()
        rest = self._rest(reply)
        whole: str | None = reply.get("generated_text")
        if whole is not None:
            self._finish_at(len(whole), rest, fragment)
            self._give(whole[self._plain :], fragment)
            return fragment
        if self._is_plain:
            self._advance_all([token for token, _ in rest], fragment)
        else:
            for token, detail in rest:
                self._advance(token, detail, fragment)
        if self._held is not None and reply.get("finish_reason") != "stop":
            self._take(*self._held, fragment)
        self._held = None
        self._give(self._detokenizer.finish(), fragment)
        return fragment

    def _finish_at(self, end: int, rest: Iterable[tuple[int, _Detail | None]], fragment: Fragment) -> None:
        """Take the tokens that begin before, or end no later than, character `end`; cut the text there."""
        held = () if self._held is None else (self._held,)
        self._held = None
        for token, detail in (*held, *rest):
            before = self._plain
            text = self._detokenizer.feed((token,))
            after = before + len(text) - self._marker_length.get(token, 0)
            if before >= end and after > end:
                return
            self._note(token, detail, fragment)
            self._give(text[: len(text) - max(0, after - end)], fragment, plain=min(after, end) - before)

    def _rest(self, reply: Mapping[str, Any]) -> list[tuple[int, _Detail | None]]:
        tokens: Sequence[int] = reply["generated_tokens"][self._received :]
        if not self._wants_log_probs:
            return [(token, None) for token in tokens]
        # After a failover the reply may have only the log-probabilities since then; the client has the earlier ones.
        skipped = self._received - (reply.get("log_probs_from") or 0)
        details = _details(reply.get("generated_log_probs"), reply.get("generated_top_n_logprobs"))
        if skipped < 0 or len(details) - skipped < len(tokens):
            raise ApiError(500, "The engine's answer lacks log-probabilities of some tokens: try again.")
        return list(zip(tokens, details[skipped:], strict=False))

    def _advance(self, token: int, detail: _Detail | None, fragment: Fragment) -> None:
        self._received += 1
        if self._held is not None:
            self._take(*self._held, fragment)
            self._held = None
        if token in self._end_ids:
            self._held = (token, detail)
        else:
            self._take(token, detail, fragment)

    def _advance_all(self, tokens: Sequence[int], fragment: Fragment) -> None:
        """The same as _advance for each token, at the cost of one."""
        if not tokens:
            return
        self._received += len(tokens)
        ready = [*(() if self._held is None else self._held[:1]), *tokens]
        self._held = (ready.pop(), None) if ready[-1] in self._end_ids else None
        fragment.token_ids += ready
        self._give(self._detokenizer.feed(ready), fragment)

    def _take(self, token: int, detail: _Detail | None, fragment: Fragment) -> None:
        self._note(token, detail, fragment)
        text = self._detokenizer.feed((token,))
        self._give(text, fragment, plain=len(text) - self._marker_length.get(token, 0))

    def _note(self, token: int, detail: _Detail | None, fragment: Fragment) -> None:
        fragment.token_ids.append(token)
        if detail is not None:
            fragment.log_probs.append(TokenLogProb(token, *detail, self._offset))

    def _give(self, text: str, fragment: Fragment, *, plain: int | None = None) -> None:
        fragment.text += text
        self._offset += len(text)
        self._plain += len(text) if plain is None else plain


def prompt_log_probs(tokenizer: Tokenizer, prompt: Sequence[int], reply: Mapping[str, Any]) -> list[TokenLogProb]:
    """Return the tokens of a prompt that is echoed; the first follows nothing and has no log-probability."""
    details = _details(reply.get("prompt_log_probs"), reply.get("prompt_top_n_logprobs"))
    if len(details) != len(prompt) - 1:
        raise ApiError(500, "The engine's answer lacks log-probabilities of the prompt: try again.")
    detokenizer = tokenizer.detokenizer()
    offsets = [0]
    for token in prompt:
        offsets.append(offsets[-1] + len(detokenizer.feed((token,))))
    entries = [TokenLogProb(prompt[0], None, (), 0)]
    for (token, (start, _)), detail in zip(list(zip(prompt, pairwise(offsets), strict=True))[1:], details, strict=True):
        entries.append(TokenLogProb(token, *detail, start))
    return entries


def chat_log_probs(tokens: Iterable[TokenLogProb], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return `logprobs` of a chat choice."""

    def entry(token: int, log_prob: float | None) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        finite = LOWEST if log_prob is None else finite_log_prob(log_prob)
        return {"token": _token_text(data), "logprob": finite, "bytes": list(data)}

    content = [
        {**entry(item.token, item.log_prob), "top_logprobs": [entry(*top) for top in item.top]} for item in tokens
    ]
    return {"content": content, "refusal": None}


def completion_log_probs(tokens: Sequence[TokenLogProb], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return `logprobs` of a completion choice. The token itself is among the likeliest, whether it is likely or not.

    A token that is part of a character is shown as bytes, so that no two parts look alike.
    """

    def text(token: int) -> str:
        return _token_text(tokenizer.token_bytes(token), prefix="bytes:")

    log_probs = [None if entry.log_prob is None else finite_log_prob(entry.log_prob) for entry in tokens]
    return {
        "text_offset": [entry.offset for entry in tokens],
        "token_logprobs": log_probs,
        "tokens": [text(entry.token) for entry in tokens],
        "top_logprobs": [
            None if own is None else {text(id_): finite_log_prob(top) for id_, top in (*entry.top, (entry.token, own))}
            for entry, own in zip(tokens, log_probs, strict=True)
        ],
    }


def finite_log_prob(log_prob: float) -> float:
    """Return a number that JSON can express."""
    return max(float(log_prob), LOWEST)


def _token_text(data: bytes, *, prefix: str = "") -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in data)


def _details(log_probs: Sequence[float] | None, top: Sequence[TopTokens] | None) -> list[_Detail]:
    given = log_probs or ()
    likeliest = top or [()] * len(given)
    return [
        (log_prob, tuple((id_, other) for id_, other in some)) for log_prob, some in zip(given, likeliest, strict=False)
    ]
