"""Class for one inference request, whatever runs it: `Status`, `InferenceRequest`."""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from enum import Enum
from typing import Any, Self

from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.requests.values import pack_value, unpack_value


class Status(Enum):
    WAITING_IN_QUEUE = 1
    ACTIVE_AND_GENERATING_TOKENS = 2
    ACTIVE_BUT_NOT_GENERATING_TOKENS = 3
    COMPLETED = 4
    FAILED = 5


@dataclass(kw_only=True)
class InferenceRequest:
    """One request and what came of it.

    inference_parameters: former name of sampling_params.
    """

    request_id: int
    prompt: str | None = None
    sampling_params: SamplingParams | None = None
    inference_parameters: SamplingParams | None = None
    prompt_tokens: Any = None
    arrival_time: float | None = None
    status: Status | None = None
    encoder_prompt: str | None = None
    generated_text: str | None = None
    segments: list[str] | None = None
    generated_segments: list[str] | None = None
    generated_sequence_lengths: list[int] | None = None
    generated_tokens: Any = None
    prompt_log_probs: Any = None
    generated_log_probs: Any = None
    prompt_top_n_logprobs: list[dict[str, float]] | None = None
    generated_top_n_logprobs: list[dict[str, float]] | None = None
    generated_length: int | None = None
    tpot: list[float] | None = None

    def __post_init__(self) -> None:
        if self.inference_parameters is not None:
            warnings.warn("`inference_parameters` was renamed to `sampling_params`", DeprecationWarning, stacklevel=3)
            if self.sampling_params is None:
                self.sampling_params = self.inference_parameters
            self.inference_parameters = None

    def serialize(self) -> dict[str, Any]:
        """Every field as msgpack-ready values."""
        obj = {name: pack_value(value) for name, value in self.__dict__.items() if not name.startswith("_")}
        obj["status"] = self.status.name if self.status is not None else None
        obj["sampling_params"] = self.sampling_params.serialize() if self.sampling_params is not None else None
        return obj

    @classmethod
    def deserialize(cls, obj: dict[str, Any]) -> Self:
        """The request of serialize(), before or after a trip through msgpack. Unknown keys are ignored."""
        known = {item.name for item in fields(cls) if item.init}
        values = {name: unpack_value(value) for name, value in obj.items() if name in known}
        if isinstance(values.get("status"), str):
            values["status"] = Status[values["status"]]
        if isinstance(values.get("sampling_params"), dict):
            values["sampling_params"] = SamplingParams.deserialize(values["sampling_params"])
        request = cls(**values)
        request._post_deserialize(obj)
        return request

    def _post_deserialize(self, obj: dict[str, Any]) -> None:
        """For subclasses: fields that need more than a value."""
