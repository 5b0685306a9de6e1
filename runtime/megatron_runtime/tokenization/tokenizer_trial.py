"""The trial of a tokenizer.json in a child process, which loads the file, and encodes and decodes common texts.

loader.py starts the process. A file that kills the process or exceeds its time limit is not loaded into another
process.
"""

from __future__ import annotations

import tokenizers

from megatron_runtime.process.sacrificial_process import serve
from megatron_runtime.tokenization.vocabulary import contained, load_vocabulary

MAX_GROWTH, MAX_GROWTH_CHARACTERS = 64, 4096
"""A text of n characters may have at most 64 n + 4096 tokens, and decode to at most this many characters."""
MAX_WORD_CHARACTERS = 4096
"""Maximum `max_input_chars_per_word` of WordPiece, which takes quadratic time for a word of this length."""

_TRIAL_TEXTS = (
    "".join(map(chr, range(32, 127))),
    "The quick brown fox\r\n\tjumps over 1234567890 naïve ﬁ Å 東京 🦙👩‍👩‍👧 مرحبا  \n",
    "a" * 2000,
    " " * 2000,
)


def _verdict(content: bytes) -> bytes:
    """Return an error message about the content of a tokenizer.json, or b"" if the file may be loaded."""
    try:
        with contained("the library cannot load it"):
            backend = load_vocabulary(content)
        longest = getattr(backend.model, "max_input_chars_per_word", 0)
        if longest > MAX_WORD_CHARACTERS:
            raise ValueError(
                f"max_input_chars_per_word is {longest}: at most {MAX_WORD_CHARACTERS} is allowed, and usual is 100"
            )
        for text in _TRIAL_TEXTS:
            _encode_and_decode(backend, text)
    except ValueError as error:
        return str(error)[:2000].encode(errors="replace")
    return b""


def _encode_and_decode(backend: tokenizers.Tokenizer, text: str) -> None:
    maximum = MAX_GROWTH * len(text) + MAX_GROWTH_CHARACTERS
    try:
        ids = backend.encode_batch_fast([text])[0].ids
        decoded = backend.decode(ids, skip_special_tokens=False)
    except Exception:  # a vocabulary need not cover every text; requests with other texts get an error
        return
    except BaseException as error:
        raise ValueError(f"it fails on a common text: {error}") from error
    if len(ids) > maximum or len(decoded) > maximum:
        raise ValueError(
            f"a text of {len(text)} characters became {len(ids)} tokens and {len(decoded)} characters: "
            f"at most {maximum} are allowed"
        )


if __name__ == "__main__":
    serve(lambda _setup: _verdict)
