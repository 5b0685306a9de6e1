"""Reads and creates the messages of Megatron-Core's protocol. All functions are pure."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from enum import Enum
from typing import Any, NamedTuple, Self, TypeAlias

from megatron_runtime.protocol import limits
from megatron_runtime.protocol.epochs import TokenEpochs, continued_epochs
from megatron_runtime.protocol.headers import ErrorCode, Header
from megatron_runtime.protocol.messages import (
    PARAMETERS,
    PLAIN,
    REPLIES,
    Frames,
    MalformedMessageError,
    PackedTokens,
    RequestMeta,
    checked_tokens,
    extended_map,
    joined_list,
    pack,
    split_list,
    token_list_from_bytes,
    unpack,
    unpack_request,
)
from megatron_runtime.protocol.text import shown

logger = logging.getLogger(__name__)

Detokenize: TypeAlias = Callable[[list[int]], str] | None
"""A function that returns the text of token ids. None if no tokenizer is available."""

_SUBMIT, _REPLY, _PARTIAL = int(Header.SUBMIT_REQUEST), int(Header.ENGINE_REPLY), int(Header.ENGINE_REPLY_PARTIAL)
WANTS_RECORD = pack("return_record") + pack(True)
"""Parameter with which an engine of this project returns an answer's text and token times, as Megatron-Core does."""
_NIL = pack(None)
_MAX_REMEMBERED_BYTES = 2048
"""Maximum size of parameters that are cached for comparison with later requests."""
_TO_PARTIAL = {"log_probs": "new_log_probs", "top_n_logprobs": "new_top_n_logprobs"}
_RETURNS_PROMPT = "return_prompt_tokens"
"""A parameter that every client of 0.17 and later sends."""
PER_TOKEN = frozenset(_TO_PARTIAL)
"""Names of per-token details in a native partial. In a reply they have the prefix `generated_`."""
_PROMPT_DETAILS = ("prompt_log_probs", "prompt_top_n_logprobs")


class FrameForm(Enum):
    """How a peer with Megatron-Core's protocol divides messages into frames.

    The value of each member is the first release of Megatron-Core that uses this division.
    """

    ONE_FRAME = "0.17"
    BODIES = "0.20"
    """The first frame has the header and the fields for the coordinator. Prompts and replies follow as separate
    frames.
    """

    def answer(self, header: int, number: int, content: dict[str, Any]) -> Frames:
        """Return the frames of an ENGINE_REPLY or ENGINE_REPLY_PARTIAL to a client.

        number: the client's id of the request.

        Raises MalformedMessageError if `content` is nested too deeply.
        """
        if self is FrameForm.ONE_FRAME:
            return [pack([header, number, content])]
        return [pack([header, number]), pack(content)]


# --- requests ---------------------------------------------------------------------------------------------------------


class PlainParams(NamedTuple):
    """The parameters of a client's request, and the values that a coordinator reads from them.

    packed: parameters as the client sent them.
    native: packed parameters for an engine of this project.
    seed:   seed for sampling; None if the coordinator chooses one.
    returns_prompt: the client requests the tokens of its prompt.
    keeps_blocks: the client requests that the engine keeps the KV blocks.
    has_every_field: the answer must contain every field. Megatron-Core clients since 0.17 read each field by key.
    """

    packed: bytes
    native: bytes
    streaming: bool
    seed: int | None
    priority: int
    cache_salt: str
    returns_prompt: bool
    keeps_blocks: bool
    has_every_field: bool

    @classmethod
    def read(cls, packed: bytes) -> Self:
        """Return the parameters in a packed map. A value of a wrong type is ignored.

        Raises MalformedMessageError if the map cannot be read.
        """
        params = unpack(packed, PARAMETERS)
        if type(params) is not dict:
            raise MalformedMessageError(f"SUBMIT_REQUEST with parameters {shown(params)}: want a map")
        seed, priority, salt = params.get("seed"), params.get("priority"), params.get("cache_salt")
        return cls(
            packed=packed,
            native=extended_map(packed, WANTS_RECORD, 1),
            streaming=bool(params.get("streaming")),
            seed=seed if type(seed) is int and 0 <= seed < 1 << 64 else None,
            priority=priority if type(priority) is int else 0,
            cache_salt=salt[: limits.MAX_SALT_CHARACTERS] if isinstance(salt, str) else "",
            returns_prompt=bool(params.get(_RETURNS_PROMPT)),
            keeps_blocks=bool(params.get("do_kv_handoff")),
            has_every_field=_RETURNS_PROMPT in params,
        )


_read_again = functools.lru_cache(maxsize=256)(PlainParams.read)
"""PlainParams.read() with a cache, because most requests of a client have the same parameters."""


class OpenRequest(NamedTuple):
    """The data of a client's request that are needed to create its answer.

    form:   frame format of the client's messages.
    prompt: the packed prompt (a list of token ids, or a text), as the client sent it.
    """

    number: int
    form: FrameForm
    prompt: bytes
    is_text: bool
    params: PlainParams


def read_submit(frames: Frames, *, randbits: Callable[[int], int]) -> tuple[OpenRequest, bytes, RequestMeta]:
    """Read SUBMIT_REQUEST of a client. Return the request, its prompt, and its metadata for the core.

    The message has one frame, `[20, id, prompt, params]`, or four frames: `[20, id, params, …]`, the prompt, the
    hashes of its blocks, and the media. The hashes are not read. The returned prompt is UTF-8 text, or the token ids
    as the client sent them.

    Raises MalformedMessageError.
    """
    items = split_list(frames[0])
    if len(frames) == 1 and len(items) >= 4:
        form, (number, prompt, packed, *media) = FrameForm.ONE_FRAME, items[1:]
    elif len(frames) == 4 and len(items) >= 3:
        form, (number, packed, *media), (prompt,) = FrameForm.BODIES, items[1:], split_list(joined_list(frames[1:2]))
        media.append(frames[3])
    else:
        raise MalformedMessageError(
            f"SUBMIT_REQUEST of {len(items)} elements in {len(frames)} frames: want [20, id, prompt, params], or "
            "[20, id, params, media] and frames with the prompt, its block hashes and the media"
        )
    for item in media:
        if item != _NIL:
            raise MalformedMessageError("SUBMIT_REQUEST with multimodal data: this coordinator takes text only")
    identity = unpack_request(number)
    if type(identity) is not int or identity < 0:
        raise MalformedMessageError(f"SUBMIT_REQUEST {shown(identity)}: want an id from 0")
    params = _read_again(packed) if len(packed) <= _MAX_REMEMBERED_BYTES else PlainParams.read(packed)
    is_text = _is_text(prompt)
    if not is_text and not _is_list(prompt):
        raise MalformedMessageError(f"SUBMIT_REQUEST with a prompt of {len(prompt)} bytes: want a text or token ids")
    prompt = prompt if is_text else PackedTokens(prompt)
    body = unpack(prompt, PLAIN).encode("utf-8", "replace") if is_text else prompt
    seed = params.seed if params.seed is not None else randbits(64)
    meta = RequestMeta(params.streaming, seed, None, is_text, params.priority, params.cache_salt)
    return OpenRequest(identity, form, prompt, is_text, params), body, meta


def _is_text(data: bytes) -> bool:
    """Return whether a packed value is a string."""
    return len(data) > 0 and (data[0] & 0xE0 == 0xA0 or data[0] in b"\xd9\xda\xdb")


def _is_list(data: bytes) -> bool:
    return len(data) > 0 and (data[0] & 0xF0 == 0x90 or data[0] in b"\xdc\xdd")


def submit_frames(form: FrameForm, dispatch_id: int, prompt: bytes, params: bytes) -> Frames:
    """Return the frames of a SUBMIT_REQUEST for an engine. `prompt` and `params` are packed."""
    begin = b"\x94" + pack(_SUBMIT) + pack(dispatch_id)
    if form is FrameForm.ONE_FRAME:
        return [begin + prompt + params]
    return [begin + params + _NIL, prompt, _NIL]


# --- answers of engines -----------------------------------------------------------------------------------------------


class EngineOutput(NamedTuple):
    """Output of an engine for one of its requests.

    tokens: int32 tokens. A partial contains the new tokens. A final answer contains all tokens of this dispatch.
    needs_text: the coordinator must add the text of a final answer.
    values: the map that the engine sent.
    """

    number: int
    tokens: bytes
    needs_text: bool
    values: dict[str, Any]

    def details(self) -> dict[str, Any]:
        """The log-probabilities of a partial, by the names of this project's protocol."""
        found = {name: self.values.get(_TO_PARTIAL.get(name, name)) for name in (*_TO_PARTIAL, *_PROMPT_DETAILS)}
        return {name: value for name, value in found.items() if value is not None}

    def continue_epochs(self, epochs: TokenEpochs, *, prompt_length: int, num_given: int) -> None:
        """Prepend the epochs of earlier tokens to the epochs that the engine reports.

        If the engine reports no epochs, or if `epochs` is empty, change nothing.

        epochs:        epochs of the generated tokens that the dispatch contained, by token index.
        prompt_length: number of tokens of the prompt, without generated tokens.
        num_given:     number of generated tokens that the dispatch contained.
        """
        match self.values.get("policy_epoch"):
            case [*spans] if epochs and spans and all(map(_is_span, spans)):
                joined = continued_epochs(epochs, spans, prompt_length=prompt_length, num_generated=num_given)
                self.values["policy_epoch"] = [list(span) for span in joined]

    def plain_reply(self, *, given: bytes, detokenize: Detokenize) -> dict[str, Any]:
        """Return the map of a final answer for a client of Megatron-Core.

        given: generated tokens that the dispatch contained; int32.
        """
        if given:
            self.values["generated_tokens"] = token_list_from_bytes(given + self.tokens)
        if self.needs_text and self.values.get("generated_text") is None:
            self.values["generated_text"] = text_of(self.values.get("generated_tokens") or [], detokenize)
        return self.values

    def native_reply(self, *, num_given: int) -> bytes:
        """Return the packed reply map for a FINAL. Fields without a value are omitted.

        num_given: number of generated tokens that the dispatch contained.
        """
        reply = {
            key: value
            for key, value in self.values.items()
            if value is not None and key not in ("request_id", "generated_tokens")
        }
        reply.setdefault("status", "COMPLETED")
        reply.setdefault("finish_reason", "error" if reply["status"] == "FAILED" else "stop")
        if reply["status"] == "FAILED" and "error" not in reply:
            reply["error"] = _error_of(reply.get("events"))
        reply["generated_length"] = num_given + len(self.tokens) // 4
        if num_given and "generated_log_probs" in reply:
            reply["log_probs_from"] = num_given
        try:
            return pack(reply)
        except MalformedMessageError as error:
            return failed_reply(ErrorCode.ENGINE_FAILED, f"unreadable answer of the engine: {error}")


def _is_span(span: Any) -> bool:
    return isinstance(span, list) and len(span) == 2 and all(type(number) is int for number in span)


def failed_reply(code: ErrorCode, message: str) -> bytes:
    """Return the packed map of a FINAL message for a request that its translator could not translate."""
    error = {"code": int(code), "type": code.name, "message": message, "is_transient": False}
    return pack({"status": "FAILED", "finish_reason": "error", "error": error})


def read_outputs(frames: Frames, *, is_final: bool) -> list[EngineOutput]:
    """Return the outputs in an ENGINE_REPLY or ENGINE_REPLY_PARTIAL.

    The message has one frame, `[header, [map, …]]`, or a frame `[header, [id, …]]` and then one frame per map. In the
    second form of an ENGINE_REPLY, `[id, needs_detokenize]` replaces each id.

    Raises MalformedMessageError.
    """
    match unpack(frames[0], REPLIES):
        case [_, list(items), *_]:
            pass
        case other:
            raise MalformedMessageError(f"output of an engine {shown(other)}: want [header, list]")
    if len(frames) == 1:
        maps = items
        items = [one.get("request_id") if isinstance(one, dict) else None for one in maps]
    else:
        maps = unpack(joined_list(frames[1:]), REPLIES)
    if len(items) != len(maps):
        raise MalformedMessageError(f"output of an engine: {len(items)} ids for {len(maps)} frames")
    name = "generated_tokens" if is_final else "new_tokens"
    return [_output(item, values, name) for item, values in zip(items, maps, strict=True)]


def _output(item: Any, values: Any, name: str) -> EngineOutput:
    """Return one output of an engine. Raises MalformedMessageError.

    item: the id, or `[id, needs_detokenize]`.
    name: key of the map entry that has the tokens.
    """
    number, needs_text = item if type(item) is list and len(item) == 2 else (item, True)
    if type(number) is not int:
        raise MalformedMessageError(f"output of an engine: request_id {shown(number)}: want an integer")
    if type(values) is not dict:
        raise MalformedMessageError(f"output of an engine {shown(values)}: want a map")
    tokens = values.get(name) or []
    if type(tokens) is not list:
        raise MalformedMessageError(f"output of an engine: {name} {shown(tokens)}: want a list")
    return EngineOutput(number, checked_tokens(tokens), bool(needs_text), values)


def _error_of(events: Any) -> dict[str, Any]:
    """Return the last error among the events of a request, in the form of `error` in a reply.

    The result is empty if there is no error.
    """
    errors = [event for event in events or () if isinstance(event, dict) and "ERROR" in str(event.get("type"))]
    last = errors[-1].get("payload") if errors else None
    last = last if isinstance(last, dict) else {}
    is_transient = bool(errors) and errors[-1]["type"] == "ERROR_TRANSIENT"
    code = ErrorCode.ENGINE_FAILED if is_transient else ErrorCode.INVALID_REQUEST
    message = str(last.get("message", "the engine gave no reason"))
    return {"code": int(code), "type": code.name, "message": message, "is_transient": is_transient}


# --- answers to clients -----------------------------------------------------------------------------------------------

_FIELDS = (
    "generated_text",
    "generated_length",
    "generated_log_probs",
    "generated_top_n_logprobs",
    "prompt_log_probs",
    "prompt_top_n_logprobs",
    "tpot",
)
"""Reply fields that Megatron-Core's request class has in every release. The class rejects other fields."""
_EPOCHS = ("policy_epoch", "kv_cache_epoch")
_EVERY_FIELD: dict[str, Any] = {
    **dict.fromkeys((*_FIELDS, "prompt", "prompt_tokens", "prompt_length", "inference_parameters")),
    **dict.fromkeys(("arrival_time", "encoder_prompt", "segments", "generated_segments", "generated_sequence_lengths")),
    **dict.fromkeys(("remaining_prompt_tokens", *_EPOCHS, "latency", "routing_indices", "stop_word_ids")),
    **dict.fromkeys(("block_size_tokens", "ttft")),
    **dict.fromkeys(("finished_chunk_token_count", "cg_wait_iters", "num_cached_tokens"), 0),
    "enable_prefix_caching": False,
    "tpot": [],
    "precomputed_block_hashes": [],
}
"""Fields of a request of 0.17 and later, with defaults. A reply gets all of them, because Megatron-Core's server reads
them by key.
"""
_MEASURED = ("prompt_length", "num_cached_tokens", "ttft")


def reply_frames(
    request: OpenRequest,
    tokens: bytes,
    reply: bytes | dict[str, Any],
    *,
    before: dict[str, list[Any]],
    detokenize: Detokenize,
) -> Frames:
    """Convert a FINAL with `tokens` and the reply map `reply` to the frames of an ENGINE_REPLY for a client.

    A `reply` that is a dict comes from an engine of Megatron-Core, and is passed on unchanged. If `reply` is packed,
    this function adds the text if the engine sent none.

    before: log-probabilities of tokens that an earlier engine generated, by their names in a partial.
    """
    try:
        values = reply if isinstance(reply, dict) else unpack(reply, PLAIN)
        values = values if isinstance(values, dict) else {}
        if before:
            values = _with_log_probs(values, before, count=len(tokens) // 4)
        if isinstance(reply, dict):
            values["request_id"] = request.number
        else:
            values = _reply_of_native(request, token_list_from_bytes(tokens), values, detokenize)
        return request.form.answer(_REPLY, request.number, values)
    except MalformedMessageError as error:
        text = f"unreadable answer of the engine: {error}"
        return failed_frames(request.form, request.number, ErrorCode.ENGINE_FAILED, text)


def _reply_of_native(
    request: OpenRequest, tokens: list[int], reply: dict[str, Any], detokenize: Detokenize
) -> dict[str, Any]:
    """Convert the reply map of an engine of this project to the map of an ENGINE_REPLY."""
    number = request.number
    fields = {name: reply[name] for name in _FIELDS if reply.get(name) is not None}
    if request.is_text:
        fields["prompt"] = unpack(request.prompt, PLAIN)
    fields |= {name: reply[name] for name in _EPOCHS if _has_epoch(reply.get(name))}
    if (routing := _tensor_of(reply.get("routing_indices"))) is not None:
        fields["routing_indices"] = routing
    if "generated_text" not in fields and (answer := text_of(tokens, detokenize)) is not None:
        fields["generated_text"] = answer
    params = request.params
    if params.has_every_field or request.form is FrameForm.BODIES:
        fields |= {name: reply[name] for name in _MEASURED if reply.get(name) is not None}
        if params.returns_prompt and not request.is_text:
            fields["prompt_tokens"] = ("tensor", unpack(request.prompt, PLAIN))
        fields = {**_EVERY_FIELD, **fields, "sampling_params": unpack(params.packed, PARAMETERS)}
    cause, events = reply.get("error"), []
    if isinstance(cause, dict):
        events = _error_events(
            number, cause.get("code"), str(cause.get("message")), cause.get("type"), cause.get("is_transient")
        )
    return {**_base_fields(number, str(reply.get("status")), tokens, events), **fields}


def _with_log_probs(reply: dict[str, Any], before: dict[str, list[Any]], *, count: int) -> dict[str, Any]:
    """Return `reply` with the log-probabilities of earlier tokens prepended.

    before: log-probabilities of earlier tokens, by their names in a partial.
    count:  number of tokens of the whole answer.
    """
    joined = {}
    for name, values in before.items():
        last = reply.get(key := f"generated_{name}")
        if isinstance(last, list) and 0 < count - len(last) <= len(values):
            joined[key] = values[: count - len(last)] + last
    return {**reply, **joined}


def text_of(tokens: list[int], detokenize: Detokenize) -> str | None:
    if detokenize is None:
        return None
    try:
        return detokenize(tokens)
    except BaseException as error:  # a panic of the tokenizers library is not an Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        logger.warning("an answer of %d tokens has no text: %r", len(tokens), error)
        return None


def _base_fields(number: int, status: str, tokens: list[int], events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields that Megatron-Core's deserialize() always reads."""
    return {
        "request_id": number,
        "status": status,
        "generated_tokens": tokens,
        "sampling_params": None,
        "inference_parameters": None,
        "events": events,
    }


def _tensor_of(packed: Any) -> Any:
    """Convert a packed array of an engine of this project to Megatron-Core's form. Return other values unchanged."""
    match packed:
        case ["ndarray", {"data": bytes()}]:
            # NumPy is imported when it is needed, not at the start.
            from megatron_runtime.requests.request import unpack_value

            try:
                return ("tensor", unpack_value(packed).tolist())
            except (TypeError, ValueError, KeyError) as error:
                logger.warning("an array of an answer cannot be read: %r", error)
                return None
    return packed


def _has_epoch(spans: Any) -> bool:
    return isinstance(spans, list) and any(isinstance(span, list) and span[1:] != [0] for span in spans)


_ERROR_CLASSES = {
    ErrorCode.QUEUE_FULL: "RequestOverflowError",
    ErrorCode.TOO_LARGE: "MaxSequenceLengthOverflowError",
}
_SENT_CLASSES = frozenset(
    {"RequestOverflowError", "TokenOverflowError", "MaxSequenceLengthOverflowError", "BlockOverflowError"}
)
"""Error classes of this project's engines that exist in Megatron-Core under the same name."""
_PERMANENT = frozenset({ErrorCode.INVALID_REQUEST, ErrorCode.TOO_LARGE, ErrorCode.ENGINE_FAILED, ErrorCode.UNSUPPORTED})


def _error_events(
    number: int, code: Any, message: str, name: Any = None, is_transient: bool | None = None
) -> list[dict[str, Any]]:
    """Return an error as the events of a request. The events have no timestamps, because the client sets them.

    name:         class of the error at the engine.
    is_transient: whether a retry can succeed. If None, the value depends on `code`.
    """
    if is_transient is None:
        is_transient = code not in _PERMANENT
    payload = {
        "type": name if name in _SENT_CLASSES else _ERROR_CLASSES.get(code, "ContextOverflowError"),
        "request_id": number,
        "message": message,
        "is_transient": is_transient,
    }
    kind = "ERROR_TRANSIENT" if is_transient else "ERROR_NONTRANSIENT"
    return [
        {"timestamp": None, "type": kind, "payload": payload},
        {"timestamp": None, "type": "FAIL", "payload": None},
    ]


def failed_frames(form: FrameForm, number: int, code: ErrorCode, message: str) -> Frames:
    """Return the frames of an ENGINE_REPLY for a request that failed at the coordinator."""
    return form.answer(_REPLY, number, _base_fields(number, "FAILED", [], _error_events(number, code, message)))


def partial_frames(request: OpenRequest, tokens: bytes, details: dict[str, Any]) -> Frames:
    """Return the frames of an ENGINE_REPLY_PARTIAL to a client."""
    content = {"request_id": request.number, "new_tokens": token_list_from_bytes(tokens)}
    content.update({_TO_PARTIAL.get(key, key): value for key, value in details.items()})
    return request.form.answer(_PARTIAL, request.number, content)
