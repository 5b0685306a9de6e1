"""Translation between a client's messages and those of a coordinator of Megatron-Core, which knows no others."""

from __future__ import annotations

from typing import Any

from megatron_runtime.client.pending import TOKEN_BYTES, PendingRequest
from megatron_runtime.protocol.headers import CONTROLS, Header
from megatron_runtime.protocol.messages import (
    PARAMETERS,
    Final,
    Frames,
    MalformedMessageError,
    Partial,
    PartialEntry,
    pack,
    token_list_from_bytes,
    tokens_to_bytes,
    unpack,
)

SIGNALS = CONTROLS - {Header.UPDATE_WEIGHTS, Header.SET_ADAPTERS, Header.DRAIN}
"""Control messages that Megatron-Core has."""
_NEW = {"new_log_probs": "log_probs", "new_top_n_logprobs": "top_n_logprobs"}


def submit_frames(request: PendingRequest) -> Frames:
    """SUBMIT_REQUEST. The coordinator tokenizes a text prompt, or an engine does."""
    prompt = request.prompt.decode() if request.meta.text else token_list_from_bytes(request.prompt)
    return [pack([int(Header.SUBMIT_REQUEST), request.request_id, prompt, unpack(request.params, PARAMETERS)])]


def abort_frames(request: PendingRequest) -> Frames:
    return [pack([int(Header.ABORT_REQUEST), request.request_id])]


def signal_frames(signal: Header, epoch: int | None) -> Frames:
    """A control message; `epoch` is that of SET_GENERATION_EPOCH."""
    return [pack([int(signal)] if epoch is None else [int(signal), epoch])]


def read_final(request: PendingRequest, reply: Any) -> Final:
    """Return the FINAL for the map in an ENGINE_REPLY: a request, or a record of its parts in order.

    Raises MalformedMessageError.
    """
    parts = reply.get("requests", [reply]) if isinstance(reply, dict) else []
    if not parts or not all(isinstance(part, dict) for part in parts):
        raise MalformedMessageError("ENGINE_REPLY: want a map with the fields of a request")
    tokens = [token for part in parts for token in part.get("generated_tokens") or ()]
    body = {key: value for key, value in parts[-1].items() if value is not None and key != "generated_tokens"}
    texts = [part.get("generated_text") for part in parts]
    if all(isinstance(text, str) for text in texts):
        body["generated_text"] = "".join(texts)
    body["generated_length"] = len(tokens)
    return Final(0, request.uid, _tokens(tokens), pack(body))


def read_partial(request: PendingRequest, frame: Any) -> Partial:
    """Return the PARTIAL for the map in an ENGINE_REPLY_PARTIAL. Raises MalformedMessageError."""
    if not isinstance(frame, dict):
        raise MalformedMessageError("ENGINE_REPLY_PARTIAL: want a map with new_tokens")
    tokens = _tokens(frame.get("new_tokens") or [])
    details = {_NEW.get(key, key): value for key, value in frame.items() if key not in ("request_id", "new_tokens")}
    entry = PartialEntry(request.uid, 0, request.held, len(tokens) // TOKEN_BYTES)
    return Partial(0, [entry], tokens, pack({request.uid: details}) if details else b"")


def _tokens(tokens: Any) -> bytes:
    try:
        return tokens_to_bytes(tokens)
    except (TypeError, ValueError, OverflowError) as error:
        raise MalformedMessageError(f"tokens of an answer cannot be read: {error}") from error
