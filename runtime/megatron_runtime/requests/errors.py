"""Why a request was not taken or was given up, as exceptions that keep their fields over the wire."""

from __future__ import annotations

from typing import Any

PERMANENT_CODES = range(400, 429)
"""Error codes of replies that no repetition of the same request will mend."""


class RequestRefusedError(ValueError):
    """The engine cannot take this request.

    is_transient: the same request may be taken later.
    """

    is_transient = True

    def __init__(self, request_id: int | None, message: str | None = None, *, is_transient: bool | None = None) -> None:
        super().__init__(message or "")
        self.request_id = request_id
        self.message = message or ""
        if is_transient is not None:
            self.is_transient = is_transient


class RequestOverflowError(RequestRefusedError):
    """More requests are open than the engine keeps."""


class TokenOverflowError(RequestRefusedError):
    """The request needs more tokens in one step than max_tokens allows."""


class BlockOverflowError(RequestRefusedError):
    """The request needs more KV blocks than there are."""


class MaxSequenceLengthOverflowError(RequestRefusedError):
    """Prompt and answer do not fit the longest sequence of the model."""

    is_transient = False


class ActiveRequestCountOverflowError(RequestRefusedError):
    """More requests are to generate at once than the engine has slots for."""


class TensorStateDeallocatedError(RequestRefusedError):
    """The engine's memory has been given back: resume it first."""


class RequestError(Exception):
    """An error of a request that came over the wire and has no class here. `type` is the name it had there."""

    def __init__(self, type: str, message: str, *, request_id: int | None = None, is_transient: bool = True) -> None:
        super().__init__(message)
        self.type = type
        self.message = message
        self.request_id = request_id
        self.is_transient = is_transient


_CLASSES: dict[str, type[RequestRefusedError]] = {
    kind.__name__: kind
    for kind in (
        RequestRefusedError,
        RequestOverflowError,
        TokenOverflowError,
        BlockOverflowError,
        MaxSequenceLengthOverflowError,
        ActiveRequestCountOverflowError,
        TensorStateDeallocatedError,
    )
}


def error_name(error: BaseException) -> str:
    return error.type if isinstance(error, RequestError) else type(error).__name__


def serialize_error(error: BaseException) -> dict[str, Any]:
    return {
        "type": error_name(error),
        "request_id": getattr(error, "request_id", None),
        "message": getattr(error, "message", None) or str(error),
        "is_transient": getattr(error, "is_transient", True),
    }


def deserialize_error(data: dict[str, Any]) -> RequestRefusedError | RequestError:
    """The error of serialize_error(), or of a reply's `error` map, whose code tells whether it is transient."""
    name, message, request_id = str(data.get("type")), data.get("message") or "", data.get("request_id")
    known = _CLASSES.get(name)
    is_transient = data.get("is_transient")
    if is_transient is None:
        is_transient = known.is_transient if known is not None else data.get("code") not in PERMANENT_CODES
    if known is not None:
        return known(request_id, message, is_transient=is_transient)
    return RequestError(name, message, request_id=request_id, is_transient=is_transient)
