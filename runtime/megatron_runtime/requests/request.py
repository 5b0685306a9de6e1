"""Inference requests and their records, under Megatron-Core's names, and their conversion for msgpack.

`InferenceRequest` is any request, `DynamicInferenceRequest` a request of the dynamic engine, and `VLMInferenceRequest`
a request with images. A call of checkpoint() begins a new segment of a request. A record holds the segments.

This module does not import torch. The function set by make_tensors_with() creates tensors. If no function is set, this
module uses arrays instead of tensors.
"""

from __future__ import annotations

import copy
import uuid
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import partialmethod
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt

from megatron_runtime.requests.errors import deserialize_error
from megatron_runtime.requests.events import DynamicInferenceEvent, DynamicInferenceEventType
from megatron_runtime.requests.hashing import HashForm, block_hashes
from megatron_runtime.requests.sampling_params import IGNORE_EOS, SamplingParams

# --- values as msgpack carries them -----------------------------------------------------------------------------------

_DEFAULT_DTYPES = ("float32", "int64", "bool")
"""Types that torch.tensor() infers from Python numbers. For any other type, pack_value() adds the name of the type."""


_load_torch: Callable[[], Any] | None = None


def make_tensors_with(load_torch: Callable[[], Any]) -> None:
    """From now on, create tensors with the module that `load_torch` returns.

    `load_torch` is called when the first tensor is created. Only the package megatron_core calls this function, for
    programs that use Megatron-Core's names.
    """
    global _load_torch
    _load_torch = load_torch


def _torch() -> Any:
    if _load_torch is None:
        raise RuntimeError("a request has tensors: import them from megatron_runtime.megatron_core.inference_request")
    return _load_torch()


def is_tensor(value: Any) -> bool:
    return any(kind.__module__ == "torch" and kind.__name__ == "Tensor" for kind in type(value).__mro__)


def as_list(values: Any) -> list[Any]:
    """Return the items of a tensor, an array or a sequence as a list; [] for None."""
    if values is None:
        return []
    return values.tolist() if hasattr(values, "tolist") else list(values)


def pack_value(value: Any) -> Any:
    """Return a value for msgpack: ("tensor", values[, dtype]) for a tensor, ("ndarray", {data, dtype}) for an array.

    Any other value is returned unchanged.
    """
    if is_tensor(value):
        dtype = str(value.dtype).removeprefix("torch.")
        values = value.detach().cpu().tolist()
        return ("tensor", values) if dtype in _DEFAULT_DTYPES and value.numel() else ("tensor", values, dtype)
    if isinstance(value, np.ndarray):
        return ("ndarray", {"data": value.tolist(), "dtype": str(value.dtype)})
    return value


def pack_array(values: npt.NDArray[Any]) -> Any:
    """Return an array as ("ndarray", {data, dtype, shape}) with the data as bytes, for the messages of this project."""
    return ("ndarray", {"data": values.tobytes(), "dtype": values.dtype.str, "shape": list(values.shape)})


def unpack_value(value: Any) -> Any:
    """Return the value that pack_value() or pack_array() has packed.

    `value` can also be a copy that msgpack has packed and unpacked.
    """
    match value:
        case ["tensor" | b"tensor", values, *_] if _load_torch is None:
            return np.array(values)
        case ["tensor" | b"tensor", values]:
            return _torch().tensor(values)
        case ["tensor" | b"tensor", values, str(dtype)]:
            torch = _torch()
            return torch.tensor(values, dtype=getattr(torch, dtype))
        case ["ndarray" | b"ndarray", {"data": bytes(data), "dtype": dtype, "shape": shape}]:
            return np.frombuffer(data, dtype).reshape(shape).copy()
        case ["ndarray" | b"ndarray", {"data": data, "dtype": dtype}]:
            return np.array(data, dtype=dtype)
    return value


# --- requests ---------------------------------------------------------------------------------------------------------


_PARAMETERS = ("sampling_params", "inference_parameters")


class Status(Enum):
    WAITING_IN_QUEUE = 1
    ACTIVE_AND_GENERATING_TOKENS = 2
    ACTIVE_BUT_NOT_GENERATING_TOKENS = 3
    COMPLETED = 4
    FAILED = 5


@dataclass(kw_only=True)
class InferenceRequest:
    """One request and its result.

    inference_parameters: old name of sampling_params.
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
        if self.inference_parameters is not None and self.sampling_params is None:
            warnings.warn("`inference_parameters` was renamed to `sampling_params`", DeprecationWarning, stacklevel=3)
            self.sampling_params = self.inference_parameters

    def serialize(self) -> dict[str, Any]:
        """Return all fields as values that msgpack can serialize."""
        obj = {name: pack_value(value) for name, value in self.__dict__.items() if not name.startswith("_")}
        obj["status"] = self.status.name if self.status is not None else None
        for name in _PARAMETERS:
            params = getattr(self, name)
            obj[name] = params.serialize() if params is not None else None
        return obj

    @classmethod
    def deserialize(cls, obj: dict[str, Any]) -> Self:
        """Return the request that serialize() converted to `obj`.

        `obj` can also be a copy that msgpack has packed and unpacked. Unknown keys are ignored.
        """
        known = {item.name for item in fields(cls) if item.init}
        values = {name: unpack_value(value) for name, value in obj.items() if name in known}
        if isinstance(values.get("status"), str):
            values["status"] = Status[values["status"]]
        for name in _PARAMETERS:
            if isinstance(values.get(name), dict):
                values[name] = SamplingParams.deserialize(values[name])
        request = cls(**values)
        request._post_deserialize(obj)
        return request

    def _post_deserialize(self, obj: dict[str, Any]) -> None:
        """Set the fields whose values in `obj` have another type. Subclasses override this method."""


@dataclass(kw_only=True)
class DynamicInferenceRequest(InferenceRequest):
    """A request of the dynamic engine.

    prompt_tokens, remaining_prompt_tokens: shape [n], a tensor or a list.
    uid:                    "chatcmpl-…", the same in all segments of a record.
    policy_epoch, kv_cache_epoch: pairs `[first token, epoch]`. policy_epoch has the epochs of the weights that sampled
        the tokens, kv_cache_epoch the epochs of the weights that computed the KV of the tokens.
    policy_staleness, kv_cache_staleness: for each token of prompt and answer, the number of epochs since the token was
        sampled, or since its KV was computed, int32 [n]. The value is a tensor in answers of MegatronLLM, and an array
        in answers of InferenceClient, which does not import torch.
    routing_indices:        [prompt + generated - 1, layers with experts, experts per token]: the experts of each token,
                            highest weight first. The last token is missing, because it was not computed. The value is a
                            tensor or an array, like policy_staleness. None unless the engine records experts
                            (moe_enable_routing_replay).
    disaggregated_params:   request_id, block_ids and kv_meta, if the request has `do_kv_handoff` and the engine keeps
                            the request's KV; otherwise None.
    precomputed_block_hashes: hashes of the complete prompt blocks. The constructor computes the hashes if prefix
                              caching is enabled and no hashes are passed.
    """

    uid: str = field(default_factory=lambda: f"chatcmpl-{uuid.uuid4().hex}")
    remaining_prompt_tokens: Any = None
    policy_staleness: Any = None
    kv_cache_staleness: Any = None
    policy_epoch: list[Any] | None = None
    kv_cache_epoch: list[Any] | None = None
    latency: float | None = None
    routing_indices: Any = None
    disaggregated_params: dict[str, Any] | None = None
    finished_chunk_token_count: int = 0
    cg_wait_iters: int = 0
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

    continued_fields: ClassVar[tuple[str, ...]] = (
        *("request_id", "uid", "arrival_time", "status", "policy_staleness", "stop_word_ids", "block_size_tokens"),
        *("enable_prefix_caching", "event_add_engine"),
    )
    """Names of the fields that are copied to the next segment of the request."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._prompt_length = 0
        if self.prompt_tokens is not None and self.remaining_prompt_tokens is None:
            self.remaining_prompt_tokens = copy.copy(self.prompt_tokens)
        if self.enable_prefix_caching and self.block_size_tokens is not None and not self.precomputed_block_hashes:
            self._compute_block_hashes()

    def _compute_block_hashes(self) -> None:
        """Set `precomputed_block_hashes` to the hashes of the complete blocks of the prompt."""
        assert self.block_size_tokens is not None, f"request {self.request_id} has no block_size_tokens"
        salt = self.sampling_params.cache_salt if self.sampling_params is not None else None
        self.precomputed_block_hashes = block_hashes(
            as_list(self.prompt_tokens), self.block_size_tokens, form=HashForm.SHA256, salt=(salt or "").encode()
        )

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
        """Return all fields except event_add_engine. Prompt tokens are included only with `return_prompt_tokens`."""
        obj = super().serialize()
        del obj["event_add_engine"]
        obj["events"] = [event.serialize() for event in self.events]
        obj["prompt_length"] = self.prompt_length
        obj["remaining_prompt_tokens"] = None
        wants_tokens = self.sampling_params is not None and self.sampling_params.return_prompt_tokens
        has_tokens = wants_tokens and self.prompt_tokens is not None
        obj["prompt_tokens"] = ("tensor", as_list(self.prompt_tokens)) if has_tokens else None
        if self.routing_indices is not None:
            # The last token was sampled but not computed, so it has no routing.
            rows = max(0, self.prompt_length + len(self.generated_tokens) - 1)
            obj["routing_indices"] = pack_value(self.routing_indices[:rows])
        return obj

    def _post_deserialize(self, obj: dict[str, Any]) -> None:
        self.events = [DynamicInferenceEvent.deserialize(event) for event in obj.get("events", [])]
        # serialize() can omit the tokens, but always includes their number.
        self._prompt_length = obj.get("prompt_length") or 0

    @property
    def tracked_metadata(self) -> list[Any]:
        """Values of the parameters that the batch stores for each request, in the order of get_metadata_types().

        A termination_id of None becomes IGNORE_EOS.
        """
        params = self.sampling_params
        assert params is not None, f"request {self.request_id} has no sampling_params"
        values = {name: getattr(params, name) for name, _, _ in self.get_metadata_types()}
        if params.termination_id is None:
            values["termination_id"] = IGNORE_EOS
        return list(values.values())

    @staticmethod
    def get_metadata_types() -> list[tuple[str, Any, bool]]:
        """Return (name, torch.dtype, whether the values are on the device) for each parameter that the batch stores."""
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

    def continued(self) -> Self:
        """Return the next segment of the request.

        The prompt of the next segment consists of this segment's prompt and generated tokens. The token budget of the
        next segment is the rest of this segment's budget.

        Raises ValueError if all tokens have been generated, or if the prompt tokens are missing.
        """
        if self.prompt_tokens is None and self.prompt_length:
            raise ValueError(
                f"request {self.request_id} has none of the {self.prompt_length} tokens of its prompt, which are sent "
                "only on request: set return_prompt_tokens=True in its sampling_params"
            )
        if self.event_add_engine is None:
            self.add_event_add_engine()
        params = copy.copy(self.sampling_params)
        if params is not None:
            params.min_tokens = max(0, params.min_tokens - len(self.generated_tokens))
        if params is not None and params.num_tokens_to_generate is not None:
            left = params.num_tokens_to_generate - len(self.generated_tokens)
            if left < 1:
                raise ValueError(
                    f"request {self.request_id} has generated all its tokens: there is nothing to continue"
                )
            params.num_tokens_to_generate = left
        tokens: Any = as_list(self.prompt_tokens) + list(self.generated_tokens)
        if is_tensor(self.prompt_tokens):
            tokens = self.prompt_tokens.new_tensor(tokens)
        return type(self)(
            prompt_tokens=tokens,
            sampling_params=params,
            policy_epoch=copy.copy(self.policy_epoch),
            **{name: getattr(self, name) for name in self.continued_fields},
        )

    def add_event(self, type: DynamicInferenceEventType, payload: Any | None = None) -> DynamicInferenceEvent:
        event = DynamicInferenceEvent(type, payload=payload)
        self.events.append(event)
        return event

    def add_event_add_engine(self) -> DynamicInferenceEvent:
        """Record that the request entered the engine's queue."""
        self.event_add_engine = self.add_event(DynamicInferenceEventType.ADD_ENGINE)
        return self.event_add_engine

    def add_event_generated_token(
        self,
        token: int,
        blocks_total: int | None = None,
        blocks_hashed_total: int | None = None,
        blocks_hashed_active: int | None = None,
        blocks_ref_count: int | None = None,
        pre_fwd_active_token_count: int | None = None,
        pre_fwd_step_count: int | None = None,
    ) -> DynamicInferenceEvent:
        """Record a generated token, with optional statistics of the block allocator and of the step.

        The first token sets `ttft`, the time to first token.
        """
        statistics = {
            "blocks_total": blocks_total,
            "blocks_hashed_total": blocks_hashed_total,
            "blocks_hashed_active": blocks_hashed_active,
            "blocks_ref_count": blocks_ref_count,
            "pre_fwd_active_token_count": pre_fwd_active_token_count,
            "pre_fwd_step_count": pre_fwd_step_count,
        }
        payload = {"token_id": token, **{name: value for name, value in statistics.items() if value is not None}}
        event = self.add_event(DynamicInferenceEventType.GENERATED_TOKEN, payload)
        if self.ttft is None and self.event_add_engine is not None:
            self.ttft = event.at - self.event_add_engine.at
        return event

    add_event_add_context = partialmethod(add_event, DynamicInferenceEventType.ADD_CONTEXT)
    add_event_pause = partialmethod(add_event, DynamicInferenceEventType.PAUSE)
    add_event_evict = partialmethod(add_event, DynamicInferenceEventType.EVICT)
    add_event_finish = partialmethod(add_event, DynamicInferenceEventType.FINISH)
    add_event_fail = partialmethod(add_event, DynamicInferenceEventType.FAIL)

    def add_event_error_transient(self, error: Exception) -> DynamicInferenceEvent:
        return self.add_event(DynamicInferenceEventType.ERROR_TRANSIENT, error)

    def add_event_error_nontransient(self, error: Exception) -> DynamicInferenceEvent:
        return self.add_event(DynamicInferenceEventType.ERROR_NONTRANSIENT, error)

    def succeeded(self) -> bool:
        """Return whether the request has no permanent error, and its status is not FAILED."""
        return self.status is not Status.FAILED and all(
            event.type is not DynamicInferenceEventType.ERROR_NONTRANSIENT for event in self.events
        )

    def failed(self) -> bool:
        return not self.succeeded()

    def __len__(self) -> int:
        """Return 1. Code that expects a list of answers can therefore use the answer to one prompt."""
        return 1

    def __iter__(self) -> Iterator[Self]:
        """Yield only this request. See __len__()."""
        yield self

    def __getitem__(self, index: int) -> Self:
        """Return this request for the index 0 or -1. See __len__()."""
        return [self][index]


@dataclass(kw_only=True)
class VLMInferenceRequest(DynamicInferenceRequest):
    """A request of a vision-language model. It uses no prefix caching, because block hashes do not cover the images.

    num_img_embeddings_per_tile: number of embeddings that replace one tile in the sequence.
    imgs:               pixels of all tiles, shape [tiles, channels, height, width]; None without images.
    num_tiles:          number of tiles of each image, shape [images].
    decoder_seq_length: length of the sequence, including the embeddings.
    """

    num_img_embeddings_per_tile: int = 0
    imgs: Any = None
    num_tiles: Any = None
    decoder_seq_length: int | None = None

    continued_fields = (*DynamicInferenceRequest.continued_fields, "num_img_embeddings_per_tile", "imgs", "num_tiles")

    def __post_init__(self) -> None:
        self.enable_prefix_caching = False
        super().__post_init__()

    @property
    def num_img_embeddings(self) -> int:
        """Total number of embeddings that replace the tiles of all images."""
        return 0 if self.num_tiles is None else int(sum(self.num_tiles)) * self.num_img_embeddings_per_tile

    def continued(self) -> Self:
        segment = super().continued()
        if self.decoder_seq_length is not None:
            segment.decoder_seq_length = self.decoder_seq_length + len(self.generated_tokens)
        return segment


# --- records ----------------------------------------------------------------------------------------------------------

_WEIGHTS = ("policy_epoch", "kv_cache_epoch", "policy_staleness", "kv_cache_staleness")
"""Names of the fields that describe the weights that computed a request."""


@dataclass
class DynamicInferenceRequestRecord:
    """A request as a list of segments, each a DynamicInferenceRequest.

    checkpoint() appends a segment, whose prompt includes the tokens generated so far.
    """

    requests: list[DynamicInferenceRequest] = field(default_factory=list)
    latency: float | None = None

    @classmethod
    def from_request(cls, request: DynamicInferenceRequest) -> Self:
        return cls(requests=[request])

    @classmethod
    def from_reply(cls, reply: dict[str, Any]) -> Self:
        """Return the record for a reply map that the client has received. The `error` in the map becomes an event.

        The staleness of a token is the number of epochs from the token's epoch to the last epoch of the answer.
        """
        request = DynamicInferenceRequest.deserialize(reply)
        request.generated_tokens = list(reply.get("generated_tokens") or [])
        total = request.prompt_length + len(request.generated_tokens)
        request.policy_staleness = _staleness(request.policy_epoch, total)
        request.kv_cache_staleness = _staleness(request.kv_cache_epoch, total)
        if request.error is not None:
            error = deserialize_error({"request_id": request.request_id, **request.error})
            add = request.add_event_error_transient if error.is_transient else request.add_event_error_nontransient
            add(error)
        return cls(requests=[request], latency=reply.get("latency"))

    def __getitem__(self, idx: int) -> DynamicInferenceRequest:
        return self.requests[idx]

    @property
    def request_id(self) -> int:
        return self.requests[0].request_id

    @property
    def total_tokens(self) -> int:
        """Number of prompt and generated tokens of the whole request."""
        return self.requests[-1].prompt_length + len(self.requests[-1].generated_tokens)

    @staticmethod
    def _update_staleness_tensor(tensor: Any, total_tokens: int, increment: bool = True) -> Any:
        """Return a tensor with the elements of `tensor`, padded with zeros to `total_tokens` elements.

        If `increment` is true, each element of the result is increased by 1.
        """
        torch = _torch()
        current = torch.zeros(0, dtype=torch.int32) if tensor is None else torch.as_tensor(tensor)
        missing = total_tokens - len(current)
        if missing > 0:
            current = torch.cat([current, torch.zeros(missing, dtype=current.dtype)])
        return current + 1 if increment else current

    def increment_staleness(self, policy_only: bool = False) -> None:
        """Increment the staleness of all tokens so far. Call this after a training step.

        policy_only: whether to leave out the KV staleness, for evicted requests, which have no KV cache.
        """
        request = self.requests[-1]
        request.policy_staleness = self._update_staleness_tensor(request.policy_staleness, self.total_tokens)
        if not policy_only:
            request.kv_cache_staleness = self._update_staleness_tensor(request.kv_cache_staleness, self.total_tokens)

    def stamp_epoch(self, epoch: int) -> None:
        """Record `epoch` for all tokens that are sampled and all KV that is computed from now on."""
        request = self.requests[-1]
        for name in ("policy_epoch", "kv_cache_epoch"):
            spans = getattr(request, name)
            # The old weights sampled the newest token, but the new weights will compute its KV.
            start = max(0, self.total_tokens - 1)
            setattr(request, name, [[0, epoch]] if not spans else [*spans, [start, epoch]])

    def stamp_recomputed_cache(self, epoch: int) -> None:
        """Record that all KV was computed again with the weights of `epoch`."""
        self.requests[-1].kv_cache_epoch = [[0, epoch]]

    def checkpoint(self, tokenizer: Any = None) -> None:
        """Append a segment whose prompt includes the tokens generated so far. `tokenizer` is not used.

        The KV of the new segment is computed again, so its staleness is 0. Raises ValueError if all tokens have been
        generated, or if the prompt tokens are missing.
        """
        total = self.total_tokens
        segment = self.requests[-1].continued()
        segment.policy_staleness = self._padded(segment.policy_staleness, total)
        segment.kv_cache_staleness = self._padded(None, total)
        self.requests.append(segment)

    def _padded(self, staleness: Any, total_tokens: int) -> Any:
        """Return `staleness` padded with zeros to `total_tokens`.

        The result is a tensor if `staleness` or the prompt is a tensor, otherwise an array.
        """
        if is_tensor(staleness) or is_tensor(self.requests[0].prompt_tokens):
            return self._update_staleness_tensor(staleness, total_tokens, increment=False)
        values = np.zeros(0, np.int32) if staleness is None else np.asarray(staleness)
        return np.pad(values, (0, max(0, total_tokens - len(values))))

    def merge(self, tokenizer: Any = None) -> DynamicInferenceRequest:
        """Return the request with all segments joined, as if there had been no checkpoints. `tokenizer` is not used.

        The prompt comes from the first segment. Status and epochs come from the last segment. Generated values are
        joined.
        """
        first, last = self.requests[0], self.requests[-1]
        tokens = [token for request in self.requests for token in request.generated_tokens]
        texts = [request.generated_text for request in self.requests]
        joined = ("generated_log_probs", "generated_top_n_logprobs", "tpot", "routing_indices")
        merged = replace(
            first,
            ttft=next((request.ttft for request in self.requests if request.ttft is not None), None),
            generated_tokens=tokens,
            generated_text=None if None in texts else "".join(text for text in texts if text),
            generated_length=len(tokens),
            events=[event for request in self.requests for event in request.events],
            latency=self.latency,
            **{name: self._joined(name) for name in joined},
            **{name: getattr(last, name) for name in ("status", "finish_reason", "stop_reason", "error", *_WEIGHTS)},
        )
        merged._prompt_length = first.prompt_length
        for name in ("policy_staleness", "kv_cache_staleness"):
            setattr(merged, name, self._padded(getattr(merged, name), self.total_tokens))
        return merged

    def _joined(self, name: str) -> Any:
        """Return the values of the field `name` in all segments, joined; None if no segment has values.

        The result is a tensor if all values are tensors, an array if all are arrays, otherwise a list.
        """
        parts = [getattr(request, name) for request in self.requests if getattr(request, name) is not None]
        if not parts:
            return None
        if all(map(is_tensor, parts)):
            return _torch().cat(parts)
        if all(isinstance(part, np.ndarray) for part in parts):
            return np.concatenate(parts)
        return [item for part in parts for item in as_list(part)]

    def serialize(self) -> dict[str, Any]:
        return {"requests": [request.serialize() for request in self.requests], "latency": self.latency}

    @classmethod
    def deserialize(cls, obj: dict[str, Any]) -> Self:
        kinds = [
            VLMInferenceRequest if "num_img_embeddings_per_tile" in one else DynamicInferenceRequest
            for one in obj["requests"]
        ]
        return cls([kind.deserialize(one) for kind, one in zip(kinds, obj["requests"], strict=True)], obj["latency"])


def _staleness(spans: list[Any] | None, total_tokens: int) -> npt.NDArray[np.int32] | None:
    """Return the number of epochs from each token's epoch to the last epoch, int32 [total_tokens].

    Return None if `spans` is None or empty.
    """
    if not spans:
        return None
    starts, epochs = np.array(spans, dtype=np.int64).T
    starts[0] = 0
    at = np.searchsorted(starts, np.arange(total_tokens), side="right") - 1
    return (epochs[-1] - epochs[at]).astype(np.int32)


@dataclass(frozen=True, kw_only=True)
class FinishedRequestRecord:
    """Statistics of a finished request, without its tokens.

    num_evictions: number of times that the KV of the request was evicted and computed again.
    """

    request_id: int
    uid: str
    prompt_length: int
    generated_length: int
    policy_epoch: list[Any] | None
    kv_cache_epoch: list[Any] | None
    policy_staleness: Any
    kv_cache_staleness: Any
    num_evictions: int
    finish_reason: str | None
    ttft: float | None
    latency: float | None

    @classmethod
    def from_record(cls, record: DynamicInferenceRequestRecord) -> Self:
        return cls.from_request(record.merge())

    @classmethod
    def from_request(cls, request: DynamicInferenceRequest) -> Self:
        evictions = sum(event.type is DynamicInferenceEventType.EVICT for event in request.events)
        copied = (item.name for item in fields(cls) if item.name != "num_evictions")
        return cls(num_evictions=evictions, **{name: getattr(request, name) for name in copied})
