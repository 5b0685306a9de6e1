"""Translation between the plain protocol, which Megatron-Core's own clients and engines speak, and this runtime's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from megatron_runtime.coordinator.core.records import TOKEN_BYTES, Entry
from megatron_runtime.protocol import limits
from megatron_runtime.protocol.headers import ErrorCode, Header
from megatron_runtime.protocol.messages import (
    PARAMETERS,
    PLAIN,
    Dispatch,
    Final,
    Frames,
    MalformedMessageError,
    Partial,
    PartialEntry,
    RequestMeta,
    pack,
    token_list_from_bytes,
    tokens_to_bytes,
    unpack,
)
from megatron_runtime.protocol.text import shown

logger = logging.getLogger(__name__)

_MAX_TOKEN = (1 << 31) - 1

Detokenize: TypeAlias = Callable[[list[int]], str] | None
"""Returns the text of token ids; None without a tokenizer that can do it."""


def read_submit(items: list[Any]) -> tuple[int, str | list[int], dict[Any, Any]]:
    """Return id, prompt and sampling parameters of SUBMIT_REQUEST. Raises MalformedMessageError."""
    match items:
        case [_, int(number), (str() | list()) as prompt, dict(params), *rest] if number >= 0:
            if rest and rest[0] is not None:
                raise MalformedMessageError("SUBMIT_REQUEST with multimodal data: this coordinator takes text only")
            if isinstance(prompt, list):
                _check_tokens(prompt)
            return number, prompt, params
    raise MalformedMessageError("SUBMIT_REQUEST: want [20, id, prompt, params, multimodal]")


def meta_of(params: dict[Any, Any], *, default_seed: int) -> RequestMeta:
    """Return the fields of a request that the coordinator reads. A value of a wrong type is ignored."""
    seed, priority, salt = params.get("seed"), params.get("priority"), params.get("cache_salt")
    return RequestMeta(
        streaming=bool(params.get("streaming")),
        seed=seed if type(seed) is int and 0 <= seed < 1 << 64 else default_seed,
        priority=priority if type(priority) is int else 0,
        cache_salt=salt[: limits.MAX_SALT_CHARACTERS] if isinstance(salt, str) else "",
    )


def _check_tokens(tokens: list[Any]) -> None:
    if not tokens or (set(map(type, tokens)) == {int} and min(tokens) >= 0 and max(tokens) <= _MAX_TOKEN):
        return  # a list may have a million tokens: no Python code runs for each
    for token in tokens:
        if type(token) is not int or not 0 <= token <= _MAX_TOKEN:
            raise MalformedMessageError(f"token {shown(token)}: want an integer from 0 to {_MAX_TOKEN}")


_FIELDS = (
    "generated_text",
    "generated_length",
    "generated_log_probs",
    "generated_top_n_logprobs",
    "prompt_log_probs",
    "prompt_top_n_logprobs",
    "tpot",
)
"""Fields of an engine's reply that every version of Megatron-Core's request class has. It rejects unknown ones."""
_EPOCHS = ("policy_epoch", "kv_cache_epoch")
"""Fields that only newer versions have: sent once an epoch has been set, which needs such a version. So has
routing_indices, which engines record on request only."""


def final_frames(entry: Entry, final: Final, *, detokenize: Detokenize) -> Frames:
    """ENGINE_REPLY to a plain client for the FINAL of an engine."""
    try:
        reply = unpack(final.reply, PLAIN)
    except MalformedMessageError as error:
        text = f"unreadable answer of the engine: {error}"
        return failed_reply(entry.plain_id or 0, ErrorCode.ENGINE_FAILED, text)
    return reply_frames(entry, final.tokens, reply if isinstance(reply, dict) else {}, detokenize=detokenize)


def reply_frames(entry: Entry, raw_tokens: bytes, reply: dict[Any, Any], *, detokenize: Detokenize) -> Frames:
    """ENGINE_REPLY to a plain client. The text is added here if the engine sent none."""
    number, tokens = entry.plain_id or 0, token_list_from_bytes(raw_tokens)
    fields = {name: reply[name] for name in _FIELDS if reply.get(name) is not None}
    if entry.meta.text:
        fields["prompt"] = entry.prompt.decode("utf-8", "replace")
    fields |= {name: reply[name] for name in _EPOCHS if _has_epoch(reply.get(name))}
    if (routing := _tensor_of(reply.get("routing_indices"))) is not None:
        fields["routing_indices"] = routing
    if detokenize is not None and "generated_text" not in fields:
        try:
            fields["generated_text"] = detokenize(tokens)
        except BaseException as error:  # a panic of the tokenizers library is no Exception
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            logger.warning("an answer of %d tokens has no text: %r", len(tokens), error)
    cause, events = reply.get("error"), []
    if isinstance(cause, dict):
        is_transient = cause.get("is_transient")
        events = _error_events(number, cause.get("code"), str(cause.get("message")), is_transient=is_transient)
    return _reply(number, str(reply.get("status")), tokens, events, fields)


def _reply(
    number: int, status: str, tokens: list[int], events: list[dict[str, Any]], fields: dict[str, Any] | None = None
) -> Frames:
    """ENGINE_REPLY to a plain client, with the fields that Megatron-Core's deserialize() reads in any case."""
    reply = {
        "request_id": number,
        "status": status,
        "generated_tokens": tokens,
        "sampling_params": None,
        "inference_parameters": None,
        "events": events,
        **(fields or {}),
    }
    return [pack([int(Header.ENGINE_REPLY), number, reply])]


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
_PERMANENT = frozenset({ErrorCode.INVALID_REQUEST, ErrorCode.TOO_LARGE, ErrorCode.ENGINE_FAILED, ErrorCode.UNSUPPORTED})


def _error_events(number: int, code: Any, message: str, *, is_transient: bool | None = None) -> list[dict[str, Any]]:
    """An error as the events of a plain request. A client sets the time of an event without one.

    is_transient: None: determined by the code.
    """
    if is_transient is None:
        is_transient = code not in _PERMANENT
    payload = {
        "type": _ERROR_CLASSES.get(code, "ContextOverflowError"),
        "request_id": number,
        "message": message,
        "is_transient": is_transient,
    }
    kind = "ERROR_TRANSIENT" if is_transient else "ERROR_NONTRANSIENT"
    return [
        {"timestamp": None, "type": kind, "payload": payload},
        {"timestamp": None, "type": "FAIL", "payload": None},
    ]


_NEW = {"log_probs": "new_log_probs", "top_n_logprobs": "new_top_n_logprobs"}
_PROMPT_DETAILS = ("prompt_log_probs", "prompt_top_n_logprobs")


def partial_frames(number: int, tokens: bytes, details: dict[str, Any]) -> Frames:
    frame = {"request_id": number, "new_tokens": token_list_from_bytes(tokens)}
    frame.update({_NEW.get(key, key): value for key, value in details.items()})
    return [pack([int(Header.ENGINE_REPLY_PARTIAL), number, frame])]


def failed_reply(number: int, code: ErrorCode, message: str) -> Frames:
    return _reply(number, "FAILED", [], _error_events(number, code, message))


def submit_frames(dispatch: Dispatch) -> Frames:
    """A dispatch for a plain engine: tokens generated before become part of the prompt and leave the budget.

    Raises MalformedMessageError for parameters that cannot be read.
    """
    assert not (dispatch.meta.text and dispatch.generated), "the dispatcher tokenizes such a prompt"
    try:
        params = unpack(dispatch.params, PARAMETERS)
    except MalformedMessageError as error:
        raise MalformedMessageError(f"sampling parameters: {error}") from error
    params = dict(params) if isinstance(params, dict) else {}
    params.pop("return_record", None)
    generated = token_list_from_bytes(dispatch.generated)
    budget = params.get("num_tokens_to_generate")
    if isinstance(budget, int):
        params["num_tokens_to_generate"] = max(1, budget - len(generated))
    prompt: str | list[int]
    if dispatch.meta.text:
        prompt = dispatch.prompt.decode("utf-8", "replace")
    else:
        prompt = token_list_from_bytes(dispatch.prompt) + generated
    return [pack([int(Header.SUBMIT_REQUEST), dispatch.dispatch_id, prompt, params, None])]


@dataclass(frozen=True, slots=True)
class PlainOutput:
    """Tokens of one request of a plain engine: new ones, or, with a reply, all of this dispatch."""

    dispatch_id: int
    tokens: bytes
    reply: dict[str, Any] | None = None
    details: dict[str, Any] = field(default_factory=dict)


def read_outputs(items: list[Any]) -> list[PlainOutput]:
    """ENGINE_REPLY `[21, [request, …]]` and ENGINE_REPLY_PARTIAL `[22, [frame, …]]` of a plain engine."""
    final = items[0] == Header.ENGINE_REPLY
    match items:
        case [_, list(frames), *_]:
            return [_read_output(frame, final=final) for frame in frames]
    raise MalformedMessageError(f"header {items[0]} of an engine: want a list of maps")


def _read_output(frame: Any, *, final: bool) -> PlainOutput:
    match frame:
        case {"requests": [dict(), *_] as parts} if final and all(isinstance(part, dict) for part in parts):
            frame = _joined(parts)
    match frame:
        case {"request_id": int(number)}:
            tokens = frame.get("generated_tokens" if final else "new_tokens") or []
            if not isinstance(tokens, list):
                raise MalformedMessageError(f"tokens {shown(tokens)}: want a list")
            _check_tokens(tokens)
            if final:
                return PlainOutput(number, tokens_to_bytes(tokens), frame)
            details = {key: frame[new] for key, new in _NEW.items() if frame.get(new) is not None}
            details |= {key: frame[key] for key in _PROMPT_DETAILS if frame.get(key) is not None}
            return PlainOutput(number, tokens_to_bytes(tokens), details=details)
    raise MalformedMessageError(f"engine output {shown(frame)}: want a map with request_id")


def _joined(parts: list[dict[Any, Any]]) -> dict[Any, Any]:
    """Return the request of a record: engines of Megatron-Core 0.16.1 send the parts between two suspensions."""
    joined = {**parts[-1], "request_id": parts[0].get("request_id")}
    for key in ("generated_tokens", "generated_log_probs", "generated_top_n_logprobs", "tpot"):
        lists = [part[key] for part in parts if isinstance(part.get(key), list)]
        joined[key] = [value for values in lists for value in values] if lists else None
    return joined


def as_partial(output: PlainOutput, entry: Entry) -> Partial:
    item = PartialEntry(entry.uid, output.dispatch_id, entry.tokens_so_far, len(output.tokens) // TOKEN_BYTES)
    extras = pack({entry.uid: output.details}) if output.details else b""
    return Partial(entry.client.route, [item], output.tokens, extras)


_REPLY_KEYS = (
    "status",
    "finish_reason",
    "stop_reason",
    "generated_text",
    "prompt_length",
    "num_cached_tokens",
    "policy_epoch",
    "kv_cache_epoch",
    "generated_log_probs",
    "generated_top_n_logprobs",
    "prompt_log_probs",
    "prompt_top_n_logprobs",
    "routing_indices",
    "error",
)


def answer_of(output: PlainOutput, entry: Entry, *, generated_bytes: int) -> tuple[bytes, dict[str, Any]]:
    """Return all tokens of an answer, and its reply map, as in FINAL.

    generated_bytes: tokens that the engine was given with the dispatch. They precede its own.
    """
    source = output.reply or {}
    reply = {key: source[key] for key in _REPLY_KEYS if source.get(key) is not None}
    reply.setdefault("status", "COMPLETED")
    reply.setdefault("finish_reason", "error" if reply["status"] == "FAILED" else "stop")
    if reply["status"] == "FAILED" and "error" not in reply:
        reply["error"] = _error_of(source.get("events"))
    tokens = bytes(entry.generated[:generated_bytes]) + output.tokens
    reply["generated_length"] = len(tokens) // TOKEN_BYTES
    if generated_bytes and "generated_log_probs" in reply:
        reply["log_probs_from"] = generated_bytes // TOKEN_BYTES
    return tokens, reply


def as_final(output: PlainOutput, entry: Entry, *, generated_bytes: int) -> Final:
    tokens, reply = answer_of(output, entry, generated_bytes=generated_bytes)
    return Final(output.dispatch_id, entry.uid, tokens, pack(reply))


def answer_frames(output: PlainOutput, entry: Entry, *, detokenize: Detokenize) -> Frames:
    """Return the answer of a plain engine for the client: ENGINE_REPLY or FINAL."""
    if entry.client.plain:
        answer = answer_of(output, entry, generated_bytes=entry.dispatched_bytes)
        return reply_frames(entry, *answer, detokenize=detokenize)
    return as_final(output, entry, generated_bytes=entry.dispatched_bytes).to_frames()


def _error_of(events: Any) -> dict[str, Any]:
    """Return the last error among the events of a plain engine's request, as `error` of a reply."""
    payloads = [event.get("payload") for event in events or () if isinstance(event, dict)]
    last = next((payload for payload in reversed(payloads) if isinstance(payload, dict)), {})
    is_transient = bool(last.get("is_transient"))
    code = ErrorCode.ENGINE_FAILED if is_transient else ErrorCode.INVALID_REQUEST
    message = str(last.get("message", "the engine gave no reason"))
    return {"code": int(code), "type": code.name, "message": message, "is_transient": is_transient}
