"""The messages of Megatron-Core's protocol, and the parts of them that become fields of native messages. Pure."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from megatron_runtime.protocol import limits
from megatron_runtime.protocol.headers import ErrorCode, Header
from megatron_runtime.protocol.messages import (
    PLAIN,
    Frames,
    MalformedMessageError,
    RequestMeta,
    extended_map,
    pack,
    split_maps,
    token_list_from_bytes,
    tokens_to_bytes,
    unpack,
)
from megatron_runtime.protocol.text import shown

logger = logging.getLogger(__name__)

Detokenize: TypeAlias = Callable[[list[int]], str] | None
"""Returns the text of token ids; None without a tokenizer that can do it."""

_MAX_TOKEN = (1 << 31) - 1
_SUBMIT, _REPLY, _PARTIAL = int(Header.SUBMIT_REQUEST), int(Header.ENGINE_REPLY), int(Header.ENGINE_REPLY_PARTIAL)
WANTS_RECORD = pack("return_record") + pack(True)
"""Entry of the parameters: an engine of this project adds the text and the times, which Megatron's record has."""
_AS_SENT = pack("plain") + pack(True)
"""First entry of the reply map of an engine for a plain client: the other entries are as the engine sent them."""
_TEXT = pack("generated_text")
_TO_PARTIAL = {"log_probs": "new_log_probs", "top_n_logprobs": "new_top_n_logprobs"}
_RETURNS_PROMPT = "return_prompt_tokens"
"""A parameter that every client of 0.17 and later sends."""
PER_TOKEN = frozenset(_TO_PARTIAL)
"""Details of each token, by the names of a native partial. In a reply they begin with `generated_`."""
_PROMPT_DETAILS = ("prompt_log_probs", "prompt_top_n_logprobs")


# --- requests ---------------------------------------------------------------------------------------------------------


class OpenRequest(NamedTuple):
    """A request of a client, as its answer needs it.

    params: the packed map of parameters.
    text:   the prompt, if it is a text.
    tokens: int32; the prompt, if the client asks for it and it is not a text.
    has_every_field: the client's release reads every field of a request by key, as 0.17 and later do.
    """

    number: int
    params: bytes
    text: str | None
    tokens: bytes | None
    has_every_field: bool


class PlainSubmit(NamedTuple):
    """SUBMIT_REQUEST of a client. `prompt` is a text or int32 tokens."""

    request: OpenRequest
    prompt: str | bytes
    meta: RequestMeta

    @classmethod
    def read(cls, frame: bytes, *, randbits: Callable[[int], int]) -> PlainSubmit:
        """Raises MalformedMessageError."""
        match items := unpack(frame, PLAIN):
            case [_, int(number), (str() | list()) as prompt, dict(params), *rest] if number >= 0:
                if rest and rest[0] is not None:
                    raise MalformedMessageError("SUBMIT_REQUEST with multimodal data: this coordinator takes text only")
                meta = _meta_of(params, is_text=isinstance(prompt, str), randbits=randbits)
                body = prompt if isinstance(prompt, str) else _packed(prompt)
                text = body if isinstance(body, str) else None
                tokens = body if isinstance(body, bytes) and params.get(_RETURNS_PROMPT) else None
                request = OpenRequest(number, pack(params), text, tokens, _RETURNS_PROMPT in params)
                return cls(request, body, meta)
        raise MalformedMessageError(f"SUBMIT_REQUEST {shown(items)}: want [20, id, prompt, params]")


def _meta_of(params: dict[Any, Any], *, is_text: bool, randbits: Callable[[int], int]) -> RequestMeta:
    """Return the fields of a request that the coordinator reads. A value of a wrong type is ignored."""
    seed, priority, salt = params.get("seed"), params.get("priority"), params.get("cache_salt")
    return RequestMeta(
        streaming=bool(params.get("streaming")),
        seed=seed if type(seed) is int and 0 <= seed < 1 << 64 else randbits(64),
        text=is_text,
        priority=priority if type(priority) is int else 0,
        cache_salt=salt[: limits.MAX_SALT_CHARACTERS] if isinstance(salt, str) else "",
    )


def _packed(tokens: Any) -> bytes:
    """Return token ids as int32. Raises MalformedMessageError."""
    if not isinstance(tokens, list):
        raise MalformedMessageError(f"tokens {shown(tokens)}: want a list")
    # A list may have a million tokens: no Python code runs for each.
    if tokens and not (set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) <= _MAX_TOKEN):
        wrong = next(token for token in tokens if type(token) is not int or not 0 <= token <= _MAX_TOKEN)
        raise MalformedMessageError(f"token {shown(wrong)}: want an integer from 0 to {_MAX_TOKEN}")
    return tokens_to_bytes(tokens)


def submit_frames(dispatch_id: int, prompt: str | list[int], params: bytes) -> Frames:
    """SUBMIT_REQUEST for an engine. params: a packed map."""
    return [b"\x94" + pack(_SUBMIT) + pack(dispatch_id) + pack(prompt) + params]


# --- answers of engines -----------------------------------------------------------------------------------------------


_FINAL_NAMES = {name: len(pack(name)) for name in ("request_id", "generated_tokens", "generated_text")}
_PARTIAL_NAMES = {name: len(pack(name)) for name in ("request_id", "new_tokens")}


class EngineOutput(NamedTuple):
    """Output of an engine for one of its requests. `rest` are the other entries, packed as the engine sent them.

    tokens: int32; of a partial the new ones, of a final all of this dispatch.
    """

    number: int
    tokens: bytes
    text: Any
    rest: bytes

    def details(self) -> dict[str, Any]:
        """The log-probabilities of a partial, by their native names."""
        rest = unpack(self.rest, PLAIN)
        found = {name: rest.get(_TO_PARTIAL.get(name, name)) for name in (*_TO_PARTIAL, *_PROMPT_DETAILS)}
        return {name: value for name, value in found.items() if value is not None}

    def reply_as_sent(self) -> bytes:
        """The reply map with every entry as it was sent, without the id and the tokens, which FINAL has.

        A text comes first; without one the client's translator adds it.
        """
        first = _AS_SENT if self.text is None else _AS_SENT + _TEXT + pack(self.text)
        return extended_map(self.rest, first, 1 if self.text is None else 2, first=True)

    def native_reply(self, *, num_given: int) -> bytes:
        """The reply map of FINAL, with every entry that is not nil. num_given: tokens that the dispatch had."""
        reply = {key: value for key, value in unpack(self.rest, PLAIN).items() if value is not None}
        if self.text is not None:
            reply["generated_text"] = self.text
        reply.setdefault("status", "COMPLETED")
        reply.setdefault("finish_reason", "error" if reply["status"] == "FAILED" else "stop")
        if reply["status"] == "FAILED" and "error" not in reply:
            reply["error"] = _error_of(reply.get("events"))
        reply["generated_length"] = num_given + len(self.tokens) // 4
        if num_given and "generated_log_probs" in reply:
            reply["log_probs_from"] = num_given
        return pack(reply)


def read_outputs(frame: bytes, *, is_final: bool) -> list[EngineOutput]:
    """ENGINE_REPLY `[21, [request, …]]` and ENGINE_REPLY_PARTIAL `[22, [frame, …]]`. Raises MalformedMessageError."""
    outputs = []
    for values, rest in split_maps(frame, _FINAL_NAMES if is_final else _PARTIAL_NAMES):
        number, tokens = values.get("request_id"), values.get("generated_tokens" if is_final else "new_tokens") or []
        if type(number) is not int:
            raise MalformedMessageError(f"output of an engine: request_id {shown(number)}: want an integer")
        outputs.append(EngineOutput(number, _packed(tokens), values.get("generated_text"), rest))
    return outputs


def _map_header_bytes(data: bytes) -> int:
    return 1 if data[0] & 0xF0 == 0x80 else 3 if data[0] == 0xDE else 5


def _error_of(events: Any) -> dict[str, Any]:
    """Return the last error among the events of a request, as `error` of a reply."""
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
"""Fields of a reply that Megatron-Core's request class has in every release. It rejects unknown ones."""
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
"""Fields of a request of 0.17 and later, with the values of one that lacks them. Its server reads them by key."""
_MEASURED = ("prompt_length", "num_cached_tokens", "ttft")


def reply_frames(request: OpenRequest, tokens: bytes, raw: bytes, *, detokenize: Detokenize) -> Frames:
    """ENGINE_REPLY to a client for a FINAL with these tokens and this reply map.

    The text of the answer is added here if the engine sent none.
    """
    number, token_list = request.number, token_list_from_bytes(tokens)
    begin = _map_header_bytes(raw) if raw else 0
    if raw.startswith(_AS_SENT, begin):
        known: dict[str, Any] = {"request_id": number, "generated_tokens": token_list}
        entries = raw[begin + len(_AS_SENT) :]
        if not entries.startswith(_TEXT):
            known["generated_text"] = _text_of(token_list, detokenize)
        count = (raw[0] & 0x0F if begin == 1 else int.from_bytes(raw[1:begin], "big")) - 1
        return [b"\x93" + pack(_REPLY) + pack(number) + extended_map(pack(known), entries, count)]
    try:
        reply = unpack(raw, PLAIN)
    except MalformedMessageError as error:
        return failed_frames(number, ErrorCode.ENGINE_FAILED, f"unreadable answer of the engine: {error}")
    reply = reply if isinstance(reply, dict) else {}
    fields = {name: reply[name] for name in _FIELDS if reply.get(name) is not None}
    if request.text is not None:
        fields["prompt"] = request.text
    fields |= {name: reply[name] for name in _EPOCHS if _has_epoch(reply.get(name))}
    if (routing := _tensor_of(reply.get("routing_indices"))) is not None:
        fields["routing_indices"] = routing
    if "generated_text" not in fields and (answer := _text_of(token_list, detokenize)) is not None:
        fields["generated_text"] = answer
    if request.has_every_field:
        fields |= {name: reply[name] for name in _MEASURED if reply.get(name) is not None}
        if request.tokens is not None:
            fields["prompt_tokens"] = ("tensor", token_list_from_bytes(request.tokens))
        fields = {**_EVERY_FIELD, **fields, "sampling_params": unpack(request.params, PLAIN)}
    cause, events = reply.get("error"), []
    if isinstance(cause, dict):
        events = _error_events(
            number, cause.get("code"), str(cause.get("message")), cause.get("type"), cause.get("is_transient")
        )
    return _reply(number, str(reply.get("status")), token_list, events, fields)


def joined_log_probs(raw: bytes, before: dict[str, list[Any]], *, count: int) -> bytes:
    """Return the reply map of an answer of `count` tokens with the log-probabilities of all of them.

    before: by the names of a partial, of the first tokens. The reply has those of its engine, which may have continued
            the request of another one.
    """
    try:
        reply = unpack(raw, PLAIN)
    except MalformedMessageError:
        return raw  # which reply_frames() reports
    lists = {
        key: (values, reply[key])
        for name, values in before.items()
        if isinstance(reply, dict) and isinstance(reply.get(key := f"generated_{name}"), list)
    }
    joined = {
        key: values[: count - len(own)] + own
        for key, (values, own) in lists.items()
        if 0 < count - len(own) <= len(values)
    }
    return pack({**reply, **joined}) if joined else raw


def _text_of(tokens: list[int], detokenize: Detokenize) -> str | None:
    if detokenize is None:
        return None
    try:
        return detokenize(tokens)
    except BaseException as error:  # a panic of the tokenizers library is no Exception
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        logger.warning("an answer of %d tokens has no text: %r", len(tokens), error)
        return None


def _reply(
    number: int, status: str, tokens: list[int], events: list[dict[str, Any]], fields: dict[str, Any] | None = None
) -> Frames:
    """ENGINE_REPLY with the fields that Megatron-Core's deserialize() reads in any case."""
    reply = {
        "request_id": number,
        "status": status,
        "generated_tokens": tokens,
        "sampling_params": None,
        "inference_parameters": None,
        "events": events,
        **(fields or {}),
    }
    return [pack([_REPLY, number, reply])]


def _tensor_of(packed: Any) -> Any:
    """Return the array of an engine of this project in the form of Megatron-Core, other values unchanged."""
    match packed:
        case ["ndarray", {"data": bytes()}]:
            # With NumPy, which is imported when it is needed, not at the start.
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
"""Errors of engines of this project that Megatron-Core has by the same name."""
_PERMANENT = frozenset({ErrorCode.INVALID_REQUEST, ErrorCode.TOO_LARGE, ErrorCode.ENGINE_FAILED, ErrorCode.UNSUPPORTED})


def _error_events(
    number: int, code: Any, message: str, name: Any = None, is_transient: bool | None = None
) -> list[dict[str, Any]]:
    """An error as the events of a request. A client sets the time of an event without one.

    name:         its class at the engine.
    is_transient: None: determined by the code.
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


def failed_frames(number: int, code: ErrorCode, message: str) -> Frames:
    """ENGINE_REPLY of a request that failed at the coordinator."""
    return _reply(number, "FAILED", [], _error_events(number, code, message))


def partial_frames(number: int, tokens: bytes, details: dict[str, Any]) -> Frames:
    """ENGINE_REPLY_PARTIAL to a client."""
    frame = {"request_id": number, "new_tokens": token_list_from_bytes(tokens)}
    frame.update({_TO_PARTIAL.get(key, key): value for key, value in details.items()})
    return [pack([_PARTIAL, number, frame])]
