"""Errors of requests: exceptions whose class and fields survive serialization."""

from __future__ import annotations

from typing import Any

PERMANENT_CODES = range(400, 429)
"""Error codes in replies that are permanent, so that a retry does not help."""
_INVALID = (ValueError, TypeError)
"""Exceptions that mean that a request is invalid. A retry cannot succeed."""


class ContextOverflowError(ValueError):
    """The engine cannot accept this request.

    is_transient: whether the engine may accept the same request later.
    """

    is_transient = True

    def __init__(self, request_id: int | None, message: str | None = None, *, is_transient: bool | None = None) -> None:
        super().__init__(message or "")
        self.request_id = request_id
        self.message = message or ""
        if is_transient is not None:
            self.is_transient = is_transient


class RequestOverflowError(ContextOverflowError):
    """Too many requests are waiting in the engine."""


class TokenOverflowError(ContextOverflowError):
    """The request needs more tokens in one step than the engine's `InferenceConfig.max_tokens` allows."""

    is_transient = False


class BlockOverflowError(ContextOverflowError):
    """The request needs more KV blocks than the engine has."""

    is_transient = False


class MaxSequenceLengthOverflowError(ContextOverflowError):
    """Prompt plus answer exceed the maximum sequence length."""

    is_transient = False


class NotFiniteError(ContextOverflowError):
    """The model computed values that are not finite for this request."""

    is_transient = False


class ActiveRequestCountOverflowError(ContextOverflowError):
    """All request slots of the engine are in use."""


class TensorStateDeallocatedError(ContextOverflowError):
    """The engine has released its memory. Resume it first."""


class RequestError(Exception):
    """A deserialized error of a class that does not exist in this process.

    `type` is the class name in the process that raised the error.
    """

    def __init__(self, type: str, message: str, *, request_id: int | None = None, is_transient: bool = True) -> None:
        super().__init__(message)
        self.type = type
        self.message = message
        self.request_id = request_id
        self.is_transient = is_transient


_KINDS: tuple[type[ContextOverflowError], ...] = (ContextOverflowError, *ContextOverflowError.__subclasses__())
_CLASSES = {kind.__name__: kind for kind in _KINDS}


def error_name(error: BaseException) -> str:
    return error.type if isinstance(error, RequestError) else type(error).__name__


def serialize_error(error: BaseException) -> dict[str, Any]:
    return {
        "type": error_name(error),
        "request_id": getattr(error, "request_id", None),
        "message": getattr(error, "message", None) or str(error),
        "is_transient": getattr(error, "is_transient", not isinstance(error, _INVALID)),
    }


def deserialize_error(data: dict[str, Any]) -> ContextOverflowError | RequestError:
    """Return the error that a map describes. data: the result of serialize_error(), or the `error` of a reply."""
    name, message, request_id = str(data.get("type")), data.get("message") or "", data.get("request_id")
    known = _CLASSES.get(name)
    is_transient = data.get("is_transient")
    if is_transient is None:
        is_transient = known.is_transient if known is not None else data.get("code") not in PERMANENT_CODES
    if known is not None:
        return known(request_id, message, is_transient=is_transient)
    return RequestError(name, message, request_id=request_id, is_transient=is_transient)
