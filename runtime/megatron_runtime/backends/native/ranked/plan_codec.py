"""Step plans and their results as bytes: msgpack, arrays as their raw bytes. Nothing here can run code of a sender."""

from __future__ import annotations

from typing import Any

import msgpack
import numpy as np

from megatron_runtime.backends.native.executor import StepPlan, StepResult
from megatron_runtime.protocol import codec
from megatron_runtime.protocol.codec import MalformedMessageError, UnpackLimits
from megatron_runtime.sampling.batch import LogitEdits, Penalties, SamplingBatch
from megatron_runtime.sampling.log_probs import LogProbs

_ARRAY = 1
_KINDS = frozenset("biuf")
_LIMITS = UnpackLimits(elements=1_048_576, containers=262_144)
"""Of a message between ranks: a step has some values and arrays a row, and the arrays are bytes."""


class MalformedPlanError(ValueError):
    """Bytes that are no message between ranks. The message says what is wrong."""


def pack(value: Any) -> bytes:
    """msgpack of plain values and arrays."""
    return msgpack.packb(value, use_bin_type=True, default=_pack_array)


def unpack(data: bytes | memoryview) -> Any:
    """What pack() was given; arrays are read-only. Raises MalformedPlanError."""
    try:
        return codec.unpack(data, _LIMITS, extension=_unpack_array)
    except MalformedMessageError as error:
        raise MalformedPlanError(f"{len(data)} bytes are no message between ranks: {error}") from error


def encode_plan(plan: StepPlan) -> list[Any]:
    """Plain values and arrays, for pack()."""
    batch = plan.sampling
    columns = [
        batch.temperature,
        batch.top_k,
        batch.top_p,
        batch.min_p,
        batch.seeds,
        batch.positions,
        batch.num_log_probs,
    ]
    return [
        plan.token_ids,
        plan.positions,
        plan.query_lengths,
        plan.context_lengths,
        plan.block_tables,
        plan.slot_mapping,
        plan.needs_sample,
        columns,
        {row: _encode_edits(edits) for row, edits in batch.edits.items()},
        dict(batch.prompt_targets),
    ]


def decode_plan(items: list[Any]) -> StepPlan:
    ids, positions, query_lengths, context_lengths, tables, slots, needs_sample, columns, edits, targets = items
    temperature, top_k, top_p, min_p, seeds, draws, num_log_probs = columns
    batch = SamplingBatch(
        temperature,
        top_k,
        top_p,
        min_p,
        seeds,
        draws,
        num_log_probs,
        edits={row: _decode_edits(found) for row, found in edits.items()},
        prompt_targets=targets,
    )
    return StepPlan(ids, positions, query_lengths, context_lengths, tables, slots, needs_sample, batch)


def encode_result(result: StepResult) -> list[Any]:
    """Plain values and arrays, for pack()."""
    return [
        result.tokens,
        {row: _encode_log_probs(found) for row, found in result.log_probs.items()},
        {row: _encode_log_probs(found) for row, found in result.prompt_log_probs.items()},
    ]


def decode_result(items: list[Any]) -> StepResult:
    tokens, found, of_prompts = items
    return StepResult(
        tokens,
        {row: LogProbs(*arrays) for row, arrays in found.items()},
        {row: LogProbs(*arrays) for row, arrays in of_prompts.items()},
    )


def _encode_log_probs(found: LogProbs) -> list[Any]:
    return [found.chosen_N, found.top_ids_NK, found.top_NK]


def _encode_edits(edits: LogitEdits) -> list[Any]:
    penalties = edits.penalties
    return [
        None
        if penalties is None
        else [penalties.ids, penalties.counts, penalties.repetition, penalties.presence, penalties.frequency],
        edits.bias_ids,
        edits.bias,
        edits.banned,
        edits.allowed,
    ]


def _decode_edits(items: list[Any]) -> LogitEdits:
    found, *arrays = items
    penalties = None
    if found is not None:
        ids, counts, repetition, presence, frequency = found
        penalties = Penalties(ids, counts, repetition=repetition, presence=presence, frequency=frequency)
    return LogitEdits(penalties, *arrays)


def _pack_array(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if not isinstance(value, np.ndarray):
        raise TypeError(f"{type(value).__name__} does not travel between ranks")
    head = msgpack.packb([value.dtype.str, value.shape])
    return msgpack.ExtType(_ARRAY, bytes((len(head),)) + head + value.tobytes())


def _unpack_array(code: int, data: bytes) -> Any:
    if code != _ARRAY:
        raise MalformedPlanError(f"extension type {code} is unknown")
    begin = 1 + data[0] if data else 0
    name, shape = codec.unpack(data[1:begin])
    dtype = np.dtype(name)
    if dtype.kind not in _KINDS:
        raise MalformedPlanError(f"an array of {name} does not travel between ranks")
    return np.frombuffer(data, dtype, offset=begin).reshape(shape)
