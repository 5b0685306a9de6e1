"""The compiled `tokenizers` library, contained: its panics become exceptions, and a tokenizer.json is tried first.

A tokenizer.json is part of the model, so it may be hostile: a regular expression can take years to compile, and a
normalizer can turn ten characters into gigabytes, which aborts the process. So a child process with limits loads the
file and encodes some text before this process loads it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import tokenizers

from megatron_runtime.sacrificial_process import ProcessLostError, ProcessStartError, SacrificialProcess, serve

TRIAL_SECONDS, TRIAL_SECONDS_PER_MEGABYTE = 10.0, 1.0
"""Time to load a tokenizer.json and encode the trial texts: fixed, and for each megabyte of the file."""
TRIAL_MEMORY_BYTES = 4 << 30
"""Address space of the child."""

MAX_GROWTH, MAX_GROWTH_CHARACTERS = 64, 4096
"""A text of n characters may normalise or decode to 64 n + 4096 characters, and encode to as many tokens."""
MAX_WORD_CHARACTERS = 4096
"""WordPiece takes quadratic time over a word of up to `max_input_chars_per_word`."""

_TRIAL_TEXTS = (
    "".join(map(chr, range(32, 127))),
    "The quick brown fox\r\n\tjumps over 1234567890 naïve ﬁ Å 東京 🦙👩‍👩‍👧 مرحبا  \n",
    "a" * 2000,
    " " * 2000,
)


class TokenizerBackendError(ValueError):
    """The library failed, or the tokenizer exceeds a limit."""


@contextmanager
def contained(doing: str) -> Iterator[None]:
    """Raise TokenizerBackendError for whatever the library raises. A panic of it is no Exception in Python.

    doing: begins the message, such as "the text cannot be tokenized".
    """
    try:
        yield
    except BaseException as error:
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise TokenizerBackendError(f"{doing}: {error}") from error


def backend_from_json(content: bytes, *, name: str) -> tokenizers.Tokenizer:
    """Return the tokenizer of a tokenizer.json. Padding and truncation in the file are ignored, as transformers does.

    content: of the file.
    name:    its path, for errors.
    Raises ValueError that names the file.
    """
    _try(content, name=name)
    return _load(content, name=name)


def _try(content: bytes, *, name: str) -> None:
    child = SacrificialProcess("megatron_runtime.tokenization.backend", memory_bytes=TRIAL_MEMORY_BYTES)
    seconds = TRIAL_SECONDS + TRIAL_SECONDS_PER_MEGABYTE * len(content) / 1e6
    try:
        verdict = child.call(content, timeout_seconds=seconds)
    except ProcessLostError as error:
        raise TokenizerBackendError(
            f"{name} is not a usable tokenizer: the process that tried it out is limited to {seconds:.0f} s and "
            f"{TRIAL_MEMORY_BYTES >> 20} MiB, and {error}"
        ) from error
    except ProcessStartError as error:
        raise TokenizerBackendError(f"{name} could not be tried out: {error}") from error
    finally:
        child.close()
    if verdict:
        raise TokenizerBackendError(f"{name} is not a readable tokenizer: {verdict.decode()}")


def _load(content: bytes, *, name: str) -> tokenizers.Tokenizer:
    with contained(f"{name} is not a readable tokenizer"):
        backend = tokenizers.Tokenizer.from_buffer(content)
        backend.no_padding()
        backend.no_truncation()
    return backend


def _verdict(content: bytes) -> bytes:
    """Empty for a tokenizer that may be loaded, or what is wrong with it. Runs in the child."""
    try:
        with contained("the library cannot load it"):
            backend = tokenizers.Tokenizer.from_buffer(content)
            backend.no_padding()
            backend.no_truncation()
        _check_limits(backend)
        for text in _TRIAL_TEXTS:
            _encode_and_decode(backend, text)
    except TokenizerBackendError as error:
        return str(error)[:2000].encode(errors="replace")
    return b""


def _check_limits(backend: tokenizers.Tokenizer) -> None:
    longest = getattr(backend.model, "max_input_chars_per_word", 0)
    if longest > MAX_WORD_CHARACTERS:
        raise TokenizerBackendError(
            f"max_input_chars_per_word is {longest}: at most {MAX_WORD_CHARACTERS} is allowed, and usual is 100"
        )


def _encode_and_decode(backend: tokenizers.Tokenizer, text: str) -> None:
    most = MAX_GROWTH * len(text) + MAX_GROWTH_CHARACTERS
    try:
        ids = backend.encode_batch_fast([text])[0].ids
        decoded = backend.decode(ids, skip_special_tokens=False)
    except Exception:  # a vocabulary need not cover every text: such a request is answered with an error
        return
    except BaseException as error:
        raise TokenizerBackendError(f"it fails on a common text: {error}") from error
    if len(ids) > most or len(decoded) > most:
        raise TokenizerBackendError(
            f"a text of {len(text)} characters became {len(ids)} tokens and {len(decoded)} characters: at most {most} "
            "are allowed"
        )


def _prepare(_setup: bytes) -> Callable[[bytes], bytes]:
    return _verdict


if __name__ == "__main__":
    serve(_prepare)
