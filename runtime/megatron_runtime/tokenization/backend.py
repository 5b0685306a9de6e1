"""The compiled `tokenizers` library, contained: its panics become exceptions, and a tokenizer.json is tried first.

A tokenizer.json is part of the model, so it may be hostile: a regular expression can take years to compile, and a
normalizer can turn ten characters into gigabytes, which aborts the process. So a child process with limits loads the
file and encodes some text before this process loads it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import tokenizers

from megatron_runtime.process.sacrificial_process import ProcessLostError, ProcessStartError, SacrificialProcess

TRIAL_SECONDS, TRIAL_SECONDS_PER_MEGABYTE = 10.0, 1.0
"""Time to load a tokenizer.json and encode the trial texts: fixed, and for each megabyte of the file."""
TRIAL_MEMORY_BYTES = 4 << 30
"""Address space of the child."""


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
    with contained(f"{name} is not a readable tokenizer"):
        return load(content)


def _try(content: bytes, *, name: str) -> None:
    child = SacrificialProcess("megatron_runtime.tokenization.tokenizer_trial", memory_bytes=TRIAL_MEMORY_BYTES)
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


def load(content: bytes) -> tokenizers.Tokenizer:
    """Load a tokenizer.json that is harmless. Raises what the library raises."""
    backend = tokenizers.Tokenizer.from_buffer(content)
    backend.no_padding()
    backend.no_truncation()
    return backend
