"""The history of a request over its checkpoints, and what is kept of one that has ended."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

from megatron_runtime.requests.dynamic import DynamicInferenceRequest
from megatron_runtime.requests.errors import deserialize_error
from megatron_runtime.requests.events import DynamicInferenceEvent, DynamicInferenceEventType
from megatron_runtime.requests.values import as_list, is_tensor, load_torch
from megatron_runtime.requests.vlm import VLMInferenceRequest

if TYPE_CHECKING:
    import torch


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
        """The record of a client's reply map; its `error` becomes an event, so that failed() is true of it."""
        request = DynamicInferenceRequest.deserialize(reply)
        request.generated_tokens = list(reply.get("generated_tokens") or [])
        if request.error is not None:
            error = deserialize_error({"request_id": request.request_id, **request.error})
            if error.is_transient:
                request.add_event_error_transient(error)
            else:
                request.add_event_error_nontransient(error)
        return cls(requests=[request], latency=reply.get("latency"))

    def __getitem__(self, idx: int) -> DynamicInferenceRequest:
        return self.requests[idx]

    @property
    def request_id(self) -> int:
        return self.requests[0].request_id

    @property
    def total_tokens(self) -> int:
        """Prompt and generated tokens of all segments: the last one's prompt holds what came before it."""
        return self.requests[-1].prompt_length + len(self.requests[-1].generated_tokens)

    # --- by which weights ---------------------------------------------------------------------------------------

    @staticmethod
    def _update_staleness_tensor(
        tensor: torch.Tensor | None, total_tokens: int, increment: bool = True
    ) -> torch.Tensor:
        """`tensor` extended with zeros to `total_tokens`, then, if asked, everything one higher."""
        torch = load_torch()
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
        request.policy_staleness = self._update_staleness_tensor(request.policy_staleness, self.total_tokens)
        if not policy_only:
            request.kv_cache_staleness = self._update_staleness_tensor(request.kv_cache_staleness, self.total_tokens)

    def stamp_epoch(self, epoch: int) -> None:
        """The weights are of `epoch` from here on: tokens sampled and caches computed before keep their own."""
        request = self.requests[-1]
        for name in ("policy_epoch", "kv_cache_epoch"):
            spans = getattr(request, name)
            # The newest token was sampled by the old weights, but its cache entry is computed by the new ones.
            start = max(0, self.total_tokens - 1)
            setattr(request, name, [[0, epoch]] if not spans else [*spans, [start, epoch]])

    def stamp_recomputed_cache(self, epoch: int) -> None:
        """The whole cache has been computed anew, by the weights of `epoch`."""
        self.requests[-1].kv_cache_epoch = [[0, epoch]]

    # --- checkpoints --------------------------------------------------------------------------------------------

    def checkpoint(self, tokenizer: Any = None) -> None:
        """Append a segment whose prompt is prompt + generated, with the budget that is left. `tokenizer` is unused."""
        self.requests.append(self.requests[-1].continued())

    def merge(self, tokenizer: Any = None) -> DynamicInferenceRequest:
        """One request as if there had been no checkpoints. `tokenizer` is unused.

        The prompt is the first segment's, status and epochs are the last's; what was generated is joined.
        """
        first, last = self.requests[0], self.requests[-1]
        tokens = [token for request in self.requests for token in request.generated_tokens]
        texts = [request.generated_text for request in self.requests]
        arrivals = [request.ttft for request in self.requests if request.ttft is not None]
        merged = replace(
            first,
            ttft=arrivals[0] if arrivals else None,
            generated_tokens=tokens,
            generated_text=None if None in texts else "".join(text for text in texts if text),
            generated_length=len(tokens),
            generated_log_probs=self._joined("generated_log_probs"),
            generated_top_n_logprobs=self._joined("generated_top_n_logprobs"),
            tpot=self._joined("tpot"),
            routing_indices=self._joined("routing_indices"),
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
        merged._prompt_length = first.prompt_length
        return merged

    def _joined(self, name: str) -> Any:
        """The values of all segments one after the other, a tensor where all are; None where no segment has any."""
        parts = [getattr(request, name) for request in self.requests if getattr(request, name) is not None]
        if not parts:
            return None
        if all(map(is_tensor, parts)):
            return load_torch().cat(parts)
        return [item for part in parts for item in as_list(part)]

    def serialize(self) -> dict[str, Any]:
        return {"requests": [request.serialize() for request in self.requests], "latency": self.latency}

    @classmethod
    def deserialize(cls, obj: dict[str, Any]) -> Self:
        return cls(requests=[_segment(segment) for segment in obj["requests"]], latency=obj["latency"])


def _segment(obj: dict[str, Any]) -> DynamicInferenceRequest:
    kind = VLMInferenceRequest if "num_img_embeddings_per_tile" in obj else DynamicInferenceRequest
    return kind.deserialize(obj)


@dataclass(frozen=True, kw_only=True)
class FinishedRequestRecord:
    """What remains of a request that has ended: how stale it is, and what it cost. No tokens.

    num_evictions: how often it lost its cache and was computed again.
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
        merged = record.merge()
        return cls(
            request_id=merged.request_id,
            uid=merged.uid,
            prompt_length=merged.prompt_length,
            generated_length=len(merged.generated_tokens),
            policy_epoch=merged.policy_epoch,
            kv_cache_epoch=merged.kv_cache_epoch,
            policy_staleness=merged.policy_staleness,
            kv_cache_staleness=merged.kv_cache_staleness,
            num_evictions=count_evictions(merged.events),
            finish_reason=merged.finish_reason,
            ttft=merged.ttft,
            latency=merged.latency,
        )


def count_evictions(events: list[DynamicInferenceEvent]) -> int:
    return sum(event.type is DynamicInferenceEventType.EVICT for event in events)
