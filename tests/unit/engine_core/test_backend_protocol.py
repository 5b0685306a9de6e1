"""The interface between the worker and a backend: capabilities, results by rank."""

import dataclasses

import pytest
from echo_engine import EchoBackend

from megatron_runtime.distributed.errors import RankLostError
from megatron_runtime.engine.backend import (
    Capability,
    EngineBackend,
    RankResults,
    UnsupportedVerbError,
)
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.requests.sampling_params import InvalidSamplingParamsError, SamplingParams

SETTINGS = EngineSettings(coordinator="tcp://127.0.0.1:1", name="e", kv_cache_memory=1 << 20)
USES = {
    "structured_output": ({"structured_output": {"type": "json_object"}}, Capability.STRUCTURED_OUTPUT),
    "logit_bias": ({"logit_bias": {7: 1.0}}, Capability.LOGIT_BIAS),
    "bad_words": ({"bad_words": ["a"]}, Capability.BAD_WORDS),
    "return_log_probs": ({"return_log_probs": True}, Capability.LOG_PROBS),
    "top_n_logprobs": ({"top_n_logprobs": 2}, Capability.LOG_PROBS),
    "skip_prompt_log_probs": ({"return_log_probs": True, "skip_prompt_log_probs": False}, Capability.PROMPT_LOG_PROBS),
    "temperature": ({"temperature": 2.5}, Capability.HIGH_TEMPERATURE),
    "priority": ({"priority": -1}, Capability.PRIORITY),
}


@pytest.mark.parametrize("name", USES)
def test_a_parameter_without_its_capability_is_rejected_by_name_and_backend(name: str) -> None:
    values, needs = USES[name]
    info = EchoBackend(SETTINGS).info
    info.check_request(SamplingParams(**values))
    with pytest.raises(InvalidSamplingParamsError, match="backend 'echo'") as rejected:
        dataclasses.replace(info, capabilities=info.capabilities - {needs}).check_request(SamplingParams(**values))
    assert rejected.value.field == name
    assert needs.value in str(rejected.value)


def test_a_backend_announces_what_it_does_not_declare() -> None:
    info = EchoBackend(SETTINGS).info
    assert info.lacks == ("HIDDEN_STATES", "EMBED", "CLASSIFY", "TOKEN_EMBED", "TOKEN_CLASSIFY")
    lacking = EchoBackend(SETTINGS, lacks=[Capability.HIGH_TEMPERATURE])
    assert lacking.info.lacks == (
        *("HIDDEN_STATES", "HIGH_TEMPERATURE"),
        *("EMBED", "CLASSIFY", "TOKEN_EMBED", "TOKEN_CLASSIFY"),
    )
    verbs = frozenset({Capability.SUSPEND, Capability.ADAPTERS})
    assert "LOG_PROBS" in dataclasses.replace(info, capabilities=verbs).lacks


def test_a_pooling_model_takes_no_request_that_generates() -> None:
    info = EchoBackend(SETTINGS, task="embed").info
    info.check_request(SamplingParams(pooling={"task": "embed"}))
    with pytest.raises(InvalidSamplingParamsError, match="use the task 'embed': the model generates no tokens"):
        info.check_request(SamplingParams())
    with pytest.raises(InvalidSamplingParamsError, match="no support for labels of texts"):
        info.check_request(SamplingParams(pooling={"task": "classify"}))


async def test_an_unimplemented_verb_raises_unsupported_by_backend() -> None:
    class Minimal(EngineBackend):
        info = dataclasses.replace(EchoBackend(SETTINGS).info, name="minimal", capabilities=frozenset())

    backend = Minimal()
    for verb in (
        backend.release_memory(),
        backend.restore_memory(),
        backend.stage_weights("other", 1),
        backend.commit_weights(),
        backend.adopt_weights("other", 1),
        backend.load_adapter("tune", "other"),
        backend.unload_adapter("tune"),
        backend.profile(True),
    ):
        with pytest.raises(UnsupportedVerbError, match=r"backend 'minimal' does not have: .*--backend"):
            await verb


def test_results_name_every_failed_rank_of_several() -> None:
    assert RankResults(4).error is None
    assert RankResults(1, {0: "disk full"}).error == "disk full"
    assert RankResults(4, {2: "disk full", 1: "it hangs"}).error == "rank 1: it hangs; rank 2: disk full"
    assert RankResults.of_failure(OSError("disk full"), ranks=4).error == "disk full"
    lost = RankLostError(3, "its connection ended", by_silence=True)
    assert RankResults.of_failure(lost, ranks=4).failed == {3: "its connection ended"}
    with pytest.raises(RuntimeError, match="PAUSE failed: rank 3: its connection ended"):
        RankResults.of_failure(lost, ranks=4).require("PAUSE")
