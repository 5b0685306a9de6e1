"""Sampling parameters are checked where they enter."""

from dataclasses import fields
from typing import Any

import pytest

from megatron_runtime.requests.sampling_params import PARAMETERS, InvalidSamplingParamsError, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("temperature", 1e7),
        ("top_k", -1),
        ("top_k", 2**31),
        ("top_k", 2.5),
        ("top_p", 1.01),
        ("num_tokens_to_generate", -1),
        ("num_tokens_to_generate", 2**31),
        ("num_tokens_total", 2**31),
        ("min_tokens", 2**31),
        ("seed", 2**64),
        ("seed", -1),
        ("stop_words", "stop"),
        ("stop_words", [1]),
        ("allowed_token_ids", []),
        ("allowed_token_ids", [2**31]),
        ("allowed_token_ids", "5"),
        ("bad_words", "bad"),
        ("bad_words", [1]),
        ("bad_words", [" "]),
        ("bad_words", ["a" * 2048, "b" * 2049]),
        ("bad_words", ["a"] * 129),
        ("stop_token_ids", ["a"]),
        ("stop_token_ids", [-1]),
        ("stop_token_ids", [2**31]),
        ("streaming_interval", 0),
        ("streaming_interval", 2**31),
        ("termination_id", -2),
        ("termination_id", 2**31),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 1e-44),
        ("repetition_penalty", 101),
        ("presence_penalty", 2.1),
        ("frequency_penalty", float("inf")),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {1: 101.0}),
        ("logit_bias", {1: float("nan")}),
        ("logit_bias", {2**31: 1.0}),
        ("structured_output", {"type": "json_object", "after": [2**31]}),
        ("structured_output", {"type": "yaml", "value": ""}),
        ("structured_output", {"type": "json_schema"}),
        ("structured_output", {"type": "choice", "value": []}),
        ("priority", 1 << 31),
        ("cache_salt", b"raw"),
    ],
)
def test_a_value_out_of_range_is_rejected_by_field_name(field: str, value: object) -> None:
    with pytest.raises(InvalidSamplingParamsError, match=field) as raised:
        SamplingParams(**{field: value})
    assert raised.value.field == field


def test_an_error_quotes_no_more_than_a_line_of_any_value() -> None:
    deep: list[object] = []
    for _ in range(2000):
        deep = [deep]
    for value in (deep, "x" * 100_000, 10**5000):
        with pytest.raises(InvalidSamplingParamsError, match="structured_output") as raised:
            SamplingParams(structured_output={"type": "yaml", "value": value})
        assert len(str(raised.value)) < 500


@pytest.mark.parametrize(
    "pooling",
    [
        {},
        [],
        {"task": "plugin"},
        {"task": "embed", "dimensions": 0},
        {"task": "embed", "dimensions": 2**31},
        {"task": "embed", "dimensions": True},
        {"task": "embed", "use_activation": 1},
        {"task": "embed", "truncate_prompt_tokens": -2},
        {"task": "embed", "truncation_side": "middle"},
        {"task": "classify", "pair": ["a"]},
        {"task": "embed", "unknown": 1},
    ],
)
def test_what_a_pooling_model_computes_is_checked(pooling: Any) -> None:
    with pytest.raises(InvalidSamplingParamsError, match="a task of embed, classify, token_embed") as raised:
        SamplingParams(pooling=pooling)
    assert raised.value.field == "pooling"
    SamplingParams(pooling={"task": "embed", "dimensions": 2**31 - 1, "truncate_prompt_tokens": -1})


def test_two_length_limits_at_once_are_rejected() -> None:
    with pytest.raises(InvalidSamplingParamsError, match="not both"):
        SamplingParams(num_tokens_to_generate=1, num_tokens_total=2)


def test_every_number_has_bounds_that_the_engines_types_hold() -> None:
    """int32 and float32, except for the seed, which has 64 bits."""
    without = {"bad_words", "call_structure", "pooling", "reasoning", "structured_output", "stop_words", "cache_salt"}
    for item in fields(SamplingParams):
        rule = PARAMETERS[item.name].rule
        if item.name in without or isinstance(item.default, bool):
            assert rule.bounds is None
            continue
        assert rule.bounds is not None, f"{item.name} has no bounds"
        low, high = rule.bounds.minimum, rule.bounds.maximum
        assert f"{low:,} to {high:,}" in rule.allowed
        if item.name == "seed":
            assert (low, high) == (0, 2**64 - 1)
        elif rule.bounds.is_whole:
            assert -(2**31) <= low <= high < 2**31
        else:
            assert all(value == 0 or 1e-3 < abs(value) < 1e30 for value in (low, high))


@pytest.mark.parametrize(
    "values",
    [
        {"temperature": 0, "top_k": 0, "top_p": 0, "min_p": 0, "repetition_penalty": 0.01},
        {"temperature": 2, "top_p": 1, "min_p": 1, "repetition_penalty": 100, "logit_bias": {0: -100, 2**31 - 1: 100}},
        {"temperature": 1e-6, "presence_penalty": -2, "frequency_penalty": 2, "seed": 2**64 - 1, "termination_id": -1},
        {"temperature": 1000, "top_n_logprobs": 1000, "priority": -(2**31), "stop_token_ids": (0, 2**31 - 1)},
    ],
)
def test_what_clients_send_is_valid(values: dict[str, object]) -> None:
    SamplingParams(**values)


def test_a_temperature_that_float32_cannot_divide_by_is_greedy() -> None:
    assert [SamplingParams(temperature=value).is_greedy for value in (0, 1e-44, 1e-6, 1e-4)] == [
        True,
        True,
        True,
        False,
    ]


def test_filters_compose() -> None:
    assert SamplingParams(top_k=5, top_p=1.0, temperature=0.5).top_k == 5


def test_unknown_attributes_survive_a_round_trip() -> None:
    params = SamplingParams(top_k=3, stop_words=[], logit_bias={7: -1.5})
    params.add_attributes({"beam": 4})
    again = SamplingParams.deserialize(params.serialize())
    assert again.beam == 4  # type: ignore[attr-defined]
    assert again.top_k == 3
    assert again.stop_words == []
    assert again.logit_bias == {7: -1.5}
