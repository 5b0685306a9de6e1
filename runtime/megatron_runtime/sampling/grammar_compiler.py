"""The grammar compiler, llguidance, and the process that tries each grammar first. No torch, no NumPy.

The compiler is native code. A grammar within its limits can still overflow its stack, run for minutes or take
gigabytes. So the engine compiles a grammar only after a SacrificialProcess, which runs this module, compiled it on a
smaller stack.
"""

from __future__ import annotations

import ctypes
import json
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import llguidance

from megatron_runtime.process.sacrificial_process import SacrificialProcess, serve
from megatron_runtime.protocol import codec

_LIMITS = {
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}
"""Limits that the compiler enforces. They bound neither its stack nor the time of `multipleOf`."""

STACK_BYTES = 1 << 20
"""Stack on which the process tries a grammar."""

ENGINE_STACK_BYTES = 4 << 20
"""Stack on which the engine compiles a grammar that passed."""

MEMORY_BYTES = 1 << 30
"""Address space of that process: interpreter, vocabulary and grammar."""

COMPILE_SECONDS = 3.0
"""Wall-clock time to compile one grammar. Grammars of the largest size that clients need take 0.25 s."""

MAX_COMPILED_BYTES = 32 << 20
"""Most memory that a compiled grammar may take in the engine."""

_JSON = {"whitespace_pattern": r"[ \n\r\t]{0,20}"}
"""A small model may generate white space endlessly where JSON allows it."""


class InvalidGrammarError(ValueError):
    """The compiler does not accept the grammar; the message is the compiler's."""


@dataclass(frozen=True)
class VocabularyTable:
    """A vocabulary as llguidance reads it.

    tokens:     bytes of each token.
    vocab_size: width of the logits, at least len(tokens).
    encode:     text without special tokens to token ids.
    """

    tokens: list[bytes]
    special_token_ids: list[int]
    eos_token_ids: list[int]
    vocab_size: int
    encode: Callable[[str], Sequence[int]]
    bos_token_id: None = None

    @property
    def eos_token_id(self) -> int:
        return self.eos_token_ids[0]

    def __call__(self, text: bytes | str) -> list[int]:
        return list(self.encode(text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text))

    def tokenizer(self) -> llguidance.LLTokenizer:
        wrapper = llguidance.TokenizerWrapper(self)
        return llguidance.LLTokenizer(wrapper, n_vocab=self.vocab_size, eos_token=list(self.eos_token_ids))

    def pack(self) -> bytes:
        """Everything but `encode`."""
        return codec.pack([self.tokens, self.special_token_ids, self.eos_token_ids, self.vocab_size])

    @classmethod
    def unpack(cls, packed: bytes) -> VocabularyTable:
        tokens, special, eos, vocab_size = codec.unpack(packed, codec.DETAILS)
        ids = {token: id_ for id_, token in enumerate(tokens) if len(token) == 1}
        return cls(
            tokens, special, eos, vocab_size, lambda text: [ids[b] for c in text.encode() if (b := bytes([c])) in ids]
        )


def compile_grammar(tokenizer: llguidance.LLTokenizer, structure: Mapping[str, Any]) -> llguidance.LLMatcher:
    """The matcher of an answer without tokens, its first mask computed once.

    structure: as in SamplingParams.structured_output, within the limits of grammar_limits.

    Raises:
        InvalidGrammarError: the compiler does not accept it.
    """
    try:
        grammar = _grammar(structure)
    except ValueError as error:
        raise InvalidGrammarError(str(error)) from error
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=llguidance.LLParserLimits(**_LIMITS))
    matcher.compute_bitmask()
    if matcher.is_error():
        raise InvalidGrammarError(matcher.get_error())
    return matcher


def compile_on_large_stack(tokenizer: llguidance.LLTokenizer, structure: Mapping[str, Any]) -> llguidance.LLMatcher:
    """compile_grammar() on a thread of its own: the caller's may have a smaller stack than the trial had."""
    compiled: Future[llguidance.LLMatcher] = Future()

    def run() -> None:
        try:
            compiled.set_result(compile_grammar(tokenizer, structure))
        except BaseException as error:
            compiled.set_exception(error)

    before = threading.stack_size(ENGINE_STACK_BYTES)
    try:
        threading.Thread(target=run, name="grammar-compiler").start()
    finally:
        threading.stack_size(before)
    return compiled.result()


def _grammar(structure: Mapping[str, Any]) -> str:
    value = structure.get("value")
    match structure["type"]:
        case "json_object":
            return llguidance.LLMatcher.grammar_from_json_schema({"type": "object"}, overrides=_JSON)
        case "json_schema":
            return llguidance.LLMatcher.grammar_from_json_schema(dict(value or {}), overrides=_JSON)
        case "regex":
            return llguidance.LLMatcher.grammar_from_regex(str(value))
        case "choice":
            # One terminal: as alternatives of a rule, a few thousand choices exceed max_items_in_row.
            alternatives = " | ".join(json.dumps(text) for text in value or ())
            return llguidance.LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {alternatives}")
        case _:
            return llguidance.LLMatcher.grammar_from_lark(str(value))


# --- the process ------------------------------------------------------------------------------------------------------


def trial_process(vocabulary: VocabularyTable) -> SacrificialProcess:
    """A process that tries grammars. See try_grammar()."""
    return SacrificialProcess(__name__, memory_bytes=MEMORY_BYTES, stack_bytes=STACK_BYTES, setup=vocabulary.pack())


def try_grammar(process: SacrificialProcess, structure: Mapping[str, Any]) -> int:
    """Compile a grammar in the process. Returns the bytes of memory that it takes.

    Raises:
        InvalidGrammarError: the compiler does not accept it, or it takes more than MAX_COMPILED_BYTES.
        ProcessLostError: it ended the process, or takes more than COMPILE_SECONDS.
        ProcessStartError: there is no process to try it.
    """
    reply = json.loads(process.call(json.dumps(structure).encode(), timeout_seconds=COMPILE_SECONDS))
    if reply["error"] is not None:
        raise InvalidGrammarError(reply["error"])
    if reply["bytes"] > MAX_COMPILED_BYTES:
        raise InvalidGrammarError(
            f"it is too complex: compiled it takes {reply['bytes'] >> 20} MiB, at most {MAX_COMPILED_BYTES >> 20}"
        )
    return int(reply["bytes"])


def _prepare(setup: bytes) -> Callable[[bytes], bytes]:
    tokenizer = VocabularyTable.unpack(setup).tokenizer()

    def handle(request: bytes) -> bytes:
        error, before = None, _resident_bytes()
        matcher = None
        try:
            matcher = compile_grammar(tokenizer, json.loads(request))
        except InvalidGrammarError as invalid:
            error = str(invalid)
        taken = _resident_bytes() - before
        del matcher
        return json.dumps({"error": error, "bytes": max(0, taken)}).encode()

    return handle


def _resident_bytes() -> int:
    """Memory of this process, without what earlier grammars left free."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    serve(_prepare)
