"""A program with MegatronLLM gets the weights that a trainer has published: `update_weights(source=Trainer(...))`."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_runtime.megatron_core.apis import MegatronLLM, SamplingParams
from megatron_runtime.protocol.published_weights import WeightsUnavailableError
from megatron_runtime.tokenization import load_tokenizer
from megatron_runtime.trainer import Trainer, WeightServer
from megatron_runtime.transport.control_calls import ControlRejectedError
from megatron_runtime.transport.security import TRAINER, generate_key_files

PROMPT = [5, 9, 200, 31, 7]
PARAMS = SamplingParams(temperature=0.0, num_tokens_to_generate=6, termination_id=-1)


def _model(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=load_tokenizer("builtin:smollm2-135m").vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=None,
        initializer_range=0.5,
    )
    return LlamaForCausalLM(config).eval()


def _greedy(model: LlamaForCausalLM) -> list[int]:
    tokens = list(PROMPT)
    with torch.no_grad():
        for _ in range(PARAMS.num_tokens_to_generate or 0):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(PROMPT) :]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    for name, text in {**generate_key_files(), **generate_key_files(roles=(TRAINER,))}.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def test_a_program_gets_the_weights_and_the_epoch_of_a_trainer(keys: Path) -> None:
    policy, trained = _model(1), _model(2)
    with (
        MegatronLLM(
            model=policy, tokenizer="builtin:smollm2-135m", use_coordinator=True, dtype="float32", threads=1
        ) as llm,
        WeightServer(trained, keys=keys) as server,
    ):
        trainer = Trainer(server.address, keys=keys)
        assert llm.generate(PROMPT, PARAMS).generated_tokens == _greedy(policy)
        with pytest.raises(WeightsUnavailableError, match="it has published nothing yet"):
            llm.update_weights(source=trainer)
        server.publish(7)
        llm.update_weights(source=trainer)
        answer = llm.generate(PROMPT, PARAMS)
        assert answer.generated_tokens == _greedy(trained)
        assert answer.policy_epoch == [[0, 7]]
        with pytest.raises(ValueError, match="epoch=9: leave it out"):
            llm.update_weights(source=trainer, epoch=9)
        with torch.no_grad():
            trained.lm_head.weight.mul_(-1)
        server.publish(6)
        with pytest.raises(ControlRejectedError, match="epoch 6 is not above 7"):
            llm.update_weights(source=trainer)
        assert llm.generate(PROMPT, PARAMS).generated_tokens == answer.generated_tokens
        with pytest.raises(RuntimeError, match="give a coordinator"):
            server.status()
