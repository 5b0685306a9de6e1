"""Targets that parse input of clients, peers and servers: messages, bodies, event streams, grammars, templates."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from machine import scaled
from pydantic import BaseModel, ValidationError

from megatron_runtime.cli.api_client import EventReader, StreamFailedError, StreamFormatError, parts_of
from megatron_runtime.protocol.messages import MalformedMessageError, decode
from megatron_runtime.requests.sampling_params import InvalidSamplingParamsError, SamplingParams
from megatron_runtime.sampling import grammar_compiler
from megatron_runtime.sampling.structured_output import GrammarCompiler
from megatron_runtime.server.errors import ApiError, from_validation
from megatron_runtime.server.guards import JsonLimitError, JsonScan, NotJsonError, load_json
from megatron_runtime.server.openai.jobs import structured_output
from megatron_runtime.server.openai.schema import ChatRequest, CompletionRequest, GenerationRequest
from megatron_runtime.tokenization import chat_template
from megatron_runtime.tokenization.chat_template import ChatTemplate, ChatTemplateError
from megatron_runtime.tokenization.loader import backend_from_json
from tests.fuzz.harness import Target
from tests.fuzz.strategies import mutated, mutated_json

HELPER_SECONDS = scaled(0.3)
"""Replaces the product's time limits of helper processes, which endless templates and grammars would use up."""
_MSGPACK = [bytes([code]) for code in (0x80, 0x8F, 0x90, 0x91, 0x9F, 0xC0, 0xC4, 0xC6, 0xC9, 0xDB, 0xDD, 0xDF)]
_JINJA = [
    b"{% for m in messages %}",
    b"{% endfor %}",
    b"{{ messages[0].content * 99999999 }}",
    b"{% for i in range(1000000000) %}",
    b"{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
    b"{% set x = namespace(v='a') %}",
    b"{{ ''.__class__.__mro__ }}",
    b"{{ 10 ** 10 ** 10 }}",
]


def _body(model: type[BaseModel], data: bytes) -> None:
    scan = JsonScan()
    scan.feed(data)
    try:
        request = model.model_validate_json(data, context=scan)
    except ValidationError as error:
        raise from_validation(error.errors(include_url=False, include_context=False)) from error
    assert isinstance(request, GenerationRequest)
    structured_output(request)


def _body_target(name: str, model: type[BaseModel]) -> Target:
    run: Callable[[bytes], object] = partial(_body, model)
    return Target(name=name, run=run, errors=(JsonLimitError, NotJsonError, ApiError), strategy=mutated_json)


def _event_stream(data: bytes) -> None:
    reader = EventReader()
    middle = len(data) // 2
    for part in (data[:middle], data[middle:]):
        for event in reader.feed(part):
            list(parts_of(event))


class _Bytes:
    """A vocabulary of single bytes and an end token."""

    vocab_size = 257
    eos_ids = (256,)
    special_ids = frozenset({256})

    def token_bytes(self, id_: int) -> bytes:
        return bytes([id_]) if id_ < 256 else b"<end>"

    def encode(self, text: str, *, add_special: bool = True) -> list[int]:
        return list(text.encode(errors="replace"))


@cache
def _compiler() -> GrammarCompiler:
    return GrammarCompiler(_Bytes(), vocab_size=_Bytes.vocab_size)


def _grammar(data: bytes) -> None:
    """Compile `data`, a structured output of SamplingParams as JSON."""
    try:
        structure = load_json(data.decode())
    except ValueError:
        return
    grammar_compiler.COMPILE_SECONDS = HELPER_SECONDS
    params = SamplingParams(structured_output=structure)
    if params.structured_output is not None:
        _compiler().begin(params.structured_output, list(b'{"a'))


def _chat_template(data: bytes) -> None:
    chat_template.RENDER_SECONDS = HELPER_SECONDS
    template = ChatTemplate(data.decode(errors="replace"), special={"bos_token": "<s>", "eos_token": "</s>"})
    template.render([{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Hi"}])


def _tokenizer(data: bytes) -> None:
    backend = backend_from_json(data, name=str(Path("tokenizer.json")))
    backend.decode(backend.encode("Hello, world").ids)


TARGETS: tuple[Target, ...] = (
    Target(
        name="message",
        run=lambda data: decode([data]),
        errors=(MalformedMessageError,),
        strategy=lambda corpus: mutated(corpus, _MSGPACK),
    ),
    _body_target("chat_body", ChatRequest),
    _body_target("completion_body", CompletionRequest),
    Target(name="event_stream", run=_event_stream, errors=(StreamFormatError, StreamFailedError)),
    Target(
        name="grammar",
        run=_grammar,
        errors=(InvalidSamplingParamsError,),
        strategy=mutated_json,
    ),
    Target(
        name="chat_template",
        run=_chat_template,
        errors=(ChatTemplateError,),
        strategy=lambda corpus: mutated(corpus, _JINJA),
    ),
    Target(name="tokenizer", run=_tokenizer, errors=(ValueError,), strategy=mutated_json),
)
