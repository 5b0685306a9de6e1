"""From an engine's tokens to the text of one choice, whole or in pieces; both give the same."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.logprobs import TokenLogProb, TopTokens
from megatron_runtime.tokenization import Tokenizer


@dataclass(slots=True)
class Fragment:
    """Some text, and the tokens that it was made of: their log-probabilities where asked for, their ids always.

    A token belongs to the fragment in which it was taken up, which may be before its character is complete.
    """

    text: str = ""
    log_probs: list[TokenLogProb] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Detail:
    log_prob: float
    top: TopTokens


class Answer:
    """Text of one choice as its tokens arrive.

    end_ids: tokens that may end the answer. One is held until the next token shows that the answer went on (below
             min_tokens it may), because the token that ends an answer is no part of it.
    visible: special tokens that are given out as text.
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
        self._is_plain = not wants_log_probs and not visible  # nothing is told of single tokens
        self._held: tuple[int, _Detail | None] | None = None
        self._seen = 0  # tokens taken or held
        self._is_waiting = False  # a token came without its log-probability
        self._offset = offset
        self._plain = 0  # characters given out, markers apart: what the engine counts

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

        A reply with `generated_text` matched a stop string: the engine held back what might belong to it, so the text
        given out so far is its beginning.
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
        tokens: Sequence[int] = reply["generated_tokens"][self._seen :]
        if not self._wants_log_probs:
            return [(token, None) for token in tokens]
        # After a failover the reply may hold only what came after it; the client has had the rest.
        skipped = self._seen - (reply.get("log_probs_from") or 0)
        details = _details(reply.get("generated_log_probs"), reply.get("generated_top_n_logprobs"))
        if skipped < 0 or len(details) - skipped < len(tokens):
            raise ApiError(500, "The engine's answer lacks log-probabilities of some tokens: try again.")
        return list(zip(tokens, details[skipped:], strict=False))

    def _advance(self, token: int, detail: _Detail | None, fragment: Fragment) -> None:
        self._seen += 1
        if self._held is not None:
            self._take(*self._held, fragment)
            self._held = None
        if token in self._end_ids:
            self._held = (token, detail)
        else:
            self._take(token, detail, fragment)

    def _advance_all(self, tokens: Sequence[int], fragment: Fragment) -> None:
        """As _advance for each, at the price of one."""
        if not tokens:
            return
        self._seen += len(tokens)
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
            fragment.log_probs.append(TokenLogProb(token, detail.log_prob, detail.top, self._offset))

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
        entries.append(TokenLogProb(token, detail.log_prob, detail.top, start))
    return entries


def _details(log_probs: Sequence[float] | None, top: Sequence[TopTokens] | None) -> list[_Detail]:
    given = log_probs or ()
    likeliest = top or [()] * len(given)
    return [
        _Detail(log_prob, tuple((id_, lp) for id_, lp in some))
        for log_prob, some in zip(given, likeliest, strict=False)
    ]
