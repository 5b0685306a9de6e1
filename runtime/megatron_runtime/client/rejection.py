"""Errors of requests that the coordinator rejects or fails. Each reason has its own class."""

from __future__ import annotations

from megatron_runtime.protocol.headers import ErrorCode


class RequestRejectedError(Exception):
    """The coordinator rejected or failed a request.

    code: 400 invalid request, 404 adapter not found, 409 model changed, 413 request too large, 429 queue full, 500 the
          request crashes engines, 501 unsupported, 503 unavailable, 504 deadline exceeded.
    is_transient: whether the same request can succeed later.
    field: the sampling parameter that caused the error, if the coordinator named one.
    """

    is_transient = True

    def __init__(
        self, code: int, message: str, retry_after_seconds: float | None = None, field: str | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_seconds = retry_after_seconds
        self.field = field


class InvalidRequestError(RequestRejectedError):
    """The request is invalid, or no engine supports one of its sampling parameters."""

    is_transient = False


class AdapterNotFoundError(RequestRejectedError):
    """No adapter has the name in the request."""

    is_transient = False


class ModelChangedError(RequestRejectedError):
    """The engines run a different model than the request names."""

    is_transient = False


class RequestTooLargeError(RequestRejectedError):
    """The request is larger than the size limit of a message."""

    is_transient = False


class QueueFullError(RequestRejectedError):
    """Too many requests are waiting. Retry after `retry_after_seconds`."""


class UnavailableError(RequestRejectedError):
    """The engines are stopped, the engines are paused with the policy Reject, or this client has stopped."""


class DeadlineExceededError(RequestRejectedError, TimeoutError):
    """The deadline of the request has passed."""


class RequestFailedError(RequestRejectedError):
    """The request crashes the engines that run it, or its answer cannot be parsed.

    The message contains the uid of the request.
    """

    is_transient = False


class UnsupportedByBackendError(RequestRejectedError):
    """The request needs a feature that no backend of this runtime supports."""

    is_transient = False


_CLASSES: dict[int, type[RequestRejectedError]] = {
    ErrorCode.INVALID_REQUEST: InvalidRequestError,
    ErrorCode.ADAPTER_NOT_FOUND: AdapterNotFoundError,
    ErrorCode.MODEL_CHANGED: ModelChangedError,
    ErrorCode.TOO_LARGE: RequestTooLargeError,
    ErrorCode.QUEUE_FULL: QueueFullError,
    ErrorCode.ENGINE_FAILED: RequestFailedError,
    ErrorCode.UNSUPPORTED: UnsupportedByBackendError,
    ErrorCode.UNAVAILABLE: UnavailableError,
    ErrorCode.DEADLINE: DeadlineExceededError,
}


def rejection(
    code: int, message: str, retry_after_seconds: float | None = None, field: str | None = None
) -> RequestRejectedError:
    """Return the exception for an ErrorCode. field: the sampling parameter that caused the error."""
    return _CLASSES.get(int(code), RequestRejectedError)(int(code), message, retry_after_seconds, field)
