"""What happened to a request, and when: nine types of event."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Self


class DynamicInferenceEventType(Enum):
    ADD_ENGINE = auto()
    """Entered the engine's queue."""
    ADD_CONTEXT = auto()
    """Entered the batch, for prefill."""
    GENERATED_TOKEN = auto()
    PAUSE = auto()
    EVICT = auto()
    """Lost its memory; it will be computed again."""
    FINISH = auto()
    FAIL = auto()
    ERROR_TRANSIENT = auto()
    ERROR_NONTRANSIENT = auto()


_ERRORS = frozenset({DynamicInferenceEventType.ERROR_TRANSIENT, DynamicInferenceEventType.ERROR_NONTRANSIENT})


class RequestError(Exception):
    """An error of a request that came over the wire. `type` is the class name it had where it was raised."""

    def __init__(self, type: str, message: str, *, request_id: int | None = None, is_transient: bool = True) -> None:
        super().__init__(message)
        self.type = type
        self.message = message
        self.request_id = request_id
        self.is_transient = is_transient


def error_name(error: BaseException) -> str:
    return error.type if isinstance(error, RequestError) else type(error).__name__


def serialize_error(error: BaseException) -> dict[str, Any]:
    return {
        "type": error_name(error),
        "request_id": getattr(error, "request_id", None),
        "message": getattr(error, "message", None) or str(error),
        "is_transient": getattr(error, "is_transient", True),
    }


def deserialize_error(data: dict[str, Any]) -> RequestError:
    return RequestError(
        data["type"],
        data.get("message") or "",
        request_id=data.get("request_id"),
        is_transient=data.get("is_transient", True),
    )


@dataclass
class DynamicInferenceEvent:
    """One event.

    timestamp: seconds since the epoch; None takes the present.
    payload:   a map with `token_id` for GENERATED_TOKEN, the exception for errors, None for all others.
    """

    type: DynamicInferenceEventType
    timestamp: float | None = None
    payload: Any | None = None

    def __post_init__(self) -> None:
        if self.timestamp is None:
            self.timestamp = time.time()
        if self.type is DynamicInferenceEventType.GENERATED_TOKEN:
            has_token = isinstance(self.payload, dict) and "token_id" in self.payload
            assert has_token, f"GENERATED_TOKEN payload {self.payload!r}: want a map with token_id"
        elif self.type in _ERRORS:
            assert isinstance(self.payload, BaseException), (
                f"{self.type.name} payload {self.payload!r}: want an exception"
            )
        else:
            assert self.payload is None, f"{self.type.name} takes no payload, got {self.payload!r}"

    @property
    def at(self) -> float:
        assert self.timestamp is not None
        return self.timestamp

    def __str__(self) -> str:
        text = f"[{self.at:.3f}] {self.type.name}"
        if self.type is DynamicInferenceEventType.GENERATED_TOKEN:
            assert isinstance(self.payload, dict)
            return f"{text}, token={self.payload['token_id']}"
        if self.type in _ERRORS:
            assert isinstance(self.payload, BaseException)
            return f"{text}, {error_name(self.payload)}"
        return text

    def serialize(self) -> dict[str, Any]:
        payload = serialize_error(self.payload) if isinstance(self.payload, BaseException) else self.payload
        return {"type": self.type.name, "timestamp": self.timestamp, "payload": payload}

    @classmethod
    def deserialize(cls, obj: dict[str, Any]) -> Self:
        kind = DynamicInferenceEventType[obj["type"]]
        payload = deserialize_error(obj["payload"]) if kind in _ERRORS else obj["payload"]
        return cls(kind, obj["timestamp"], payload)
