"""A request and its history, as engines keep it and clients get it. Tensor fields need torch, the rest does not."""

from __future__ import annotations

import copy
import importlib
import uuid
import warnings
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from megatron_runtime.hashing import HASH_BASE, HASH_PRIME, HashForm, block_hashes
from megatron_runtime.request_events import DynamicInferenceEvent, DynamicInferenceEventType
from megatron_runtime.sampling_params import IGNORE_EOS, SamplingParams

if TYPE_CHECKING:
    import torch

__all__ = [
    "HASH_BASE",
    "HASH_PRIME",
    "DynamicInferenceEvent",
    "DynamicInferenceEventType",
    "DynamicInferenceRequest",
    "DynamicInferenceRequestRecord",
    "InferenceRequest",
    "Status",
    "compute_block_hashes_batched",
    "deserialize_tensor",
    "serialize_tensor",
]


class Status(Enum):
    WAITING_IN_QUEUE = 1
    ACTIVE_AND_GENERATING_TOKENS = 2
    ACTIVE_BUT_NOT_GENERATING_TOKENS = 3
    COMPLETED = 4
    FAILED = 5


def _torch() -> Any:
    """By name: processes that never meet a tensor must not load torch."""
    return importlib.import_module("torch")


def _is_tensor(value: Any) -> bool:
    return type(value).__module__ == "torch" and type(value).__name__ in ("Tensor", "Parameter")


def serialize_tensor(tensor: torch.Tensor) -> list[Any]:
    """The values of a tensor as (nested) lists."""
    values: list[Any] = tensor.detach().cpu().tolist()
    return values


def deserialize_tensor(tensor_as_list: list[Any]) -> torch.Tensor:
    return _torch().tensor(tensor_as_list)


def compute_block_hashes_batched(
    prompt_tokens: torch.Tensor | list[int], block_size: int, *, form: HashForm = HashForm.POLYNOMIAL, salt: bytes = b""
) -> list[int]:
    """One positive hash per complete block of `prompt_tokens`, shape [seq_len]; each covers all blocks before it.

    form: the polynomial by default, with hashes from 1 to HASH_PRIME; engines and coordinators use SHA-256, for which
          colliding prompts cannot be made.
    """
    return block_hashes(_as_list(prompt_tokens), block_size, form=form, salt=salt)


def _as_list(tokens: Any) -> list[int]:
    if tokens is None:
        return []
    return tokens.tolist() if hasattr(tokens, "tolist") else list(tokens)


def _pack_value(value: Any) -> Any:
    """Tensors and arrays as tagged tuples; all else as it is."""
    if _is_tensor(value):
        return ("tensor", serialize_tensor(value))
    if isinstance(value, np.ndarray):
        return ("ndarray", {"data": value.tolist(), "dtype": str(value.dtype)})
    return value


def _unpack_value(value: Any) -> Any:
    match value:
        case ["tensor" | b"tensor", list() as values]:
            return deserialize_tensor(values)
        case ["ndarray" | b"ndarray", {"data": data, "dtype": dtype}]:
            return np.array(data, dtype=dtype)
    return value


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
        obj = {name: _pack_value(value) for name, value in self.__dict__.items() if not name.startswith("_")}
        obj["status"] = self.status.name if self.status is not None else None
        obj["sampling_params"] = self.sampling_params.serialize() if self.sampling_params is not None else None
        return obj

    @classmethod
    def deserialize(cls, obj: dict[str, Any]) -> Self:
        """The request of serialize(), before or after a trip through msgpack. Unknown keys are ignored."""
        known = {item.name for item in fields(cls) if item.init}
        values = {name: _unpack_value(value) for name, value in obj.items() if name in known}
        if isinstance(values.get("status"), str):
            values["status"] = Status[values["status"]]
        if isinstance(values.get("sampling_params"), dict):
            values["sampling_params"] = SamplingParams.deserialize(values["sampling_params"])
        request = cls(**values)
        request._post_deserialize(obj)
        return request

    def _post_deserialize(self, obj: dict[str, Any]) -> None:
        """For subclasses: fields that need more than a value."""


@dataclass(kw_only=True)
class DynamicInferenceRequest(InferenceRequest):
    """A request of the dynamic engine.

    prompt_tokens, remaining_prompt_tokens: shape [n], a tensor or a list.
    uid:                    "chatcmpl-…", the same in every segment of a record.
    policy_epoch, kv_cache_epoch: `[first token, epoch]` pairs: by which weights tokens were sampled, caches computed.
    policy_staleness, kv_cache_staleness: training steps since, one count per token.
    precomputed_block_hashes: of the complete prompt blocks; computed here when caching is on and none are given.
    """

    uid: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    remaining_prompt_tokens: Any = None
    policy_staleness: Any = None
    kv_cache_staleness: Any = None
    policy_epoch: list[Any] | None = None
    kv_cache_epoch: list[Any] | None = None
    latency: float | None = None
    routing_indices: Any = None
    finished_chunk_token_count: int = 0
    stop_word_ids: list[list[int]] | None = None
    block_size_tokens: int | None = None
    enable_prefix_caching: bool = False
    precomputed_block_hashes: list[int] = field(default_factory=list)
    ttft: float | None = None
    num_cached_tokens: int = 0
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    error: dict[str, Any] | None = None
    events: list[DynamicInferenceEvent] = field(default_factory=list)
    event_add_engine: DynamicInferenceEvent | None = field(default=None, repr=False)
    generated_tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__post_init__()
        self._prompt_length = 0
        if self.prompt_tokens is not None and self.remaining_prompt_tokens is None:
            self.remaining_prompt_tokens = copy.copy(self.prompt_tokens)
        if self.enable_prefix_caching and self.block_size_tokens is not None and not self.precomputed_block_hashes:
            self._compute_block_hashes()

    def _compute_block_hashes(self) -> None:
        assert self.block_size_tokens is not None
        tokens = _as_list(self.prompt_tokens)
        self.precomputed_block_hashes = block_hashes(tokens, self.block_size_tokens, form=HashForm.SHA256)

    @property
    def remaining_prompt_length(self) -> int:
        return len(self.remaining_prompt_tokens) if self.remaining_prompt_tokens is not None else 0

    @property
    def prompt_length(self) -> int:
        if self.prompt_tokens is None:
            return self._prompt_length
        return len(self.prompt_tokens)

    def __str__(self) -> str:
        status = self.status.name if self.status is not None else "None"
        return ", ".join((f"id {self.request_id}", f"status {status}", f"prompt {self.prompt_length} tokens"))

    def serialize(self) -> dict[str, Any]:
        """Without event_add_engine, and without the prompt's tokens unless `return_prompt_tokens` asks for them."""
        obj = super().serialize()
        del obj["event_add_engine"]
        obj["events"] = [event.serialize() for event in self.events]
        obj["prompt_length"] = self.prompt_length
        obj["remaining_prompt_tokens"] = None
        if self.sampling_params is not None and self.sampling_params.return_prompt_tokens:
            if self.prompt_tokens is not None:
                obj["prompt_tokens"] = ("tensor", _as_list(self.prompt_tokens))
        else:
            obj["prompt_tokens"] = None
        if self.routing_indices is not None:
            rows = self.prompt_length + len(self.generated_tokens) - 1
            obj["routing_indices"] = _pack_value(self.routing_indices[:rows])
        return obj

    def _post_deserialize(self, obj: dict[str, Any]) -> None:
        self.events = [DynamicInferenceEvent.deserialize(event) for event in obj.get("events", [])]
        # The tokens were left out, their number never is.
        self._prompt_length = obj.get("prompt_length") or 0

    @property
    def tracked_metadata(self) -> list[Any]:
        """The parameters that the batch keeps by request, in the order of get_metadata_types()."""
        params = self.sampling_params
        assert params is not None, f"request {self.request_id} has no sampling_params"
        if params.termination_id is None:
            params.termination_id = IGNORE_EOS
        return [getattr(params, name) for name, _, _ in self.get_metadata_types()]

    @staticmethod
    def get_metadata_types() -> list[tuple[str, torch.dtype, bool]]:
        """(name, dtype, whether it lives on the device)."""
        torch = _torch()
        return [
            ("temperature", torch.float32, False),
            ("top_k", torch.int32, False),
            ("top_p", torch.float32, False),
            ("termination_id", torch.int64, True),
            ("return_log_probs", torch.bool, False),
            ("skip_prompt_log_probs", torch.bool, False),
            ("top_n_logprobs", torch.int32, False),
        ]

    # --- events -------------------------------------------------------------------------------------------------

    def add_event(self, type: DynamicInferenceEventType, payload: Any | None = None) -> DynamicInferenceEvent:
        event = DynamicInferenceEvent(type, payload=payload)
        self.events.append(event)
        return event

    def add_event_add_engine(self) -> None:
        self.event_add_engine = self.add_event(DynamicInferenceEventType.ADD_ENGINE)

    def add_event_add_context(self) -> None:
        self.add_event(DynamicInferenceEventType.ADD_CONTEXT)

    def add_event_generated_token(
        self,
        token: int,
        blocks_total: int | None = None,
        blocks_hashed_total: int | None = None,
        blocks_hashed_active: int | None = None,
        blocks_ref_count: int | None = None,
    ) -> None:
        """Record a token, with the block allocator's statistics where given. The first one sets ttft."""
        statistics = {
            "blocks_total": blocks_total,
            "blocks_hashed_total": blocks_hashed_total,
            "blocks_hashed_active": blocks_hashed_active,
            "blocks_ref_count": blocks_ref_count,
        }
        payload = {"token_id": token, **{name: value for name, value in statistics.items() if value is not None}}
        event = self.add_event(DynamicInferenceEventType.GENERATED_TOKEN, payload)
        if self.ttft is None and self.event_add_engine is not None:
            self.ttft = event.at - self.event_add_engine.at

    def add_event_pause(self) -> None:
        self.add_event(DynamicInferenceEventType.PAUSE)

    def add_event_evict(self) -> None:
        self.add_event(DynamicInferenceEventType.EVICT)

    def add_event_finish(self) -> None:
        self.add_event(DynamicInferenceEventType.FINISH)

    def add_event_fail(self) -> None:
        self.add_event(DynamicInferenceEventType.FAIL)

    def add_event_error_transient(self, error: Exception) -> None:
        self.add_event(DynamicInferenceEventType.ERROR_TRANSIENT, error)

    def add_event_error_nontransient(self, error: Exception) -> None:
        self.add_event(DynamicInferenceEventType.ERROR_NONTRANSIENT, error)

    def succeeded(self) -> bool:
        """No error that is for good."""
        return all(event.type is not DynamicInferenceEventType.ERROR_NONTRANSIENT for event in self.events)

    def failed(self) -> bool:
        return not self.succeeded()


@dataclass
class DynamicInferenceRequestRecord:
    """The segments of one request: each checkpoint makes what was generated part of the next segment's prompt."""

    requests: list[DynamicInferenceRequest] = field(default_factory=list)
    latency: float | None = None

    @classmethod
    def from_request(cls, request: DynamicInferenceRequest) -> Self:
        return cls(requests=[request])

    @classmethod
    def from_reply(cls, reply: dict[str, Any]) -> Self:
        """The record of a client's reply map."""
        request = DynamicInferenceRequest.deserialize(reply)
        request.generated_tokens = list(reply.get("generated_tokens") or [])
        return cls(requests=[request], latency=reply.get("latency"))

    def __getitem__(self, idx: int) -> DynamicInferenceRequest:
        return self.requests[idx]

    @property
    def request_id(self) -> int:
        return self.requests[0].request_id

    @staticmethod
    def _update_staleness_tensor(
        tensor: torch.Tensor | None, total_tokens: int, increment: bool = True
    ) -> torch.Tensor:
        """`tensor` extended with zeros to `total_tokens`, then, if asked, everything one higher."""
        torch = _torch()
        current = torch.zeros(0, dtype=torch.int32) if tensor is None else tensor
        missing = total_tokens - len(current)
        if missing > 0:
            current = torch.cat([current, torch.zeros(missing, dtype=current.dtype)])
        return current + 1 if increment else current

    def increment_staleness(self, policy_only: bool = False) -> None:
        """A training step has happened: every token so far is one step staler.

        policy_only: for evicted requests, which have no cache to age.
        """
        request = self.requests[-1]
        total = request.prompt_length + len(request.generated_tokens)
        request.policy_staleness = self._update_staleness_tensor(request.policy_staleness, total)
        if not policy_only:
            request.kv_cache_staleness = self._update_staleness_tensor(request.kv_cache_staleness, total)

    def checkpoint(self, tokenizer: Any = None) -> None:
        """Append a segment whose prompt is prompt + generated, with the budget that is left. `tokenizer` is unused."""
        old = self.requests[-1]
        if old.event_add_engine is None:
            old.add_event_add_engine()
        params = copy.copy(old.sampling_params)
        if params is not None and params.num_tokens_to_generate is not None:
            params.num_tokens_to_generate = max(0, params.num_tokens_to_generate - len(old.generated_tokens))
        tokens: Any = _as_list(old.prompt_tokens) + list(old.generated_tokens)
        if _is_tensor(old.prompt_tokens):
            tokens = _torch().tensor(tokens, dtype=old.prompt_tokens.dtype, device=old.prompt_tokens.device)
        self.requests.append(
            DynamicInferenceRequest(
                request_id=old.request_id,
                uid=old.uid,
                prompt_tokens=tokens,
                sampling_params=params,
                arrival_time=old.arrival_time,
                status=old.status,
                policy_epoch=copy.copy(old.policy_epoch),
                policy_staleness=old.policy_staleness,
                stop_word_ids=old.stop_word_ids,
                block_size_tokens=old.block_size_tokens,
                enable_prefix_caching=old.enable_prefix_caching,
                event_add_engine=old.event_add_engine,
            )
        )

    def merge(self, tokenizer: Any = None) -> DynamicInferenceRequest:
        """One request as if there had been no checkpoints. `tokenizer` is unused."""
        first, last = self.requests[0], self.requests[-1]
        tokens = [token for request in self.requests for token in request.generated_tokens]
        texts = [request.generated_text for request in self.requests]
        return DynamicInferenceRequest(
            request_id=first.request_id,
            uid=first.uid,
            prompt=first.prompt,
            prompt_tokens=first.prompt_tokens,
            prompt_log_probs=first.prompt_log_probs,
            prompt_top_n_logprobs=first.prompt_top_n_logprobs,
            sampling_params=first.sampling_params,
            arrival_time=first.arrival_time,
            ttft=first.ttft,
            num_cached_tokens=first.num_cached_tokens,
            block_size_tokens=first.block_size_tokens,
            enable_prefix_caching=first.enable_prefix_caching,
            precomputed_block_hashes=first.precomputed_block_hashes,
            event_add_engine=first.event_add_engine,
            generated_tokens=tokens,
            generated_text=None if None in texts else "".join(text for text in texts if text),
            generated_length=len(tokens),
            generated_log_probs=self._joined("generated_log_probs"),
            generated_top_n_logprobs=self._joined("generated_top_n_logprobs"),
            tpot=self._joined("tpot"),
            routing_indices=last.routing_indices,
            events=[event for request in self.requests for event in request.events],
            status=last.status,
            policy_epoch=last.policy_epoch,
            kv_cache_epoch=last.kv_cache_epoch,
            policy_staleness=last.policy_staleness,
            kv_cache_staleness=last.kv_cache_staleness,
            finish_reason=last.finish_reason,
            stop_reason=last.stop_reason,
            error=last.error,
            latency=self.latency,
        )

    def _joined(self, name: str) -> Any:
        """The lists of all segments one after the other; None where no segment has one."""
        parts = [getattr(request, name) for request in self.requests if getattr(request, name) is not None]
        return [item for part in parts for item in _as_list(part)] if parts else None

    def serialize(self) -> dict[str, Any]:
        return {"requests": [request.serialize() for request in self.requests], "latency": self.latency}

    @classmethod
    def deserialize(cls, obj: dict[str, Any]) -> Self:
        requests = [DynamicInferenceRequest.deserialize(request) for request in obj["requests"]]
        return cls(requests=requests, latency=obj["latency"])
