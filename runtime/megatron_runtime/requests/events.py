"""Events in the lifetime of a request, such as its arrival, each with a timestamp."""

from __future__ import annotations

import time
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Self

from megatron_runtime.requests.errors import deserialize_error, error_name, serialize_error


class DynamicInferenceEventType(Enum):
    ADD_ENGINE = auto()
    """The request entered the engine's queue."""
    ADD_CONTEXT = auto()
    """The request entered the batch for its prefill."""
    GENERATED_TOKEN = auto()
    PAUSE = auto()
    EVICT = auto()
    """The request lost its KV. The engine will compute it again."""
    FINISH = auto()
    FAIL = auto()
    ERROR_TRANSIENT = auto()
    ERROR_NONTRANSIENT = auto()


_ERRORS = frozenset({DynamicInferenceEventType.ERROR_TRANSIENT, DynamicInferenceEventType.ERROR_NONTRANSIENT})


@dataclass
class DynamicInferenceEvent:
    """One event of a request.

    timestamp: time of the event in seconds since 1970; None means now.
    type:      a DynamicInferenceEventType, or the member of Megatron-Core's enumeration with the same name.
    payload:   a map with `token_id` for GENERATED_TOKEN, the exception for errors, None for all other types.
    """

    type: DynamicInferenceEventType
    timestamp: float | None = None
    payload: Any | None = None

    def __post_init__(self) -> None:
        kind: object = self.type
        if not isinstance(kind, DynamicInferenceEventType):
            name = kind.name if isinstance(kind, Enum) else ""
            assert name in DynamicInferenceEventType.__members__, (
                f"event type {kind!r}: want a DynamicInferenceEventType"
            )
            self.type = DynamicInferenceEventType[name]
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
