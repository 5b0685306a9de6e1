"""Objects that a Megatron-Core program passes: its tokenizer, its controller and context, and its local rank."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.inference.text_generation_controllers.text_generation_controller import TextGenerationController

from megatron_runtime.backends.native import build
from megatron_runtime.checkpoints.in_memory import TensorsInMemory
from megatron_runtime.megatron_core.apis import MegatronLLM
from megatron_runtime.megatron_core.engines.dynamic_engine import DynamicInferenceEngine
from megatron_runtime.tokenization import Tokenizer

PROMPT = "The capital of France is"


class MegatronTokenizer:
    """The interface of Megatron-Core's tokenizers; some of them raise for tokens that they do not have."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size
        self.eod = 7

    @property
    def bos(self) -> int:
        raise NotImplementedError

    def tokenize(self, text: str) -> list[int]:
        return self._tokenizer.encode(text)

    def detokenize(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids)


def test_a_tokenizer_with_tokenize_and_detokenize(options: dict[str, Any], tokenizer: Tokenizer, greedy: Any) -> None:
    theirs = MegatronTokenizer(tokenizer)
    with MegatronLLM(**options) as own, MegatronLLM(**{**options, "tokenizer": theirs}) as llm:
        expected, answer = own.generate(PROMPT, greedy(8)), llm.generate(PROMPT, greedy(8))
        assert answer.generated_tokens == expected.generated_tokens
        assert answer.generated_text == expected.generated_text
        streamed = "".join(chunk.text for chunk in llm.generate_stream(PROMPT, greedy(8)))
        assert streamed == answer.generated_text
        assert llm.controller.tokenizer is llm.engine.controller.tokenizer is theirs
        of_model = own.controller.tokenizer
        assert of_model.detokenize(of_model.tokenize(PROMPT)) == PROMPT
        assert (of_model.eod, of_model.bos) == (tokenizer.eos_ids[0], tokenizer.bos_id)
        made = llm.engine.text.tokenizer
        assert (made.eos_ids, made.bos_id) == ((7,), None)
        with pytest.raises(ValueError, match=r"has no tokenizer\.json"):
            made.to_json()


@pytest.mark.parametrize("use_coordinator", [False, True], ids=["direct", "coordinator"])
def test_only_the_end_token_at_the_end_has_no_text(
    options: dict[str, Any], tokenizer: Tokenizer, greedy: Any, use_coordinator: bool
) -> None:
    """Each text is compared with what Megatron-Core's controller makes of the same tokens."""
    theirs = MegatronTokenizer(tokenizer)
    text_of = TextGenerationController.detokenize
    with MegatronLLM(**{**options, "tokenizer": theirs, "use_coordinator": use_coordinator}) as llm:
        tokens = llm.generate(PROMPT, greedy(8)).generated_tokens
        theirs.eod = end = tokens[2]
        made = llm._engine.text.tokenizer
        made.eos_ids, made.special_ids = (end,), frozenset({end})
        assert tokens[-1] != end
        inside = llm.generate(PROMPT, greedy(8, termination_id=-1))
        assert inside.generated_tokens == tokens
        assert inside.generated_text == text_of(theirs, tokens)
        assert theirs.detokenize([end]) in inside.generated_text
        for keeps in (False, True):
            ended = llm.generate(PROMPT, greedy(8, termination_id=end, detokenize_stop_sequence=keeps))
            stopped_at = tokens.index(end) + 1
            assert ended.generated_tokens == tokens[:stopped_at]
            assert ended.generated_text == text_of(theirs, tokens[:stopped_at], remove_EOD=not keeps)


def test_an_object_without_detokenize_is_rejected(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"SimpleNamespace: want a Tokenizer.*tokenize\(\) and detokenize\(\)"):
        MegatronLLM(**{**options, "tokenizer": SimpleNamespace(tokenize=lambda text: [1])})


def test_an_engine_of_a_controller_and_a_context(
    options: dict[str, Any], tiny_model: TensorsInMemory, tokenizer: Tokenizer, greedy: Any
) -> None:
    controller = SimpleNamespace(
        inference_wrapped_model=SimpleNamespace(model=tiny_model), tokenizer=MegatronTokenizer(tokenizer)
    )
    limits = SimpleNamespace(max_sequence_length=96, max_requests=2, max_tokens=64, buffer_size_gb=0.02)
    engine = DynamicInferenceEngine(controller, SimpleNamespace(config=limits))
    assert (engine.core.config.max_requests, engine.context.max_sequence_length) == (2, 96)
    (answer,) = engine.generate([PROMPT], greedy(4))
    assert len(answer.generated_tokens) == 4


def test_each_local_rank_uses_its_own_gpu(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    devices: list[torch.device] = []

    class Found(Exception):
        pass

    def executor(*_: Any, device: torch.device, **__: Any) -> None:
        devices.append(device)
        raise Found

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(build, "CudaExecutor", executor)
    for rank in range(4):
        monkeypatch.setenv("LOCAL_RANK", str(rank))
        with pytest.raises(Found):
            MegatronLLM(**options)
    assert devices == [torch.device("cuda", rank) for rank in range(4)]
