"""What a client raises when the coordinator refuses a request or gives it up; one class a reason."""

from __future__ import annotations

from megatron_runtime.protocol.headers import ErrorCode


class RequestRejectedError(Exception):
    """The coordinator refused a request, or gave it up.

    code: 400 invalid, 409 model changed, 413 too large, 429 queue full, 500 it ends engines, 503 unavailable, 504 its
          time is up.
    is_transient: the same request may be answered later.
    """

    is_transient = True

    def __init__(self, code: int, message: str, retry_after_seconds: float | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_seconds = retry_after_seconds


class InvalidRequestError(RequestRejectedError):
    """The request can never be taken as it is."""


class ModelChangedError(RequestRejectedError):
    """The engines run another model than the one that this request was made for."""


class RequestTooLargeError(RequestRejectedError):
    """The request is larger than a message may be."""


class QueueFullError(RequestRejectedError):
    """Too much waits already; `retry_after_seconds` says when to try again."""


class UnavailableError(RequestRejectedError):
    """Paused with Reject, stopped, or this client was stopped."""


class DeadlineExceededError(RequestRejectedError, TimeoutError):
    """The request's time was up."""


class EngineFailedError(RequestRejectedError):
    """The request ends the engines that run it, or its answer cannot be read. The message names its uid."""

    is_transient = False


_CLASSES: dict[int, type[RequestRejectedError]] = {
    ErrorCode.INVALID_REQUEST: InvalidRequestError,
    ErrorCode.MODEL_CHANGED: ModelChangedError,
    ErrorCode.TOO_LARGE: RequestTooLargeError,
    ErrorCode.QUEUE_FULL: QueueFullError,
    ErrorCode.ENGINE_FAILED: EngineFailedError,
    ErrorCode.UNAVAILABLE: UnavailableError,
    ErrorCode.DEADLINE: DeadlineExceededError,
}


def rejection(code: int, message: str, retry_after_seconds: float | None = None) -> RequestRejectedError:
    return _CLASSES.get(int(code), RequestRejectedError)(int(code), message, retry_after_seconds)
