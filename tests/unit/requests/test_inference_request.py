"""Requests, events and records: what survives the wire, checkpoints and merges."""

import pytest
import torch

from megatron_runtime.megatron_core.inference_request import (
    DynamicInferenceEvent,
    DynamicInferenceEventType,
    DynamicInferenceRequest,
    DynamicInferenceRequestRecord,
    FinishedRequestRecord,
    InferenceRequest,
    Status,
    compute_block_hashes_batched,
    deserialize_tensor,
    serialize_tensor,
)
from megatron_runtime.requests.errors import RequestError
from megatron_runtime.requests.hashing import HASH_PRIME, HashForm, block_hashes
from megatron_runtime.requests.sampling_params import SamplingParams


class TestHashes:
    def test_default_is_the_documented_polynomial(self) -> None:
        tokens = torch.arange(20)
        hashes = compute_block_hashes_batched(tokens, 8)
        assert hashes == block_hashes(list(range(20)), 8, form=HashForm.POLYNOMIAL)
        assert all(1 <= value <= HASH_PRIME for value in hashes)

    def test_the_other_form_by_its_keyword(self) -> None:
        hashes = compute_block_hashes_batched(torch.arange(20), 8, form=HashForm.SHA256, salt=b"tenant")
        assert hashes == block_hashes(list(range(20)), 8, salt=b"tenant")

    def test_the_other_form_is_the_one_of_later_releases(self) -> None:
        from megatron.core.inference import inference_request as reference

        tokens = torch.arange(100, 120)
        expected = reference.compute_block_hashes_batched(tokens, 8)
        assert compute_block_hashes_batched(tokens, 8, form=HashForm.SHA256) == expected
        with pytest.raises(ValueError, match=r"form 'md5': want HashForm\.SHA256 or HashForm\.POLYNOMIAL"):
            compute_block_hashes_batched(tokens, 8, form="md5")

    def test_hashes_are_computed_only_with_prefix_caching(self, request_factory) -> None:
        on = {"enable_prefix_caching": True, "block_size_tokens": 2}
        assert request_factory().precomputed_block_hashes == []
        assert request_factory(enable_prefix_caching=True).precomputed_block_hashes == []
        assert request_factory(**on).precomputed_block_hashes == block_hashes([1, 2, 3], 2)
        assert request_factory(**on, precomputed_block_hashes=[9]).precomputed_block_hashes == [9]

    def test_the_hashes_of_a_changed_prompt_are_computed_again(self, request_factory) -> None:
        request = request_factory(prompt_tokens=[1, 2, 3, 4], block_size_tokens=2, enable_prefix_caching=True)
        before = request.precomputed_block_hashes
        request.prompt_tokens = [1, 2, 9]
        request._compute_block_hashes()
        assert request.precomputed_block_hashes == before[:1]
        request.prompt_tokens = [1]
        request._compute_block_hashes()
        assert request.precomputed_block_hashes == []

    def test_merge_keeps_and_checkpoint_recomputes(self, request_factory) -> None:
        request = request_factory(enable_prefix_caching=True, block_size_tokens=2, precomputed_block_hashes=[9])
        request.generated_tokens = [4]
        record = DynamicInferenceRequestRecord.from_request(request)
        assert record.merge().precomputed_block_hashes == [9]
        record.checkpoint()
        assert record[1].precomputed_block_hashes == block_hashes([1, 2, 3, 4], 2)


class TestSerialization:
    @pytest.mark.parametrize("packed", [False, True])
    def test_round_trip(self, request_factory, over_the_wire, packed) -> None:
        request = request_factory(
            sampling_params=SamplingParams(return_prompt_tokens=True),
            prompt_tokens=torch.tensor([2**62, 1]),
            generated_log_probs=torch.tensor([-0.5, -1.0]),
            policy_epoch=[[0, 3]],
        )
        request.sampling_params.add_attributes({"custom": "kept"})
        request.add_event_add_engine()
        request.add_event_generated_token(7, blocks_total=4)
        request.add_event_error_nontransient(RequestError("MaxSequenceLengthOverflowError", "too long", request_id=5))
        request.generated_tokens = [2**62]
        copy = DynamicInferenceRequest.deserialize(
            over_the_wire(request.serialize()) if packed else request.serialize()
        )
        assert copy.uid == request.uid
        assert copy.uid.startswith("chatcmpl-")
        assert copy.status is Status.ACTIVE_AND_GENERATING_TOKENS
        assert copy.prompt_tokens.tolist() == [2**62, 1]
        assert copy.generated_tokens == [2**62]
        assert copy.generated_log_probs.tolist() == [-0.5, -1.0]
        assert copy.policy_epoch == [[0, 3]]
        assert copy.sampling_params.custom == "kept"
        assert [str(event) for event in copy.events] == [str(event) for event in request.events]
        assert [event.timestamp for event in copy.events] == [event.timestamp for event in request.events]
        assert copy.event_add_engine is None
        assert copy.failed()

    def test_prompt_tokens_are_serialized_only_on_request(self, request_factory, over_the_wire) -> None:
        request = request_factory()
        obj = request.serialize()
        assert obj["prompt_tokens"] is obj["remaining_prompt_tokens"] is None
        assert obj["prompt_length"] == 3
        assert "event_add_engine" not in obj
        assert request.prompt_tokens.tolist() == [1, 2, 3]
        assert DynamicInferenceRequest.deserialize(over_the_wire(obj)).prompt_length == 3
        request.sampling_params.return_prompt_tokens = True
        assert request.serialize()["prompt_tokens"] == ("tensor", [1, 2, 3])

    def test_a_request_needs_only_an_id(self, over_the_wire) -> None:
        copy = DynamicInferenceRequest.deserialize(over_the_wire(DynamicInferenceRequest(request_id=1).serialize()))
        assert (copy.prompt, copy.status, copy.sampling_params) == (None, None, None)

    def test_routing_indices_have_a_row_for_each_token_but_the_last(self, request_factory) -> None:
        request = request_factory(routing_indices=torch.zeros(50, 2))
        request.generated_tokens = [4, 5]
        assert len(DynamicInferenceRequest.deserialize(request.serialize()).routing_indices) == 4

    def test_tensors_as_lists(self) -> None:
        tensor = torch.tensor([[1, 2], [3, 4]])
        assert torch.equal(deserialize_tensor(serialize_tensor(tensor)), tensor)


class TestParameters:
    def test_the_former_name_warns_and_is_the_same_object(self) -> None:
        from megatron.core.inference import inference_request as reference
        from megatron.core.inference.sampling_params import SamplingParams as MegatronSamplingParams

        params = SamplingParams()
        with pytest.warns(DeprecationWarning, match="renamed"):
            request = InferenceRequest(request_id=1, prompt="x", inference_parameters=params)
        assert request.sampling_params is request.inference_parameters is params
        kept = reference.InferenceRequest(
            request_id=1, prompt="x", inference_parameters=MegatronSamplingParams(top_k=3)
        )
        serialized = InferenceRequest.deserialize(kept.serialize()).serialize()
        assert serialized["inference_parameters"]["top_k"] == kept.serialize()["inference_parameters"]["top_k"] == 3

    def test_tracked_metadata_sets_the_termination_id(self, request_factory) -> None:
        request = request_factory()
        values = request.tracked_metadata
        names = [name for name, _, _ in request.get_metadata_types()]
        assert dict(zip(names, values, strict=True))["termination_id"] == -1
        assert request.sampling_params.termination_id is None, "the parameters are the caller's"
        places = {}
        for (name, dtype, on_device), value in zip(request.get_metadata_types(), values, strict=True):
            assert torch.tensor(value, dtype=dtype).item() == value
            places[name] = on_device
        assert {name for name, on_device in places.items() if on_device} == {"termination_id"}
        assert set(places.values()) == {True, False}


class TestEvents:
    def test_there_are_nine_types(self) -> None:
        from megatron.core.inference import inference_request as reference

        names = "ADD_ENGINE ADD_CONTEXT GENERATED_TOKEN PAUSE EVICT FINISH FAIL ERROR_TRANSIENT ERROR_NONTRANSIENT"
        assert [kind.name for kind in DynamicInferenceEventType] == names.split()
        assert [kind.name for kind in reference.DynamicInferenceEventType] == names.split()

    @pytest.mark.parametrize("kind", DynamicInferenceEventType)
    def test_payloads_are_checked(self, kind) -> None:
        wrong = None if kind.name.startswith(("GENERATED", "ERROR")) else {"token_id": 1}
        with pytest.raises(AssertionError, match=kind.name):
            DynamicInferenceEvent(kind, payload=wrong)
        if kind is DynamicInferenceEventType.GENERATED_TOKEN:
            with pytest.raises(AssertionError, match="want a map with token_id"):
                DynamicInferenceEvent(kind, payload={"token": 1})

    @pytest.mark.parametrize("name", [kind.name for kind in DynamicInferenceEventType])
    def test_the_type_may_be_a_member_of_megatrons_enumeration(self, request_factory, name) -> None:
        from megatron.core.inference import inference_request as reference

        kind = reference.DynamicInferenceEventType[name]
        payload = KeyError("x") if kind.name.startswith("ERROR") else None
        payload = {"token_id": 1} if kind.name.startswith("GENERATED") else payload
        event = request_factory().add_event(kind, payload)
        assert event.type is DynamicInferenceEventType[kind.name]
        with pytest.raises(AssertionError, match="want a DynamicInferenceEventType"):
            DynamicInferenceEvent(kind.value, payload=payload)

    def test_every_method_returns_its_event_as_megatrons_does(self, request_factory) -> None:
        from megatron.core.inference import inference_request as reference
        from megatron.core.inference.contexts import dynamic_context as reference_errors

        ours, theirs = request_factory(), reference.DynamicInferenceRequest(request_id=5)
        steps = {"pre_fwd_active_token_count": 3, "pre_fwd_step_count": 4}
        calls = {
            **dict.fromkeys(("add_engine", "add_context", "pause", "evict", "finish", "fail"), ()),
            "generated_token": (7,),
            "error_transient": (reference_errors.ContextOverflowError(5, "x"),),
            "error_nontransient": (reference_errors.ContextOverflowError(5, "x"),),
        }
        for name, arguments in calls.items():
            options = steps if name == "generated_token" else {}
            event, expected = (
                getattr(request, f"add_event_{name}")(*arguments, **options) for request in (ours, theirs)
            )
            assert event is ours.events[-1]
            assert event.type.name == expected.type.name
            if name == "generated_token":
                assert event.payload == expected.payload

    def test_text_names_type_token_and_error(self, request_factory) -> None:
        request = request_factory()
        request.add_event_generated_token(42)
        request.add_event_error_transient(KeyError("x"))
        assert "GENERATED_TOKEN, token=42" in str(request.events[0])
        assert str(DynamicInferenceEvent(DynamicInferenceEventType.PAUSE, timestamp=12.5)) == "[12.500] PAUSE"
        assert str(request.events[1]).endswith("ERROR_TRANSIENT, KeyError")
        assert request.succeeded()

    def test_ttft_runs_from_the_queue_to_the_first_token(self, request_factory) -> None:
        request = request_factory()
        request.add_event_add_engine()
        request.event_add_engine.timestamp -= 2
        request.add_event_generated_token(1)
        request.add_event_generated_token(2)
        assert 2 <= request.ttft < 3


class TestRecord:
    @pytest.fixture
    def record(self, request_factory) -> DynamicInferenceRequestRecord:
        request = request_factory(generated_text="ab", generated_log_probs=[-1.0], tpot=[0.1])
        request.add_event_add_engine()
        request.generated_tokens = [4, 5]
        record = DynamicInferenceRequestRecord.from_request(request)
        record.checkpoint()
        record[1].generated_tokens = [6]
        record[1].generated_text = "c"
        record[1].generated_log_probs = [-2.0]
        record[1].add_event_evict()
        record[1].status = Status.COMPLETED
        record[1].policy_epoch = [[0, 1]]
        record.latency = 1.5
        return record

    def test_a_checkpoint_continues_with_the_budget_that_is_left(self, record) -> None:
        record.checkpoint()
        assert record[2].prompt_tokens.tolist() == [1, 2, 3, 4, 5, 6]
        assert record[2].sampling_params.num_tokens_to_generate == 7
        assert record[0].sampling_params.num_tokens_to_generate == 10
        assert record[2].event_add_engine is record[0].event_add_engine
        assert record[2].uid == record[0].uid
        assert record[2].kv_cache_epoch is None
        assert record[2].kv_cache_staleness.tolist() == record[2].policy_staleness.tolist() == [0] * 6

    @pytest.mark.parametrize(("min_tokens", "left"), [(0, 0), (2, 1), (1, 0), (7, 6)])
    def test_a_checkpoint_continues_with_the_minimum_that_is_left(self, request_factory, min_tokens, left) -> None:
        request = request_factory(generated_tokens=[4])
        request.sampling_params.min_tokens = min_tokens
        record = DynamicInferenceRequestRecord.from_request(request)
        record.checkpoint()
        assert record[1].sampling_params.min_tokens == left
        assert record[0].sampling_params.min_tokens == min_tokens

    def test_a_checkpoint_keeps_the_fields_of_the_request(self, request_factory) -> None:
        record = DynamicInferenceRequestRecord.from_request(
            request_factory(generated_tokens=[4], arrival_time=7.5, stop_word_ids=[[9]], block_size_tokens=2)
        )
        record.increment_staleness()
        record.checkpoint()
        assert (record[1].arrival_time, record[1].stop_word_ids, record[1].block_size_tokens) == (7.5, [[9]], 2)
        assert record[1].policy_staleness.tolist() == [1] * 4
        assert record[1].kv_cache_staleness.tolist() == [0] * 4
        assert record[1].prompt is None

    def test_a_request_without_remaining_tokens_is_not_continued(self, request_factory) -> None:
        record = DynamicInferenceRequestRecord.from_request(request_factory(generated_tokens=list(range(10))))
        with pytest.raises(ValueError, match="request 5 has generated all"):
            record.checkpoint()

    def test_a_prompt_that_was_not_sent_is_not_replaced_by_the_answer(self, over_the_wire) -> None:
        from megatron.core.inference import inference_request as reference
        from megatron.core.inference.sampling_params import SamplingParams as MegatronSamplingParams

        params = MegatronSamplingParams(num_tokens_to_generate=4)
        sent = reference.DynamicInferenceRequest(
            request_id=5, prompt_tokens=torch.tensor([1, 2]), sampling_params=params, generated_tokens=[4]
        )
        record = DynamicInferenceRequestRecord.deserialize(
            over_the_wire({"requests": [sent.serialize()], "latency": None})
        )
        with pytest.raises(ValueError, match=r"request 5 has none of the 2 tokens .* return_prompt_tokens=True"):
            record.checkpoint()
        sent.sampling_params.return_prompt_tokens = True
        record = DynamicInferenceRequestRecord.deserialize({"requests": [sent.serialize()], "latency": None})
        record.checkpoint()
        assert record[1].prompt_tokens.tolist() == [1, 2, 4]

    def test_a_checkpoint_makes_the_missing_event(self, request_factory) -> None:
        record = DynamicInferenceRequestRecord.from_request(request_factory())
        record.checkpoint()
        assert record[1].event_add_engine is record[0].event_add_engine is not None

    def test_merge_joins_generated_values_and_keeps_the_prompt(self, record) -> None:
        merged = record.merge()
        assert merged.generated_tokens == [4, 5, 6]
        assert merged.generated_text == "abc"
        assert merged.generated_log_probs == [-1.0, -2.0]
        assert merged.prompt == "hello"
        assert merged.prompt_tokens.tolist() == [1, 2, 3]
        assert (merged.status, merged.policy_epoch, merged.latency) == (Status.COMPLETED, [[0, 1]], 1.5)
        assert [event.type.name for event in merged.events] == ["ADD_ENGINE", "EVICT"]
        assert (merged.request_id, merged.uid) == (record.request_id, record[0].uid)
        assert merged.generated_length == 3
        assert merged.policy_staleness.tolist() == merged.kv_cache_staleness.tolist() == [0] * 6

    def test_merge_joins_measurements_and_takes_the_result_of_the_last_segment(self, record) -> None:
        record[1].uid = "chatcmpl-other"
        for number, request in enumerate(record.requests):
            request.tpot = [float(number)]
            request.generated_top_n_logprobs = [{"a": -float(number)}]
            request.prompt_log_probs = [-float(number)]
            request.kv_cache_epoch = [[0, number]]
            request.policy_staleness = torch.tensor([number])
            request.kv_cache_staleness = torch.tensor([number, number])
            request.finish_reason, request.stop_reason, request.error = f"reason {number}", number, {"code": number}
        merged = record.merge()
        assert merged.uid == record[0].uid
        assert merged.tpot == [0.0, 1.0]
        assert merged.generated_top_n_logprobs == [{"a": 0.0}, {"a": -1.0}]
        assert merged.prompt_log_probs == [0.0]
        assert merged.kv_cache_epoch == [[0, 1]]
        assert (merged.policy_staleness.tolist(), merged.kv_cache_staleness.tolist()) == (
            [1] + [0] * 5,
            [1, 1] + [0] * 4,
        )
        assert (merged.finish_reason, merged.stop_reason, merged.error) == ("reason 1", 1, {"code": 1})

    def test_joined_values_are_a_tensor_if_all_parts_are(self, record) -> None:
        record[0].generated_log_probs = torch.tensor([-1.0])
        record[1].generated_log_probs = torch.tensor([-2.0])
        assert torch.equal(record.merge().generated_log_probs, torch.tensor([-1.0, -2.0]))
        record[1].generated_log_probs = [-2.0]
        assert record.merge().generated_log_probs == [-1.0, -2.0]

    def test_a_finished_record_has_epochs_staleness_and_evictions(self, record) -> None:
        record.stamp_epoch(4)
        record.increment_staleness()
        finished = FinishedRequestRecord.from_record(record)
        assert finished.policy_epoch == [[0, 1], [5, 4]]
        assert finished.kv_cache_epoch == [[0, 4]]
        assert finished.policy_staleness.tolist() == finished.kv_cache_staleness.tolist() == [1] * 6
        assert (finished.generated_length, finished.num_evictions, finished.latency) == (3, 1, 1.5)

    def test_the_merged_text_is_none_if_a_segment_has_none(self, record) -> None:
        record[1].generated_text = None
        assert record.merge().generated_text is None

    def test_round_trip(self, record, over_the_wire) -> None:
        copy = DynamicInferenceRequestRecord.deserialize(over_the_wire(record.serialize()))
        assert copy.merge().generated_tokens == [4, 5, 6]
        assert copy.latency == 1.5

    def test_staleness_counts_steps_since_each_token(self, record) -> None:
        record.increment_staleness()
        record[1].generated_tokens.append(7)
        record.increment_staleness(policy_only=True)
        assert record[1].policy_staleness.tolist() == [2] * 6 + [1]
        assert record[1].kv_cache_staleness.tolist() == [1] * 6
        extended = record._update_staleness_tensor(record[1].kv_cache_staleness, 7, increment=False)
        assert extended.tolist() == [1] * 6 + [0]
