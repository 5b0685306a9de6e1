"""Log-probabilities of an answer's tokens, and the two forms in which the OpenAI API gives them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_runtime.tokenization import Tokenizer

LOWEST = -9999.0
"""Stands for minus infinity, which JSON cannot say."""

TopTokens = Sequence[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class TokenLogProb:
    """One token of a choice.

    log_prob: None for the first token of a prompt, which follows nothing.
    top:      the likeliest tokens at this place and their log-probabilities, as many as were asked for.
    offset:   characters before it in the text of the choice.
    """

    token: int
    log_prob: float | None
    top: TopTokens
    offset: int


def chat_log_probs(tokens: Iterable[TokenLogProb], tokenizer: Tokenizer) -> dict[str, Any]:
    """`logprobs` of a chat choice."""
    content = [
        {
            **_chat_token(entry.token, entry.log_prob, tokenizer),
            "top_logprobs": [_chat_token(token, log_prob, tokenizer) for token, log_prob in entry.top],
        }
        for entry in tokens
    ]
    return {"content": content, "refusal": None}


def completion_log_probs(tokens: Sequence[TokenLogProb], tokenizer: Tokenizer) -> dict[str, Any]:
    """`logprobs` of a completion choice. The token itself is among the likeliest, be it likely or not."""
    top: list[dict[str, float] | None] = []
    for entry in tokens:
        if entry.log_prob is None:
            top.append(None)
            continue
        likeliest = {_completion_token(token, tokenizer): _finite(log_prob) for token, log_prob in entry.top}
        top.append({**likeliest, _completion_token(entry.token, tokenizer): _finite(entry.log_prob)})
    return {
        "text_offset": [entry.offset for entry in tokens],
        "token_logprobs": [None if entry.log_prob is None else _finite(entry.log_prob) for entry in tokens],
        "tokens": [_completion_token(entry.token, tokenizer) for entry in tokens],
        "top_logprobs": top,
    }


def plain_log_probs(log_probs: Iterable[float]) -> list[float]:
    """As JSON can say them."""
    return [_finite(log_prob) for log_prob in log_probs]


def _chat_token(token: int, log_prob: float | None, tokenizer: Tokenizer) -> dict[str, Any]:
    data = tokenizer.token_bytes(token)
    text = _decoded(data)
    shown = "".join(f"\\x{byte:02x}" for byte in data) if text is None else text
    return {"token": shown, "logprob": LOWEST if log_prob is None else _finite(log_prob), "bytes": list(data)}


def _completion_token(token: int, tokenizer: Tokenizer) -> str:
    """The token's text; its bytes where it is a part of a character, so that no two parts look alike."""
    data = tokenizer.token_bytes(token)
    text = _decoded(data)
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data) if text is None else text


def _decoded(data: bytes) -> str | None:
    try:
        return data.decode()
    except UnicodeDecodeError:
        return None


def _finite(log_prob: float) -> float:
    return max(float(log_prob), LOWEST)
