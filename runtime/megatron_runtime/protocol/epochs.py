"""Encodes and combines the epochs of the weights that sampled the tokens of an answer.

A span is a pair (index of the first token, epoch). It ends at the first token of the next span.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, TypeAlias

from megatron_runtime.protocol import limits
from megatron_runtime.protocol.codec import MalformedMessageError

TokenEpochs: TypeAlias = Sequence[tuple[int, int]]
"""Spans `(index of the first token, epoch)` in ascending order. Empty means unknown."""
_SPAN = struct.Struct("<IQ")


def epochs_to_bytes(spans: TokenEpochs) -> bytes:
    """Return the encoded spans.

    Each span takes 12 bytes: the index of its first token (u32) and the epoch (u64), little-endian.
    """
    return b"".join([_SPAN.pack(*span) for span in spans])


def epochs_from_bytes(data: Any) -> tuple[tuple[int, int], ...]:
    """Return the spans that epochs_to_bytes() encoded. Raises MalformedMessageError."""
    if type(data) is not bytes or len(data) % _SPAN.size:
        raise MalformedMessageError(f"epochs of tokens: want bytes, a multiple of {_SPAN.size} of them")
    spans, last = tuple(_SPAN.iter_unpack(data)), -1
    for first, epoch in spans:
        if first <= last or epoch > limits.MAX_EPOCH:
            raise MalformedMessageError(f"epochs of tokens: want spans in rising order, up to epoch {limits.MAX_EPOCH}")
        last = first
    return spans


def add_epochs(to: list[tuple[int, int]], spans: TokenEpochs, *, first: int, count: int, at: int) -> None:
    """Append the epochs of the tokens first … first + count - 1 of `spans` to `to`.

    In `to`, these tokens begin at index `at`. If the last span of `to` has the same epoch, that span continues and no
    span is appended.
    """
    begin, end = first, first + count
    for number, (start, epoch) in enumerate(spans):
        stop = spans[number + 1][0] if number + 1 < len(spans) else end
        if max(start, begin) < min(stop, end) and (not to or to[-1][1] != epoch):
            to.append((at + max(0, start - begin), epoch))


def continued_epochs(
    spans: TokenEpochs, engine_spans: TokenEpochs, *, prompt_length: int, num_generated: int
) -> list[tuple[int, int]]:
    """Return the epochs of an answer as (position, epoch) pairs, in the form of `policy_epoch` in a reply.

    The forward pass at a position samples the token of the next position. All positions of the prompt get the epoch of
    the first generated token.

    spans:         epochs of the `num_generated` tokens that an earlier engine sampled, by index; empty means unknown.
    engine_spans:  epochs by position from the engine that finishes the answer. Its epochs of earlier tokens are ignored
                   unless `spans` is empty.
    prompt_length: length of the prompt in tokens.
    """
    positions = [(prompt_length + number - 1 if number else 0, epoch) for number, epoch in spans]
    sampled = prompt_length + num_generated - 1 if positions else 0
    add_epochs(positions, engine_spans, first=sampled, count=1 << 31, at=sampled)
    return positions
