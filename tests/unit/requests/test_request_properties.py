"""Codecs, checkpoints and merges, for any request."""

from typing import Any

import msgpack
import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron_runtime.megatron_core.inference_request import (
    DynamicInferenceEvent,
    DynamicInferenceEventType,
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    FinishedRequestRecord,
    Status,
    compute_block_hashes_batched,
)
from megatron_runtime.requests.errors import MaxSequenceLengthOverflowError, RequestError, error_name
from megatron_runtime.requests.request import pack_value, unpack_value
from megatron_runtime.requests.sampling_params import SamplingParams

TOKENS = st.lists(st.integers(0, 2**62), max_size=20)
SHAPES = st.lists(st.integers(1, 3), min_size=1, max_size=3)
DTYPES = st.sampled_from(
    [torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool]
)
KINDS = st.sampled_from(DynamicInferenceEventType)


def over_the_wire(value: Any) -> Any:
    return msgpack.unpackb(msgpack.packb(value, use_bin_type=True), raw=False, strict_map_key=False)


def event(kind: DynamicInferenceEventType, timestamp: float, token: int) -> DynamicInferenceEvent:
    payload: Any = None
    if kind is DynamicInferenceEventType.GENERATED_TOKEN:
        payload = {"token_id": token, "blocks_total": 3}
    elif kind is DynamicInferenceEventType.ERROR_TRANSIENT:
        payload = RequestError("OutOfLuck", "later", request_id=1)
    elif kind is DynamicInferenceEventType.ERROR_NONTRANSIENT:
        payload = MaxSequenceLengthOverflowError(1, "too long")
    return DynamicInferenceEvent(kind, timestamp, payload)


EVENTS = st.builds(event, KINDS, st.floats(0, 2**40), st.integers(0, 2**62))
PARAMS = st.none() | st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    num_tokens_to_generate=st.none() | st.integers(1, 1000),
    return_prompt_tokens=st.booleans(),
    stop_words=st.none() | st.lists(st.text(max_size=5), max_size=2),
    seed=st.none() | st.integers(0, 2**64 - 1),
)
REQUESTS = st.builds(
    DynamicInferenceRequest,
    request_id=st.integers(0, 2**40),
    prompt=st.none() | st.text(max_size=10),
    prompt_tokens=st.none() | TOKENS | TOKENS.map(torch.tensor),
    sampling_params=PARAMS,
    status=st.none() | st.sampled_from(Status),
    generated_tokens=TOKENS,
    generated_text=st.none() | st.text(max_size=10),
    generated_log_probs=st.none() | st.lists(st.floats(-9, 0), max_size=5),
    policy_epoch=st.none() | st.just([[0, 1], [4, 2]]),
    ttft=st.none() | st.floats(0, 9),
    events=st.lists(EVENTS, max_size=5),
)


@given(SHAPES, DTYPES)
def test_a_tensor_keeps_its_values_shape_and_type(shape: list[int], dtype: torch.dtype) -> None:
    tensor = (torch.arange(np.prod(shape)) % 2).reshape(shape).to(dtype)
    for packed in (pack_value(tensor), over_the_wire(pack_value(tensor))):
        again = unpack_value(packed)
        assert again.dtype == dtype
        assert torch.equal(again, tensor)


@given(SHAPES, st.sampled_from(["float32", "int16", "uint64", "bool"]))
def test_an_array_keeps_its_values_shape_and_type(shape: list[int], dtype: str) -> None:
    array = np.arange(np.prod(shape)).reshape(shape).astype(dtype)
    again = unpack_value(over_the_wire(pack_value(array)))
    assert again.dtype == array.dtype
    np.testing.assert_array_equal(again, array)


@given(REQUESTS)
def test_a_request_survives_serialisation_before_and_after_msgpack(request: DynamicInferenceRequest) -> None:
    obj = request.serialize()
    length = request.prompt_length
    for data in (obj, over_the_wire(obj)):
        copy = DynamicInferenceRequest.deserialize(data)
        for name in ("request_id", "uid", "prompt", "status", "sampling_params", "ttft", "policy_epoch"):
            assert getattr(copy, name) == getattr(request, name)
        for name in ("generated_tokens", "generated_text", "generated_log_probs"):
            assert getattr(copy, name) == getattr(request, name)
        assert copy.prompt_length == length
        assert [(e.type, e.timestamp, str(e)) for e in copy.events] == [
            (e.type, e.timestamp, str(e)) for e in request.events
        ]
        assert [error_name(e.payload) for e in copy.events if isinstance(e.payload, Exception)] == [
            error_name(e.payload) for e in request.events if isinstance(e.payload, Exception)
        ]
        asked = request.sampling_params is not None and request.sampling_params.return_prompt_tokens
        assert (copy.prompt_tokens is not None) == (asked and request.prompt_tokens is not None)
    assert request.prompt_length == length


@given(TOKENS, st.lists(st.lists(st.integers(0, 1000), max_size=8), max_size=5), st.data())
def test_checkpoints_anywhere_do_not_show_in_the_merged_request(prompt, parts, data) -> None:
    """For any partition into segments, the merged request equals that of an uninterrupted run."""
    total = sum(map(len, parts))
    budget = data.draw(st.integers(total + 1, 100))
    request = DynamicInferenceRequest(
        request_id=1,
        prompt="p",
        prompt_tokens=prompt,
        sampling_params=SamplingParams(num_tokens_to_generate=budget),
        enable_prefix_caching=True,
        block_size_tokens=4,
    )
    record = DynamicInferenceRequestRecord.from_request(request)
    done: list[int] = []
    for part in parts:
        segment = record[-1]
        segment.generated_tokens = part
        segment.generated_text = "".join(map(chr, part))
        segment.generated_log_probs = [-float(token) for token in part]
        segment.tpot = [0.5] * len(part)
        for token in part:
            segment.add_event_generated_token(token)
        done += part
        record.checkpoint()
        assert record[-1].prompt_tokens == prompt + done
        assert record[-1].sampling_params.num_tokens_to_generate == budget - len(done)
        assert record.total_tokens == len(prompt) + len(done)
        assert (
            record[-1].precomputed_block_hashes
            == DynamicInferenceRequest(
                request_id=0, prompt_tokens=prompt + done, enable_prefix_caching=True, block_size_tokens=4
            ).precomputed_block_hashes
        )
    record[-1].generated_text = ""
    merged = record.merge()
    assert merged.generated_tokens == done
    assert merged.generated_text == "".join(map(chr, done))
    assert merged.generated_log_probs == ([-float(token) for token in done] if parts else None)
    assert merged.prompt_tokens == prompt
    assert merged.sampling_params.num_tokens_to_generate == budget
    recorded = [e.payload["token_id"] for e in merged.events if e.type is DynamicInferenceEventType.GENERATED_TOKEN]
    assert recorded == done
    copy = DynamicInferenceRequestRecord.deserialize(over_the_wire(record.serialize())).merge()
    assert copy.generated_tokens == done
    assert copy.prompt_length == len(prompt)


@given(TOKENS, st.lists(st.tuples(st.booleans(), st.integers(0, 3)), max_size=6))
def test_staleness_counts_the_training_steps_since_each_token(prompt, steps) -> None:
    record = DynamicInferenceRequestRecord.from_request(DynamicInferenceRequest(request_id=1, prompt_tokens=prompt))
    policy = [0] * len(prompt)
    cache = [0] * len(prompt)
    for policy_only, new in steps:
        record[-1].generated_tokens += [7] * new
        policy += [0] * new
        cache += [0] * new
        record.increment_staleness(policy_only=policy_only)
        policy = [age + 1 for age in policy]
        if not policy_only:
            cache = [age + 1 for age in cache]
    staleness = record[-1].policy_staleness
    assert (staleness.tolist() if staleness is not None else []) == (policy if steps else [])
    staleness = record[-1].kv_cache_staleness
    known = staleness.tolist() if staleness is not None else []
    assert known == cache[: len(known)]
    assert not any(cache[len(known) :])


@given(st.lists(KINDS, max_size=30))
def test_a_finished_record_counts_its_evictions(kinds) -> None:
    request = DynamicInferenceRequest(request_id=3, prompt_tokens=[1, 2], generated_tokens=[9])
    record = DynamicInferenceRequestRecord.from_request(request)
    for kind in kinds:
        record[-1].events.append(event(kind, 1.0, 5))
        if kind is DynamicInferenceEventType.PAUSE:
            record.checkpoint()
    finished = FinishedRequestRecord.from_record(record)
    assert finished.num_evictions == kinds.count(DynamicInferenceEventType.EVICT)
    assert (finished.request_id, finished.uid, finished.prompt_length) == (3, request.uid, 2)


@given(TOKENS, st.integers(1, 8))
def test_a_tensor_and_its_list_hash_alike(tokens: list[int], size: int) -> None:
    hashes = compute_block_hashes_batched(torch.tensor(tokens, dtype=torch.int64), size)
    assert hashes == compute_block_hashes_batched(tokens, size)
    assert len(hashes) == len(tokens) // size
