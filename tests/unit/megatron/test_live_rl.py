"""MegatronLLM on a live GPTModel: training steps between rollouts, and models that are rejected."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gpt_models import fill, logits_of, make_gpt
from gpt_program import Send, begin_single_rank, in_processes
from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

from megatron_runtime.checkpoints.in_memory import model_in_memory
from megatron_runtime.megatron_core.apis import MegatronLLM
from megatron_runtime.megatron_core.config import InferenceConfig
from megatron_runtime.megatron_core.sampling_params import SamplingParams
from megatron_runtime.models.config import UnsupportedModelError
from megatron_runtime.tokenization import load_tokenizer
from megatron_runtime.transport.control_calls import ControlRejectedError

PROMPT = [5, 9, 200, 31, 7]


class Wrapped(torch.nn.Module):
    """As Float16Module and DistributedDataParallel, which have the model as `module`."""

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module


def _rollout(llm: MegatronLLM, model: Any) -> dict[str, Any]:
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=6, termination_id=-1)
    answer = llm.generate(PROMPT, params)
    with torch.no_grad():
        logits = logits_of(model, [*PROMPT, *answer.generated_tokens])
    return {
        "tokens": answer.generated_tokens,
        "expected": logits[len(PROMPT) - 1 : -1].argmax(-1).tolist(),
        "epochs": answer.policy_epoch,
    }


def _train_between_rollouts(rank: int, port: int, send: Send) -> None:
    begin_single_rank(port)
    model = make_gpt("qwen3, tied")
    config = InferenceConfig(max_sequence_length=64, buffer_size_gb=0.01)
    with MegatronLLM(
        model=Wrapped(model),
        tokenizer=load_tokenizer("builtin:smollm2-135m"),
        inference_config=config,
        use_coordinator=True,
        dtype="float32",
        threads=1,
    ) as llm:
        rollouts = [_rollout(llm, model)]
        optimizer = torch.optim.SGD(model.parameters(), lr=5.0)
        tokens = [*PROMPT, *rollouts[0]["tokens"]]
        logits_of(model, tokens)[:-1].log_softmax(-1).gather(1, torch.tensor(tokens[1:])[:, None]).mean().backward()
        optimizer.step()
        llm.update_weights(source=model)
        rollouts.append(_rollout(llm, model))

        # The memory of a suspended engine is free for training.
        llm.pause()
        llm.suspend()
        fill(model, seed=3)
        llm.resume()
        llm.update_weights(source=model, epoch=7)
        llm.unpause()
        rollouts.append(_rollout(llm, model))

        try:
            llm.update_weights(source=make_gpt("llama"))
        except ControlRejectedError as error:
            rejection = str(error)
        rollouts.append(_rollout(llm, model))
    send((rollouts, rejection))


def test_the_engine_follows_the_trained_model() -> None:
    rollouts, rejection = in_processes(1, _train_between_rollouts)
    assert [rollout["epochs"] for rollout in rollouts] == [[[0, 0]], [[0, 1]], [[0, 7]], [[0, 7]]]
    for rollout in rollouts:
        assert rollout["tokens"] == rollout["expected"]
    assert len({tuple(rollout["tokens"]) for rollout in rollouts}) == 3
    assert "family llama, this engine runs one with qwen3" in rejection


@torch.no_grad()
def _replay_experts(rank: int, port: int, send: Send) -> None:
    begin_single_rank(port)
    model = make_gpt("mixtral")
    config = InferenceConfig(max_sequence_length=64, buffer_size_gb=0.01)
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=6, termination_id=-1)
    tokenizer = load_tokenizer("builtin:smollm2-135m")
    with MegatronLLM(model=model, tokenizer=tokenizer, inference_config=config, dtype="float32", threads=1) as llm:
        answer = llm.generate(PROMPT, params)
    tokens, routing = [*PROMPT, *answer.generated_tokens][:-1], answer.routing_indices
    logits = [logits_of(model, tokens)]
    RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    for experts in (routing, (routing + 1) % 4):
        RouterReplay.set_replay_data(list(experts.unbind(1)))
        logits.append(logits_of(model, tokens))
    send([one.numpy() for one in logits])


def test_megatron_replays_the_routing_indices_of_an_answer() -> None:
    computed, replayed, with_others = in_processes(1, _replay_experts)
    np.testing.assert_allclose(replayed, computed, atol=1e-5)
    assert abs(with_others - computed).max() > 0.1


UNSUPPORTED = [
    ("normalization", "LayerNorm", "supported is 'RMSNorm'"),
    ("gated_linear_unit", False, "swiglu False: supported is True"),
    ("activation_func", torch.nn.functional.gelu, "activation_func 'gelu'"),
    ("multi_latent_attention", True, "multi_latent_attention True: supported is False"),
    ("softmax_type", "learnable", "softmax_type 'learnable': supported is 'vanilla'"),
    ("window_size", (128, 0), "window_size"),
    ("context_parallel_size", 2, "context_parallel_size 2: supported is 1"),
    ("add_qkv_bias", True, "lacks 1: decoder.layers.self_attention.linear_qkv.bias"),
    ("layernorm_zero_centered_gamma", True, "apply_layernorm_1p True: supported is False"),
]


def _reject(rank: int, port: int, send: Send) -> None:
    begin_single_rank(port)
    model, found = make_gpt("llama"), []
    for name, value, _ in UNSUPPORTED:
        before = getattr(model.config, name)
        setattr(model.config, name, value)
        try:
            model_in_memory(model)
            found.append("accepted")
        except UnsupportedModelError as error:
            found.append(str(error))
        setattr(model.config, name, before)
    model.rotary_pos_emb.inv_freq *= 2
    try:
        model_in_memory(model)
    except UnsupportedModelError as error:
        found.append(str(error))
    send(found)


def test_a_model_that_would_compute_something_else_is_rejected() -> None:
    *fields, rotary = in_processes(1, _reject)
    for (name, _, wanted), message in zip(UNSUPPORTED, fields, strict=True):
        assert wanted in message, name
    assert "rotates by frequencies" in rotary


def _read(model: Any) -> dict[str, torch.Tensor]:
    checkpoint = model_in_memory(model).checkpoint
    return {name: checkpoint.read(name) for name in checkpoint.kinds}


def _equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[bool]:
    return [torch.equal(found[name], expected[name]) for name in expected]


def _transformer_engine_names(rank: int, port: int, send: Send) -> None:
    """Models with the names of Transformer Engine's layer spec, which has a norm of its own before the experts."""
    begin_single_rank(port)
    found = {}
    for case in ("mixtral", "qwen3_moe, a dense layer"):
        model = make_gpt(case)
        expected = _read(model)
        tensors = model.sharded_state_dict()
        for name, tensor in tensors.items():
            if name.endswith("pre_mlp_layernorm.weight") and name.replace("pre_mlp_layernorm", "mlp.router") in tensors:
                tensor.key = tensor.key.replace("mlp.linear_fc1.layer_norm_weight", "pre_mlp_layernorm.weight")
        model.sharded_state_dict = lambda tensors=tensors: tensors
        found[case] = _equal(_read(model), expected)
    send(found)


def test_the_names_of_transformer_engine_are_read() -> None:
    found = in_processes(1, _transformer_engine_names)
    assert {case: len(equal) for case, equal in found.items()} == {"mixtral": 79, "qwen3_moe, a dense layer": 77}
    assert all(all(equal) for equal in found.values())


def test_other_objects_are_no_models() -> None:
    with pytest.raises(UnsupportedModelError, match="want a GPTModel of Megatron-Core"):
        model_in_memory(torch.nn.Linear(2, 2))
