"""The grammar compiler, llguidance, and the trial process that compiles each grammar first.

The compiler is native code. The compilation of a grammar within the limits of grammar_limits can overflow the stack,
run for minutes or take gigabytes. So a SacrificialProcess, which runs this module, compiles each grammar first on a
smaller stack. The engine compiles the grammar itself only if the trial succeeds. This module imports neither torch nor
NumPy.
"""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import llguidance

from megatron_runtime.process.sacrificial_process import SacrificialProcess, serve
from megatron_runtime.protocol import codec
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.requests.sampling_params import InvalidSamplingParamsError
from megatron_runtime.sampling.grammar_dialects import is_gbnf, lark_of
from megatron_runtime.sampling.grammar_limits import JSON_OPTIONS, check_structure

STACK_BYTES = 1 << 20
"""Stack size, in bytes, of the thread in the trial process that compiles a grammar."""
ENGINE_STACK_BYTES = 4 << 20
"""Stack size, in bytes, of the thread in the engine that compiles a grammar after the trial."""
MEMORY_BYTES = 1 << 30
"""Address space of the trial process for the vocabulary and the grammar, in bytes."""
COMPILE_SECONDS = 1.5
"""Timeout of the trial of one grammar, in wall-clock seconds. The largest grammars in use take 0.25 s.

The engine compiles the grammar again after the trial. So a grammar can wait twice this long for another tenant's
grammar, and additionally for the start of a trial process.
"""
MAX_COMPILED_BYTES = 32 << 20
"""Maximum number of bytes of memory that a compiled grammar can take in the engine."""

# The compiler enforces these limits. They limit neither its stack nor the time of `multipleOf`.
_LIMITS = {
    "initial_lexer_fuel": 100_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 20_000,
    "max_items_in_row": 2_000,
    "max_lexer_states": 20_000,
    "max_grammar_size": 100_000,
    "verbose_errors": False,
}


_SEPARATE = "\x02"
"""A character that vocabularies have as a token of its own, or as the unknown token."""
_ERROR = re.compile(r"(?m)^error: (.+)")
_PLACE = re.compile(r"^at \d+\(\d+\): (?:invalid regex .*?\(in regex\): )?")
_KEYWORDS = re.compile(r"^Unimplemented keys: \[(.*)\]")
_OVERLAPPING = "oneOf constraints are not supported"


class InvalidGrammarError(ValueError):
    """Raised if the compiler rejects the grammar. The message names the defect in terms of the client's text."""

    @classmethod
    def of(cls, message: str) -> InvalidGrammarError:
        """Return the error for a message of the compiler.

        The names of compiler options and the quotation of the grammar are removed from the message.
        """
        if (error := _ERROR.search(message)) is not None:
            return cls(error[1])
        if (keywords := _KEYWORDS.match(message)) is not None:
            return cls(f"the keywords {keywords[1]} cannot be enforced: leave them out")
        if message.startswith(_OVERLAPPING):
            return cls("oneOf cannot be enforced where its schemas overlap: use anyOf")
        return cls(_PLACE.sub("", message.strip()))


@dataclass(frozen=True)
class VocabularyTable:
    """A vocabulary in the format that llguidance reads.

    tokens:     bytes of each token.
    vocab_size: number of logits per token, not less than len(tokens).
    encode:     returns the token ids of a text, without special tokens.
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
        """Return tokens whose bytes are exactly `text`, which continues an answer, if the vocabulary has such tokens.

        SentencePiece vocabularies begin a text with a space. The tokens after the space, or after a character that no
        token joins with others, continue an answer.
        """
        text = text.decode("utf-8", errors="replace") if isinstance(text, bytes) else text
        data = text.encode("utf-8", errors="replace")
        for before in ("", _SEPARATE):
            ids = list(self.encode(before + text))
            at, size = len(ids), 0
            while at and size < len(data):
                at -= 1
                size += len(self.tokens[ids[at]])
            if b"".join(self.tokens[id_] for id_ in ids[at:]) == data:
                return ids[at:]
        return ids

    def tokenizer(self) -> llguidance.LLTokenizer:
        wrapper = llguidance.TokenizerWrapper(self)
        return llguidance.LLTokenizer(wrapper, n_vocab=self.vocab_size, eos_token=list(self.eos_token_ids))

    def pack(self) -> bytes:
        """Return all fields except `encode` as bytes. The bytes are sent to the trial process."""
        return codec.pack([self.tokens, self.special_token_ids, self.eos_token_ids, self.vocab_size])

    @classmethod
    def unpack(cls, packed: bytes) -> VocabularyTable:
        tokens, special, eos, vocab_size = codec.unpack(packed, codec.DETAILS)
        ids = {token: id_ for id_, token in enumerate(tokens) if len(token) == 1}
        return cls(
            tokens, special, eos, vocab_size, lambda text: [ids[b] for c in text.encode() if (b := bytes([c])) in ids]
        )


def compile_grammar(tokenizer: llguidance.LLTokenizer, structure: Mapping[str, Any]) -> llguidance.LLMatcher:
    """Compile a grammar, and return the matcher of an empty answer. The matcher has computed its first mask.

    structure: as in SamplingParams.structured_output, within the limits of grammar_limits.

    Raises InvalidGrammarError if the compiler rejects the grammar.
    """
    kind, value = structure["type"], structure.get("value")
    try:
        if kind in ("json_object", "json_schema"):
            schema = {"type": "object"} if kind == "json_object" else dict(value or {})
            grammar = llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=JSON_OPTIONS)
        elif kind == "regex":
            grammar = llguidance.LLMatcher.grammar_from_regex(str(value))
        elif kind == "choice":
            # Use one terminal, because a few thousand alternatives of a rule would exceed max_items_in_row.
            alternatives = " | ".join(json.dumps(text) for text in value or ())
            grammar = llguidance.LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {alternatives}")
        else:
            grammar = llguidance.LLMatcher.grammar_from_lark(str(value))
    except ValueError as error:
        raise InvalidGrammarError.of(str(error)) from error
    matcher = llguidance.LLMatcher(tokenizer, grammar, log_level=0, limits=llguidance.LLParserLimits(**_LIMITS))
    matcher.compute_bitmask()
    if matcher.is_error():
        raise InvalidGrammarError.of(matcher.get_error())
    return matcher


# --- the trial process ------------------------------------------------------------------------------------------------


def trial_process(vocabulary: VocabularyTable) -> SacrificialProcess:
    """Return the process in which grammars are compiled first. It starts when the first grammar is compiled."""
    return SacrificialProcess(__name__, memory_bytes=MEMORY_BYTES, stack_bytes=STACK_BYTES, setup=vocabulary.pack())


def try_grammar(process: SacrificialProcess, structure: Mapping[str, Any]) -> tuple[int, Mapping[str, Any]]:
    """Compile a grammar in the trial process.

    Return the number of bytes of memory that the compiled grammar takes, and the description that was compiled. In this
    description, a GBNF grammar is converted to Lark's notation.

    Raises:
        InvalidGrammarError: the compiler rejects the grammar, or it takes more than MAX_COMPILED_BYTES.
        ProcessLostError: the grammar has crashed the process, or its compilation takes more than COMPILE_SECONDS.
        ProcessStartError: the process cannot be started.
    """
    reply = json.loads(process.call(json.dumps(structure).encode(), timeout_seconds=COMPILE_SECONDS))
    if reply["error"] is not None:
        raise InvalidGrammarError(reply["error"])
    if reply["bytes"] > MAX_COMPILED_BYTES:
        raise InvalidGrammarError(
            f"it is too complex: compiled it takes {reply['bytes'] >> 20} MiB, at most {MAX_COMPILED_BYTES >> 20}"
        )
    return int(reply["bytes"]), reply["structure"] or structure


def _prepare(setup: bytes) -> Callable[[bytes], bytes]:
    tokenizer = VocabularyTable.unpack(setup).tokenizer()

    def handle(request: bytes) -> bytes:
        error, matcher, structure, before = None, None, json.loads(request), _resident_bytes()
        converted = None
        try:
            if structure["type"] == "grammar" and is_gbnf(str(structure.get("value"))):
                structure = converted = {"type": "grammar", "value": lark_of(structure["value"])}
                check_structure(converted)
            matcher = compile_grammar(tokenizer, structure)
        except InvalidSamplingParamsError as invalid:
            error = f"in Lark's notation, {invalid.allowed}"
        except ValueError as invalid:
            error = str(invalid)
        size = max(0, _resident_bytes() - before)
        del matcher  # the matcher had to exist until its memory was measured
        return json.dumps({"error": error, "bytes": size, "structure": converted}).encode()

    return handle


def _resident_bytes() -> int:
    """Return the resident memory of this process in bytes. Free memory that the allocator keeps is not included."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
    with open("/proc/self/statm") as pages:
        return int(pages.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


if __name__ == "__main__":
    serve(_prepare)
