"""Sampling parameters are checked where they enter."""

import pytest

from megatron_runtime.sampling_params import InvalidSamplingParamsError, SamplingParams


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", 1.01),
        ("num_tokens_to_generate", 0),
        ("seed", 2**64),
        ("seed", -1),
        ("stop_words", "stop"),
        ("stop_words", [1]),
        ("bad_words", "bad"),
        ("bad_words", [1]),
        ("bad_words", [" "]),
        ("bad_words", ["a" * 2048, "b" * 2049]),
        ("bad_words", ["a"] * 129),
        ("stop_token_ids", ["a"]),
        ("streaming_interval", 0),
        ("termination_id", -2),
        ("min_p", 1.5),
        ("repetition_penalty", 0.0),
        ("presence_penalty", 2.1),
        ("frequency_penalty", float("inf")),
        ("logit_bias", {"a": 1.0}),
        ("logit_bias", {1: 101.0}),
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


def test_two_length_limits_at_once_are_rejected() -> None:
    with pytest.raises(InvalidSamplingParamsError, match="not both"):
        SamplingParams(num_tokens_to_generate=1, num_tokens_total=2)


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
