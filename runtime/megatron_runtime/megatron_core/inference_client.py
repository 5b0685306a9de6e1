"""Megatron-Core name: `InferenceClient`, with the errors that it raises."""

from megatron_runtime.client.inference_client import InferenceClient
from megatron_runtime.client.rejection import (
    AdapterNotFoundError,
    DeadlineExceededError,
    EngineFailedError,
    InvalidRequestError,
    ModelChangedError,
    QueueFullError,
    RequestRejectedError,
    RequestTooLargeError,
    UnavailableError,
    UnsupportedByBackendError,
)
from megatron_runtime.transport.control_calls import ControlRejectedError
from megatron_runtime.transport.peer_link import CoordinatorUnreachableError, HandshakeRejectedError

__all__ = [
    "AdapterNotFoundError",
    "ControlRejectedError",
    "CoordinatorUnreachableError",
    "DeadlineExceededError",
    "EngineFailedError",
    "HandshakeRejectedError",
    "InferenceClient",
    "InvalidRequestError",
    "ModelChangedError",
    "QueueFullError",
    "RequestRejectedError",
    "RequestTooLargeError",
    "UnavailableError",
    "UnsupportedByBackendError",
]
