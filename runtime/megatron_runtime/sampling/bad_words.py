"""Texts that an answer must not contain, as token sequences.

The rule is the same as for vLLM's `bad_words`. If the answer ends with all tokens of a sequence except the last, the
last token of the sequence is not allowed next. A text that the model writes with other tokens is not recognised. This
module does not import torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from megatron_runtime.requests.sampling_params import InvalidSamplingParamsError


def token_sequences(
    texts: Iterable[str], encode: Callable[[str], list[int]], *, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Return the token sequences of SamplingParams.bad_words.

    Each text results in the sequence of the text without leading white space. It also results in the sequence of the
    text with one leading space, if the space changes the first token but not the number of tokens. Sequences with a
    token beyond the model's vocabulary are left out.

    encode: returns the tokens of a text, without the special tokens that begin a prompt.
    vocab_size: size of the model's vocabulary.

    Raises InvalidSamplingParamsError if a text has no tokens.
    """
    sequences = []
    for word in dict.fromkeys(text.lstrip() for text in texts):
        try:
            plain, spaced = encode(word), encode(f" {word}")
        except ValueError as error:
            raise InvalidSamplingParamsError("bad_words", word, f"other texts: {error}") from error
        if not plain:
            raise InvalidSamplingParamsError("bad_words", word, "texts for which the model's tokenizer has tokens")
        sequences.append(tuple(plain))
        if len(spaced) == len(plain) and spaced[0] != plain[0]:
            sequences.append(tuple(spaced))
    return tuple(sequence for sequence in sequences if max(sequence) < vocab_size)


class BadWords:
    """Token sequences that an answer must not contain."""

    def __init__(self, sequences: Iterable[Sequence[int]]) -> None:
        self._last: dict[tuple[int, ...], list[int]] = {}
        for *prefix, last in sequences:
            self._last.setdefault(tuple(prefix), []).append(last)
        self._lengths = sorted({len(prefix) for prefix in self._last})

    def after(self, answer: Sequence[int]) -> list[int]:
        """Return the tokens that must not follow `answer`. answer: all generated tokens so far."""
        end = len(answer)
        prefixes = (tuple(answer[end - length :]) for length in self._lengths if length <= end)
        return [token for prefix in prefixes for token in self._last.get(prefix, ())]
