"""A request of the dynamic engine: what was asked, what came of it, and what happened to it meanwhile."""

from __future__ import annotations

import copy
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from megatron_runtime.requests.events import DynamicInferenceEvent, DynamicInferenceEventType
from megatron_runtime.requests.hashing import HashForm, block_hashes
from megatron_runtime.requests.request import InferenceRequest
from megatron_runtime.requests.sampling_params import IGNORE_EOS
from megatron_runtime.requests.values import as_list, is_tensor, load_torch, pack_value

if TYPE_CHECKING:
    import torch


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
        """Without event_add_engine, and without the prompt's tokens unless `return_prompt_tokens` asks for them."""
        obj = super().serialize()
        del obj["event_add_engine"]
        obj["events"] = [event.serialize() for event in self.events]
        obj["prompt_length"] = self.prompt_length
        obj["remaining_prompt_tokens"] = None
        if self.sampling_params is not None and self.sampling_params.return_prompt_tokens:
            if self.prompt_tokens is not None:
                obj["prompt_tokens"] = ("tensor", as_list(self.prompt_tokens))
        else:
            obj["prompt_tokens"] = None
        if self.routing_indices is not None:
            # The last token was sampled and never computed: it was routed nowhere.
            rows = max(0, self.prompt_length + len(self.generated_tokens) - 1)
            obj["routing_indices"] = pack_value(self.routing_indices[:rows])
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
        torch = load_torch()
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
        """The next segment: its prompt is prompt + generated, its budget what is left of this one's."""
        if self.event_add_engine is None:
            self.add_event_add_engine()
        params = copy.copy(self.sampling_params)
        if params is not None and params.num_tokens_to_generate is not None:
            left = params.num_tokens_to_generate - len(self.generated_tokens)
            if left < 1:
                raise ValueError(
                    f"request {self.request_id} has generated all its tokens: there is nothing to continue"
                )
            params.num_tokens_to_generate = left
        tokens: Any = as_list(self.prompt_tokens) + list(self.generated_tokens)
        if is_tensor(self.prompt_tokens):
            tokens = load_torch().tensor(tokens, dtype=self.prompt_tokens.dtype, device=self.prompt_tokens.device)
        return type(self)(
            request_id=self.request_id,
            uid=self.uid,
            prompt_tokens=tokens,
            sampling_params=params,
            arrival_time=self.arrival_time,
            status=self.status,
            policy_epoch=copy.copy(self.policy_epoch),
            policy_staleness=self.policy_staleness,
            stop_word_ids=self.stop_word_ids,
            block_size_tokens=self.block_size_tokens,
            enable_prefix_caching=self.enable_prefix_caching,
            event_add_engine=self.event_add_engine,
        )

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
