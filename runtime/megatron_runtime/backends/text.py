"""The tokenizer of a model, and the grammars of its answers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property, lru_cache, partial
from threading import Lock
from typing import TYPE_CHECKING

from megatron_runtime.checkpoints.source import ModelSource
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.sampling.bad_words import token_sequences

if TYPE_CHECKING:  # tokenizers and llguidance take half a second to import: they are loaded at first use
    from megatron_runtime.sampling.structured_output import GrammarCompiler, GrammarState
    from megatron_runtime.tokenization import Detokenizer, Tokenizer

logger = logging.getLogger(__name__)

LARGE_VOCABULARY = 100_000
"""Tokens. Indexing 50,000 tokens takes 0.3 s, indexing 260,000 several seconds."""

LISTS_OF_BAD_WORDS = 32
"""That stay tokenized. A list of the largest size takes 4 ms."""


class ModelText:
    """Converts between text and tokens, and compiles grammars. Thread-safe.

    tokenizer: of the model, or a function that loads it at first use.
    padded_vocab_size: width of the model's logits, which may exceed the tokenizer's vocabulary; None if not known yet.
    """

    def __init__(self, tokenizer: Tokenizer | Callable[[], Tokenizer]) -> None:
        self.padded_vocab_size: int | None = None
        self._make_tokenizer = tokenizer
        self._grammars: GrammarCompiler | None = None
        self._grammar_lock = Lock()
        # The choices of a request, and often all requests of a client, have the same words.
        self._bad_words = lru_cache(LISTS_OF_BAD_WORDS)(self._token_sequences)

    @classmethod
    def of_model(cls, model: str | ModelSource) -> ModelText:
        """Return the text of a model reference or source. Its tokenizer renders no chat templates."""

        def load() -> Tokenizer:
            from megatron_runtime.tokenization import load_tokenizer

            return load_tokenizer(model if isinstance(model, str) else str(model.location), renders_chat=False)

        return cls(load)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        made = self._make_tokenizer
        return made() if callable(made) else made

    def tokenize_prompt(self, prompt: str, add_BOS: bool = False) -> list[int]:
        """Return the token ids of `prompt`. add_BOS: begin with the BOS token even if the tokenizer does not add it."""
        ids = self.tokenizer.encode(prompt)
        bos = self.tokenizer.bos_id
        return [bos, *ids] if add_BOS and bos is not None and ids[:1] != [bos] else ids

    def bad_words(self, texts: Iterable[str], *, vocab_size: int) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of SamplingParams.bad_words; see token_sequences()."""
        return self._bad_words(tuple(texts), vocab_size)

    def _token_sequences(self, texts: tuple[str, ...], vocab_size: int) -> tuple[tuple[int, ...], ...]:
        return token_sequences(texts, partial(self.tokenizer.encode, add_special=False), vocab_size=vocab_size)

    def detokenize(self, tokens: Iterable[int]) -> str:
        return self.tokenizer.decode(tokens)

    def detokenizer(self) -> Detokenizer:
        """Return a new incremental decoder."""
        return self.tokenizer.detokenizer()

    def begin_grammar(
        self, params: SamplingParams, generated: Sequence[int] = (), *, tenant: str = ""
    ) -> GrammarState | None:
        """Return the grammar state after the tokens `generated` of an answer; None without structured output.

        tenant: the masks of tenants are computed round robin.

        Raises:
            InvalidSamplingParamsError: the structure is not valid.
        """
        if params.structured_output is None:
            return None
        return self._grammar_compiler().begin(params.structured_output, generated, tenant=tenant)

    def is_grammar_known(self, params: SamplingParams) -> bool:
        """Return whether begin_grammar() needs to compile nothing."""
        return params.structured_output is None or (
            self._grammars is not None and self._grammars.is_known(params.structured_output)
        )

    def prepare_grammars(self) -> None:
        """Index a large vocabulary before requests arrive. Indexing holds the interpreter lock for a second or more,
        which would stall the streams of requests.
        """
        if self.padded_vocab_size is None or self.padded_vocab_size < LARGE_VOCABULARY:
            return
        try:
            self._grammar_compiler()
        except ValueError as error:  # the model has no tokenizer, or one without an end-of-sequence token
            logger.info("structured output is not available: %s", error)

    def close_grammars(self) -> None:
        """End the process that compiles untrusted grammars. The next grammar starts it again."""
        with self._grammar_lock:
            grammars, self._grammars = self._grammars, None
        if grammars is not None:
            grammars.close()

    def _grammar_compiler(self) -> GrammarCompiler:
        with self._grammar_lock:
            if self._grammars is None:
                from megatron_runtime.sampling.structured_output import GrammarCompiler

                vocab_size = self.padded_vocab_size or self.tokenizer.vocab_size
                self._grammars = GrammarCompiler(self.tokenizer, vocab_size=vocab_size)
            return self._grammars
