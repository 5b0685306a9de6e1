"""Converts an engine's tokens to the text and log-probabilities of one choice, with and without streaming."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.formats.parser import Event
from megatron_runtime.server.openai.jobs import Job
from megatron_runtime.tokenization import Tokenizer

LOWEST = -9999.0
"""Value for a log-probability of minus infinity, which JSON cannot represent."""

TopTokens: TypeAlias = Sequence[tuple[int, float]]
_Detail: TypeAlias = tuple[float, TopTokens]
"""Log-probability of a token, and the most likely tokens at the same position."""
_Token: TypeAlias = tuple[int, _Detail | None]


@dataclass(frozen=True, slots=True)
class TokenLogProb:
    """One token of a choice.

    log_prob: log-probability of the token; None for the first token of a prompt, because no token precedes it.
    top:      the most likely tokens at this position, as many as requested, with their log-probabilities.
    offset:   number of characters before the token in the text of the choice.
    """

    token: int
    log_prob: float | None
    top: TopTokens
    offset: int


@dataclass(slots=True)
class Piece:
    """A part of one choice. The last part has the finish reason.

    log_probs, token_ids: log-probabilities and ids of the tokens in this part. The text of a token may come in a later
                          part, when its last character is complete.
    generated: all generated tokens of the choice, including the tokens that ended the answer. Only in the last part.
    generated_log_probs: log-probability of each token in `generated`, if available.
    stop_text: the stop text that ended the answer. Only in the last part.
    prompt_log_probs: log-probabilities of the prompt tokens, if requested. Only in the last part.
    hidden_state: hidden state after the prompt, if requested: little-endian float32 [D]. Only in the last part.
    events: events for this part from a parser that runs in another process; None: the choice has no such parser.
    """

    index: int
    text: str = ""
    finish_reason: str | None = None
    log_probs: list[TokenLogProb] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    generated: Sequence[int] = ()
    generated_log_probs: Sequence[float] | None = None
    stop_text: str | None = None
    prompt_log_probs: Sequence[TokenLogProb] = ()
    hidden_state: bytes | None = None
    events: Sequence[Event] | None = None


class _Cut(NamedTuple):
    """The position at which a stop text ends an answer.

    Positions count characters, without the texts of special tokens.

    end:        end of the text.
    stop_begin: beginning of the stop text. From this position on, special tokens in the stop text are counted too.
    stop:       the stop text.
    """

    end: int
    stop_begin: int
    stop: str


class Choice:
    """Converts the engine's replies for one choice to Pieces, the parts of the answer.

    The token that ends an answer is not part of the answer. A token that can end the answer is therefore held back. If
    the answer continues, which is possible before min_tokens are generated, the token becomes part of the answer. If
    the request wants log-probabilities, tokens without log-probabilities are held back until the final reply, which
    contains the log-probabilities.
    """

    def __init__(self, job: Job, tokenizer: Tokenizer) -> None:
        self._job = job
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(after=job.prompt.tokens, visible=job.visible)
        self._wants_log_probs = job.params.return_log_probs
        self._top = job.options.log_probs or 0
        self._echoes_log_probs = job.options.echoes_log_probs
        self._has_begun = job.prompt.echoed is None
        self._is_plain = not self._wants_log_probs and not job.visible  # many tokens are decoded in one call
        self._held: list[_Token] = []  # at most one token that may end the answer
        self._received = 0  # number of received tokens, including held tokens
        self._is_waiting = False  # a token waits for its log-probability
        self._offset = len(job.prompt.echoed or "")
        self._plain = 0  # number of generated characters without markers, as the engine counts them

    def begin(self) -> Piece | None:
        """Return a Piece that echoes the prompt, if the request wants an echo without log-probabilities.

        Otherwise return None. feed() or finish() adds an echo with log-probabilities.
        """
        if self._has_begun or self._echoes_log_probs:
            return None
        piece = Piece(self._job.index)
        self._echo({}, piece)
        return piece

    def feed(self, partial: Mapping[str, Any]) -> Piece | None:
        """Return the part for a partial reply, or None if the part has no text and no tokens.

        If the prompt is echoed with log-probabilities, the echo is in the first part.
        """
        piece = Piece(self._job.index)
        if partial.get("prompt_log_probs") is not None:
            self._echo(partial, piece)
        if self._has_begun and not self._job.is_prompt_only:
            tokens: list[int] = partial["new_tokens"]
            details: Sequence[_Detail | None] = [None] * len(tokens)
            if self._wants_log_probs:
                details = _details(partial.get("new_log_probs"), partial.get("new_top_n_logprobs"), top=self._top)
            if not self._is_waiting:
                self._advance(list(zip(tokens, details, strict=False)), piece)
            self._is_waiting |= len(details) < len(tokens)
        return piece if piece.text or piece.token_ids else None

    def finish(self, reply: Mapping[str, Any]) -> Piece:
        """Return the last part of the choice. reply: the engine's final reply.

        The reply has `generated_text` if a stop string matched. The engine has held back all text that could belong to
        the stop string, so the text of the earlier parts is the beginning of `generated_text`.
        """
        piece = Piece(self._job.index, finish_reason=reply.get("finish_reason") or "stop")
        if isinstance(stop := reply.get("stop_reason"), str):  # a number would be the id of the stop token
            piece.stop_text = stop
        if isinstance(hidden := reply.get("hidden_state"), bytes):
            piece.hidden_state = hidden
        self._echo(reply, piece)
        if (top := self._job.options.prompt_log_probs) is not None:
            piece.prompt_log_probs = _prompt_details(self._tokenizer, self._job.prompt.tokens, reply, top=top)
        if self._job.is_prompt_only:
            piece.finish_reason = "length"
            return piece
        rest = self._rest(reply)
        whole: str | None = reply.get("generated_text")
        if whole is not None:
            stop = piece.stop_text or ""
            kept = len(stop) if self._job.params.detokenize_stop_sequence else 0
            self._take((*self._held, *rest), piece, cut=_Cut(len(whole), len(whole) - kept, stop))
            piece.text += self._counted(whole[self._plain :])
        else:
            self._advance(rest, piece)
            if reply.get("finish_reason") != "stop":
                self._take(self._held, piece)
            piece.text += self._counted(self._detokenizer.finish())
        piece.generated, log_probs = reply["generated_tokens"], reply.get("generated_log_probs")
        # After a failover, the reply may contain only the log-probabilities since the failover.
        if log_probs is not None and len(log_probs) == len(piece.generated):
            piece.generated_log_probs = log_probs
        return piece

    def _echo(self, reply: Mapping[str, Any], piece: Piece) -> None:
        if self._has_begun:
            return
        self._has_begun = True
        piece.text = self._job.prompt.echoed or ""
        piece.token_ids = list(self._job.prompt.tokens)
        if self._echoes_log_probs:
            piece.log_probs = _prompt_details(self._tokenizer, self._job.prompt.tokens, reply, top=self._top)

    def _rest(self, reply: Mapping[str, Any]) -> list[_Token]:
        tokens: Sequence[int] = reply["generated_tokens"][self._received :]
        if not self._wants_log_probs:
            return [(token, None) for token in tokens]
        # After a failover, the reply may contain only the log-probabilities since the failover. The client already
        # has the earlier log-probabilities.
        skipped = self._received - (reply.get("log_probs_from") or 0)
        details = _details(reply.get("generated_log_probs"), reply.get("generated_top_n_logprobs"), top=self._top)
        if skipped < 0 or len(details) - skipped < len(tokens):
            raise ApiError(500, "The engine's answer lacks log-probabilities of some tokens: try again.")
        return list(zip(tokens, details[skipped:], strict=False))

    def _advance(self, tokens: list[_Token], piece: Piece) -> None:
        self._received += len(tokens)
        ready = [*self._held, *tokens]
        self._held = [ready.pop()] if ready and ready[-1][0] in self._job.end_ids else []
        self._take(ready, piece)

    def _take(self, tokens: Iterable[_Token], piece: Piece, *, cut: _Cut | None = None) -> None:
        """Add tokens and their text to `piece`.

        cut: position in the answer at which to stop; None: add all tokens.
        """
        if self._is_plain and cut is None:
            ids = [token for token, _ in tokens]
            piece.token_ids += ids
            piece.text += self._counted(self._detokenizer.feed(ids))
            return
        texts = []
        for token, detail in tokens:
            text = self._detokenizer.feed((token,))
            marker = self._tokenizer.token_bytes(token).decode() if token in self._job.visible else ""
            if cut is not None and marker in cut.stop and self._plain >= cut.stop_begin:
                marker = ""  # the engine counts this special token as text
            plain = len(text) - len(marker)
            excess = 0 if cut is None else max(0, self._plain + plain - cut.end)
            if cut is not None and excess and self._plain >= cut.end:
                break
            piece.token_ids.append(token)
            if detail is not None:
                piece.log_probs.append(TokenLogProb(token, *detail, self._offset))
            texts.append(self._counted(text[: len(text) - excess], plain=plain - excess))
        piece.text += "".join(texts)

    def _counted(self, text: str, *, plain: int | None = None) -> str:
        """Count the characters of a text that is added to the answer, and return the text.

        plain: number of characters outside of special tokens; None: all characters.
        """
        self._offset += len(text)
        self._plain += len(text) if plain is None else plain
        return text


def _prompt_details(
    tokenizer: Tokenizer, prompt: Sequence[int], reply: Mapping[str, Any], *, top: int
) -> list[TokenLogProb]:
    details = _details(reply.get("prompt_log_probs"), reply.get("prompt_top_n_logprobs"), top=top)
    if len(details) != len(prompt) - 1:
        raise ApiError(500, "The engine's answer lacks log-probabilities of the prompt: try again.")
    detokenizer = tokenizer.detokenizer()
    entries: list[TokenLogProb] = []
    offset = 0
    first: tuple[None, TopTokens] = (None, ())
    for token, (log_prob, likeliest) in zip(prompt, (first, *details), strict=True):
        entries.append(TokenLogProb(token, log_prob, likeliest, offset))
        offset += len(detokenizer.feed((token,)))
    return entries


def chat_log_probs(tokens: Iterable[TokenLogProb], tokenizer: Tokenizer, *, as_ids: bool = False) -> dict[str, Any]:
    """Return the field `logprobs` of a choice of a chat completion. as_ids: whether to write each token as its id."""

    def entry(token: int, log_prob: float | None) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        finite = LOWEST if log_prob is None else finite_log_prob(log_prob)
        return {"token": _id_text(token) if as_ids else _token_text(data), "logprob": finite, "bytes": list(data)}

    content = [
        {**entry(item.token, item.log_prob), "top_logprobs": [entry(*top) for top in item.top]} for item in tokens
    ]
    return {"content": content, "refusal": None}


def completion_log_probs(
    tokens: Sequence[TokenLogProb], tokenizer: Tokenizer, *, as_ids: bool = False
) -> dict[str, Any]:
    """Return the field `logprobs` of a choice of a text completion.

    The most likely tokens always include the generated token. A token that is only a part of a character is written as
    bytes, so that different tokens have different texts.

    as_ids: whether to write each token as its id.
    """

    def text(token: int) -> str:
        return _id_text(token) if as_ids else _token_text(tokenizer.token_bytes(token), prefix="bytes:")

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


def prompt_log_probs(
    tokens: Sequence[TokenLogProb], tokenizer: Tokenizer, *, as_ids: bool = False
) -> list[dict[str, Any] | None]:
    """Return `prompt_logprobs` in vLLM's format.

    For each prompt token, the list contains a map from token ids to objects with `logprob`, `rank` and `decoded_token`.
    The map has the prompt token and the most likely tokens at its position. The first item of the list is None.

    `rank` is None for a prompt token that is not one of the most likely tokens.
    """

    def entry(token: int, log_prob: float, rank: int | None) -> dict[str, Any]:
        text = _id_text(token) if as_ids else _token_text(tokenizer.token_bytes(token))
        return {"logprob": finite_log_prob(log_prob), "rank": rank, "decoded_token": text}

    entries: list[dict[str, Any] | None] = []
    for item in tokens:
        if item.log_prob is None:
            entries.append(None)
            continue
        likeliest = {str(id_): entry(id_, value, rank) for rank, (id_, value) in enumerate(item.top, 1)}
        entries.append({str(item.token): entry(item.token, item.log_prob, None), **likeliest})
    return entries


def finite_log_prob(log_prob: float) -> float:
    """Return a log-probability as a finite number, because JSON has no NaN and infinity."""
    return float(log_prob) if LOWEST <= log_prob < math.inf else LOWEST


def _id_text(token: int) -> str:
    return f"token_id:{token}"


def _token_text(data: bytes, *, prefix: str = "") -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return prefix + "".join(f"\\x{byte:02x}" for byte in data)


def _details(log_probs: Sequence[float] | None, likeliest: Sequence[TopTokens] | None, *, top: int) -> list[_Detail]:
    """Return the log-probability of each token, and the `top` most likely tokens at its position.

    Return [] if `log_probs` is None.
    """
    given = log_probs or ()
    return [
        (log_prob, tuple((id_, other) for id_, other in some[:top]))
        for log_prob, some in zip(given, likeliest or [()] * len(given), strict=False)
    ]
