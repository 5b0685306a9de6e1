"""Which features of an engine a request needs by its sampling parameters, and what its sender announces."""

from __future__ import annotations

from typing import Any

import pytest

from megatron_runtime.client.pending import PendingRequest
from megatron_runtime.protocol.limits import MAX_LACKS, MAX_NEEDS_CHARACTERS, MAX_PARAMETERS
from megatron_runtime.requests import capabilities
from megatron_runtime.requests.capabilities import (
    BEST_EFFORT_PARAMETERS,
    FIRST_PARAMETERS,
    KNOWN_PARAMETERS,
    NEEDS,
    described,
    is_parameter,
    needs_of,
)
from megatron_runtime.requests.sampling_params import SamplingParams

JSON = {"type": "json_object"}


@pytest.mark.parametrize(
    ("values", "needs"),
    [
        ({}, ""),
        ({"temperature": 2.0, "top_k": 7, "seed": 3, "repetition_penalty": 1.5, "stop_words": ["."]}, ""),
        ({"presence_penalty": 1.0, "frequency_penalty": 1.0}, "PENALTIES"),
        ({"min_p": 0.5}, "MIN_P"),
        ({"min_p": 0.5, "temperature": 0.0}, ""),
        ({"temperature": 2.5}, "HIGH_TEMPERATURE"),
        ({"structured_output": JSON}, "STRUCTURED_OUTPUT"),
        ({"structured_output": {**JSON, "after": [7]}}, "STRUCTURED_OUTPUT STRUCTURE_AFTER_REASONING"),
        ({"logit_bias": {7: 1.0}}, "LOGIT_BIAS"),
        ({"allowed_token_ids": [7]}, "allowed_token_ids"),
        ({"return_log_probs": True, "top_n_logprobs": 2}, "LOG_PROBS PROMPT_LOG_PROBS"),
        ({"return_log_probs": True, "skip_prompt_log_probs": True}, "LOG_PROBS"),
        ({"return_hidden_state": True, "num_tokens_to_generate": 1}, "HIDDEN_STATES"),
        ({"priority": -1, "temperature": 3}, "HIGH_TEMPERATURE PRIORITY"),
        ({"pooling": {"task": "token_embed"}}, "TOKEN_EMBED pooling"),
    ],
)
def test_the_sender_of_a_request_announces_what_it_needs(values: dict[str, Any], needs: str) -> None:
    params = SamplingParams(**values)
    assert needs_of(params) == needs
    assert PendingRequest.make([1], params, streaming=True).meta.needs == needs


def test_every_need_fits_the_messages_and_has_a_name_that_other_releases_know() -> None:
    names = list(dict.fromkeys(need.capability.name for need in NEEDS))
    assert set(names) >= {
        *("STRUCTURED_OUTPUT", "STRUCTURE_AFTER_REASONING", "LOGIT_BIAS", "LOG_PROBS", "PROMPT_LOG_PROBS"),
        *("HIDDEN_STATES", "HIGH_TEMPERATURE", "PRIORITY"),
    }
    assert len(" ".join(names)) <= MAX_NEEDS_CHARACTERS
    assert len(names) <= MAX_LACKS


def test_what_an_engine_may_ignore_is_no_need() -> None:
    call_structure = {"markers": {"<tool_call>": "calls"}, "grammar": 'calls: "x"'}
    params = SamplingParams(call_structure=call_structure, reasoning={"closing": [7], "is_open": True, "budget": 5})
    assert needs_of(params) == ""


def test_a_sampling_parameter_that_was_added_after_the_first_release_is_a_need(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing but the field is declared: what is not in the list of the first release is a later parameter."""
    assert capabilities.LATER_PARAMETERS.keys() == set(KNOWN_PARAMETERS) - FIRST_PARAMETERS - BEST_EFFORT_PARAMETERS
    monkeypatch.setattr(capabilities, "LATER_PARAMETERS", {"top_p": 0.0, "stop_words": None})
    assert needs_of(SamplingParams()) == ""
    assert needs_of(SamplingParams(top_p=0.1, priority=1)) == "PRIORITY top_p"
    assert needs_of(SamplingParams(stop_words=["."])) == "stop_words"


def test_a_name_says_whether_it_is_a_parameter_or_a_capability() -> None:
    assert all(map(is_parameter, KNOWN_PARAMETERS))
    assert not any(is_parameter(need.capability.name) for need in NEEDS)
    assert len(KNOWN_PARAMETERS) <= MAX_PARAMETERS


def test_a_need_is_described_by_its_parameter() -> None:
    assert described("HIGH_TEMPERATURE") == ("temperature", "temperatures above 2")
    assert described("OF_A_LATER_RELEASE") == ("", "OF_A_LATER_RELEASE")
