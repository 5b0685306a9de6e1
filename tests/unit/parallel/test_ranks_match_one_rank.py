"""The answers of an engine of several ranks are those of one rank, for every split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from random_checkpoint import OVERFLOW, random_tensors, write_model, write_overflowing_model
from rank_program import KV_CACHE_MEMORY, answers
from soak import SOAK

from megatron_runtime.backends.native.cpu.executor import CpuExecutor
from megatron_runtime.checkpoints.convert import convert
from megatron_runtime.checkpoints.source import resolve
from megatron_runtime.models.config import MoEConfig
from megatron_runtime.models.cpp_decoder import CppDecoder
from megatron_runtime.models.decoder import DecoderModel

from .conftest import SMALL

PROMPTS = [[1, 5, 9, 3], [7] * 40, [2, 3], [11, 12, 13, 14, 15], [7] * 40 + [8]]
SAMPLING: list[dict[str, Any]] = [
    {"temperature": 0.0, "return_log_probs": True},
    {"temperature": 0.0, "return_log_probs": True, "skip_prompt_log_probs": False},
    {"temperature": 1.0, "top_k": 20, "seed": 5},
    {"temperature": 0.0, "repetition_penalty": 1.3, "logit_bias": {9: 2.0}},
    {"temperature": 0.8, "top_p": 0.9, "return_log_probs": True, "top_n_logprobs": 2},
]


def alone(model: str, options: dict[str, Any], *, decoder: type[DecoderModel] = DecoderModel) -> dict[int, Any]:
    """The answers of one rank. decoder: type of its decoder."""
    threads = torch.get_num_threads()
    executor = CpuExecutor(
        resolve(model),
        dtype="float32",
        threads=1,
        kv_cache_memory=KV_CACHE_MEMORY,
        records_routing=options["records_routing"],
    )
    executor.load()
    try:
        assert isinstance(executor.model, decoder)
        return answers(executor, options)
    finally:
        torch.set_num_threads(threads)


def check_equal(found: dict[int, Any], expected: dict[int, Any]) -> None:
    for index, answer in expected.items():
        assert found[index]["tokens"] == answer["tokens"]
        for kind in ("log_probs", "prompt_log_probs"):
            np.testing.assert_allclose(found[index][kind], answer[kind], rtol=1e-4, atol=1e-4)
        assert found[index].get("routing") == answer.get("routing")


# `make test` runs the splits that contain the others.
part_of_another = pytest.mark.skipif(not SOAK, reason="a part of another split: `make soak` runs it")


@pytest.mark.long
@pytest.mark.parametrize(
    ("tensor", "pipeline", "expert", "heads", "kv_heads"),
    [
        pytest.param(2, 1, 1, 4, 1, id="TP 2 of one key-value head"),
        pytest.param(3, 1, 1, 9, 3, id="TP 3"),
        pytest.param(1, 2, 1, 6, 2, id="PP 2", marks=part_of_another),
        pytest.param(2, 2, 1, 4, 2, id="TP 2 x PP 2"),
        pytest.param(1, 1, 2, 0, 0, id="EP 2", marks=part_of_another),
        pytest.param(2, 1, 2, 0, 0, id="TP 2 x EP 2"),
    ],
)
def test_answers_of_ranks_equal_one_rank(
    start,
    tmp_path: Path,
    llama: Callable[..., str],
    mixtral: str,
    *,
    tensor: int,
    pipeline: int,
    expert: int,
    heads: int,
    kv_heads: int,
) -> None:
    model = llama(heads, kv_heads) if heads else mixtral
    options = {
        "prompts": PROMPTS,
        "sampling": SAMPLING,
        "suspend_after": 5,
        "model": model,
        "records_routing": not heads,
    }
    held = model
    if tensor > 1 and tensor < tensor * pipeline * expert:  # what one rank wrote as a whole is read in other parts
        held = str(tmp_path / "megatron")
        convert(model, Path(held), to="torch_dist")
    engine = start({**options, "model": held, "tensor": tensor, "pipeline": pipeline, "expert": expert})
    expected, found = alone(model, options), engine.next_message()
    assert engine.exit_codes() == [0] * (tensor * pipeline * expert)
    check_equal(found, expected)
    assert all(len(answer["tokens"]) == 12 for answer in found.values())
    assert len(found[1]["prompt_log_probs"]) == 39


@pytest.mark.parametrize(
    ("tensor", "pipeline", "expert"),
    [
        pytest.param(1, 1, 2, id="EP 2", marks=part_of_another),
        pytest.param(2, 1, 2, id="TP 2 x EP 2"),
        pytest.param(1, 2, 2, id="PP 2 x EP 2"),
    ],
)
def test_experts_of_ranks_in_the_kernels_equal_one_rank(
    start, tmp_path: Path, *, tensor: int, pipeline: int, expert: int
) -> None:
    config = replace(
        SMALL,
        family="mixtral",
        vocab_size=320,  # every size consists of whole panels and blocks
        hidden_size=64,
        num_heads=4,
        head_dim=16,
        moe=MoEConfig(num_experts=4, experts_per_token=2, intermediate_size=128, normalize=True),
    )
    model = str(write_model(tmp_path / "model", config, random_tensors(config, seed=3)))
    options = {"prompts": PROMPTS, "sampling": SAMPLING, "suspend_after": 5, "model": model, "records_routing": True}
    engine = start({**options, "tensor": tensor, "pipeline": pipeline, "expert": expert})
    expected, found = alone(model, options, decoder=CppDecoder), engine.next_message()
    assert engine.exit_codes() == [0] * (tensor * pipeline * expert)
    check_equal(found, expected)
    layers, per_token = config.num_layers, 2
    for prompt, answer in zip(PROMPTS, found.values(), strict=True):
        assert np.shape(answer["routing"]) == (len(prompt) + 11, layers, per_token)


@pytest.mark.parametrize("kernels", [False, True], ids=["CPU", "GPU-like"])
def test_norms_over_the_heads_of_all_ranks_equal_one_rank(start, tmp_path: Path, *, kernels: bool) -> None:
    """Two ranks have the key-value head, so its mean square is that of either."""
    config = replace(
        SMALL,
        family="olmo2",
        vocab_size=320,  # every size consists of whole panels and blocks
        hidden_size=64,
        intermediate_size=128,
        num_heads=4,
        num_kv_heads=1,
        head_dim=16,
        qk_norm=True,
        joint_qk_norm=True,
        input_norms=False,
        output_norms=True,
    )
    model = str(write_model(tmp_path / "model", config, random_tensors(config, seed=3)))
    options = {"prompts": PROMPTS, "sampling": SAMPLING, "suspend_after": 5, "model": model, "records_routing": False}
    engine = start({**options, "tensor": 2, "pipeline": 1, "expert": 1, "kernels": kernels})
    expected, found = alone(model, options, decoder=CppDecoder), engine.next_message()
    assert engine.exit_codes() == [0, 0]
    check_equal(found, expected)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "expert", "kernels"),
    [
        pytest.param(3, 1, 1, True, id="TP 3", marks=part_of_another),
        pytest.param(2, 2, 1, True, id="TP 2 x PP 2"),
        pytest.param(1, 1, 2, "graphs", id="EP 2", marks=part_of_another),
        pytest.param(2, 1, 2, "graphs", id="TP 2 x EP 2"),
        pytest.param(1, 2, 2, True, id="PP 2 x EP 2"),
        pytest.param(2, 1, 1, "graphs", id="TP 2 of experts"),
    ],
)
def test_answers_of_gpu_like_ranks_equal_one_rank(
    start, llama: Callable[..., str], mixtral: str, *, tensor: int, pipeline: int, expert: int, kernels: bool | str
) -> None:
    """All but NCCL, graphs and the kernels themselves: steps are padded as for graphs, and run launch by launch."""
    model = llama(9, 3) if tensor == 3 else llama(4, 2) if expert == 1 and pipeline > 1 else mixtral
    options: dict[str, Any] = {"prompts": PROMPTS, "sampling": SAMPLING, "suspend_after": 5, "model": model}
    options["records_routing"] = model == mixtral
    options["tcp"] = (tensor, pipeline) == (2, 2)  # with gloo, as ranks of several hosts
    engine = start({**options, "tensor": tensor, "pipeline": pipeline, "expert": expert, "kernels": kernels})
    expected, found = alone(model, options), engine.next_message()
    assert engine.exit_codes() == [0] * (tensor * pipeline * expert)
    check_equal(found, expected)


@pytest.mark.parametrize(
    ("tensor", "pipeline", "expert", "kernels"),
    [
        pytest.param(2, 1, 1, "graphs", id="TP 2 of GPU-like ranks"),
        pytest.param(1, 2, 1, False, id="PP 2"),
        pytest.param(1, 1, 2, False, id="EP 2"),
        pytest.param(2, 1, 2, True, id="TP 2 x EP 2 of GPU-like ranks", marks=part_of_another),
    ],
)
def test_a_row_that_fails_fails_on_every_rank_and_changes_no_other(
    start, tmp_path: Path, *, tensor: int, pipeline: int, expert: int, kernels: bool | str
) -> None:
    """Once in the middle of a prompt, and once where a token is sampled."""
    model = str(write_overflowing_model(tmp_path / "model"))
    prompts = [[1, 5, 9, 3], [*range(20, 60), OVERFLOW, *range(60, 130)], [2, 3], [8, OVERFLOW], [11, 12]]
    failing = {"prompts": prompts, "sampling": SAMPLING, "failing": [1, 3], "model": model, "records_routing": False}
    engine = start({**failing, "tensor": tensor, "pipeline": pipeline, "expert": expert, "kernels": kernels})
    expected, found = alone(model, failing, decoder=CppDecoder), engine.next_message()
    assert engine.exit_codes() == [0] * (tensor * pipeline * expert)
    for index in (0, 2, 4):
        assert found[index]["tokens"] == expected[index]["tokens"]
        assert len(found[index]["tokens"]) == 12
    for index in (1, 3):
        assert found[index]["tokens"] == expected[index]["tokens"] == []
        assert "not finite" in found[index]["error"][0]
