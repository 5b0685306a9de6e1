"""Epochs of tokens, requests with images, and errors that keep their class."""

import pytest
import torch

from megatron_runtime.megatron_core.contexts import dynamic_context
from megatron_runtime.megatron_core.inference_request import (
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    InferenceRequest,
    VLMInferenceRequest,
)
from megatron_runtime.requests.errors import RequestError, deserialize_error, serialize_error
from megatron_runtime.requests.hashing import block_hashes
from megatron_runtime.requests.sampling_params import InvalidSamplingParamsError, SamplingParams


@pytest.fixture
def record(request_factory) -> DynamicInferenceRequestRecord:
    request = request_factory()
    record = DynamicInferenceRequestRecord.from_request(request)
    record.stamp_epoch(3)
    request.generated_tokens = [4, 5]
    return record


class TestEpochs:
    def test_a_new_epoch_begins_at_the_newest_token(self, record) -> None:
        record.stamp_epoch(4)
        assert record[-1].policy_epoch == [[0, 3], [4, 4]]
        assert record[-1].kv_cache_epoch == [[0, 3], [4, 4]]

    def test_a_checkpoint_resets_the_epochs_of_the_kv_cache(self, record) -> None:
        record.checkpoint()
        assert record[-1].policy_epoch == [[0, 3]]
        assert record[-1].kv_cache_epoch is None
        record.stamp_recomputed_cache(5)
        assert record[-1].kv_cache_epoch == [[0, 5]]
        assert record[0].kv_cache_epoch == [[0, 3]]

    def test_segments_do_not_share_their_spans(self, record) -> None:
        record.checkpoint()
        record.stamp_epoch(9)
        assert record[0].policy_epoch == [[0, 3]]


class TestImages:
    @pytest.fixture
    def with_images(self) -> VLMInferenceRequest:
        return VLMInferenceRequest(
            request_id=1,
            prompt_tokens=[5, 6, 7, 8],
            sampling_params=SamplingParams(num_tokens_to_generate=4),
            num_img_embeddings_per_tile=256,
            imgs=torch.rand(3, 2, 4, 4, dtype=torch.float16),
            num_tiles=torch.tensor([1, 2], dtype=torch.int32),
            decoder_seq_length=772,
            enable_prefix_caching=True,
            block_size_tokens=2,
        )

    def test_it_is_a_request_with_images(self, with_images) -> None:
        assert isinstance(with_images, InferenceRequest)
        assert with_images.num_img_embeddings == 768
        assert with_images.precomputed_block_hashes == []

    def test_round_trip(self, with_images, over_the_wire) -> None:
        copy = VLMInferenceRequest.deserialize(over_the_wire(with_images.serialize()))
        assert copy.imgs.dtype == torch.float16
        assert torch.equal(copy.imgs, with_images.imgs)
        assert torch.equal(copy.num_tiles, with_images.num_tiles)
        assert (copy.num_img_embeddings_per_tile, copy.decoder_seq_length) == (256, 772)

    def test_checkpoints_and_records_keep_the_images(self, with_images, over_the_wire) -> None:
        with_images.generated_tokens = [1]
        record = DynamicInferenceRequestRecord.from_request(with_images)
        record.checkpoint()
        record = DynamicInferenceRequestRecord.deserialize(over_the_wire(record.serialize()))
        assert torch.equal(record[1].imgs, with_images.imgs)
        assert record[1].decoder_seq_length == 773
        merged = record.merge()
        assert isinstance(merged, VLMInferenceRequest)
        assert torch.equal(merged.num_tiles, with_images.num_tiles)


class TestErrors:
    @pytest.mark.parametrize(
        ("name", "is_transient"),
        [
            ("RequestOverflowError", True),
            ("TokenOverflowError", False),
            ("BlockOverflowError", False),
            ("MaxSequenceLengthOverflowError", False),
            ("ActiveRequestCountOverflowError", True),
            ("TensorStateDeallocatedError", True),
        ],
    )
    def test_context_errors_keep_class_and_fields(self, over_the_wire, name, is_transient) -> None:
        error = getattr(dynamic_context, name)(7, "does not fit")
        again = deserialize_error(over_the_wire(serialize_error(error)))
        assert type(again) is type(error)
        assert (again.request_id, again.message, again.is_transient) == (7, "does not fit", is_transient)

    def test_other_errors_keep_their_name(self, over_the_wire) -> None:
        again = deserialize_error(over_the_wire(serialize_error(KeyError("x"))))
        assert isinstance(again, RequestError)
        assert (again.type, again.message) == ("KeyError", "'x'")

    def test_a_failed_reply_makes_a_failed_request(self) -> None:
        error = {"code": 400, "type": "MaxSequenceLengthOverflowError", "message": "too long"}
        request = DynamicInferenceRequestRecord.from_reply(
            {"request_id": 4, "status": "FAILED", "error": error}
        ).merge()
        assert request.failed()
        payload = request.events[-1].payload
        assert isinstance(payload, dynamic_context.MaxSequenceLengthOverflowError)
        assert (payload.request_id, payload.message) == (4, "too long")

    @pytest.mark.parametrize(("code", "is_transient"), [(400, False), (413, False), (429, True), (503, True)])
    def test_a_reply_of_an_unknown_error_is_permanent_by_its_code(self, code, is_transient) -> None:
        reply = {"request_id": 4, "status": "FAILED", "error": {"code": code, "type": "X", "message": "m"}}
        request = DynamicInferenceRequestRecord.from_reply(reply)[0]
        assert request.failed(), "the request has no answer"
        assert request.events[-1].payload.is_transient is is_transient

    def test_a_failed_status_without_an_error_is_a_failure(self) -> None:
        request = DynamicInferenceRequestRecord.from_reply({"request_id": 4, "status": "FAILED"})[0]
        assert (request.failed(), request.succeeded()) == (True, False)

    @pytest.mark.parametrize(
        ("error", "is_transient"),
        [
            (InvalidSamplingParamsError("top_k", -1, "an integer"), False),
            (TypeError("t"), False),
            (RuntimeError("out of memory"), True),
        ],
    )
    def test_an_error_of_an_invalid_request_is_permanent(self, over_the_wire, error, is_transient) -> None:
        assert deserialize_error(over_the_wire(serialize_error(error))).is_transient is is_transient


def test_a_tenants_salt_seeds_the_chain() -> None:
    params = SamplingParams()
    params.cache_salt = "tenant a"
    request = DynamicInferenceRequest(
        request_id=1,
        prompt_tokens=[1, 2, 3, 4],
        sampling_params=params,
        enable_prefix_caching=True,
        block_size_tokens=2,
    )
    assert request.precomputed_block_hashes == block_hashes([1, 2, 3, 4], 2, salt=b"tenant a")
    assert request.precomputed_block_hashes != block_hashes([1, 2, 3, 4], 2)


def test_a_prompt_length_outlives_the_tokens(request_factory) -> None:
    record = DynamicInferenceRequestRecord.deserialize(
        DynamicInferenceRequestRecord.from_request(request_factory()).serialize()
    )
    assert record[0].prompt_tokens is None
    assert record.merge().prompt_length == 3


def test_ttft_is_of_the_first_segment_that_has_a_token(request_factory) -> None:
    record = DynamicInferenceRequestRecord.from_request(request_factory())
    record.checkpoint()
    record[1].ttft = 0.5
    record.checkpoint()
    record[2].ttft = 9.0
    assert record.merge().ttft == 0.5


def test_routing_of_the_segments_is_joined(request_factory) -> None:
    record = DynamicInferenceRequestRecord.from_request(request_factory(routing_indices=torch.ones(4, 2)))
    record.checkpoint()
    record[1].routing_indices = torch.zeros(2, 2)
    assert record.merge().routing_indices.tolist() == [[1, 1]] * 4 + [[0, 0]] * 2
    for segment in record.requests:  # as a client gets them
        segment.routing_indices = segment.routing_indices.numpy()
    assert record.merge().routing_indices.tolist() == [[1, 1]] * 4 + [[0, 0]] * 2
