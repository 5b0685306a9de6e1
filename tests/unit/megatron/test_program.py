"""A program written for megatron.core.inference runs on this project when its imports are changed."""

from __future__ import annotations

import os
import runpy
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from gpt_models import logits_of, make_configured_gpt
from gpt_program import Send, in_processes

PROGRAM = Path(__file__).with_name("megatron_program.py")


def _run(rank: int, port: int, send: Send, world: int) -> None:
    environment = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in environment.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    changed = PROGRAM.read_text().replace("megatron.core.inference", "megatron_runtime.megatron_core")
    assert changed != PROGRAM.read_text()
    with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
        file.write(changed)
        file.flush()
        program = runpy.run_path(file.name)
    report = program["main"](world)
    if rank == 0:
        report["expected"] = None
        if world == 1:
            model = make_configured_gpt("llama")
            with torch.no_grad():
                report["expected"] = [
                    logits_of(model, [*prompt, *answer])[len(prompt) - 1 : -1].argmax(-1).tolist()
                    for prompt, answer in zip(program["PROMPTS"], report["answers"], strict=True)
                ]
        send(report)


@cache
def report_of(world: int) -> dict[str, Any]:
    report: dict[str, Any] = in_processes(world, _run, world)
    return report


def test_it_gives_the_tokens_of_megatron() -> None:
    report = report_of(1)
    assert report["answers"] == report["expected"]
    assert report["after"] == report["answers"][0]
    assert report["text"] == "".join(f" {token}" for token in report["answers"][1])


def test_with_tensor_parallel_ranks_it_gives_the_same() -> None:
    assert report_of(2)["answers"] == report_of(1)["answers"]
    assert report_of(2)["after"] == report_of(1)["after"]


@pytest.mark.parametrize("line", ["MegatronLLM", "InferenceConfig", "InferenceClient", "SamplingParams"])
def test_only_imports_name_megatron_inference(line: str) -> None:
    text = PROGRAM.read_text().split('"""', 2)[2]
    assert all(part.startswith("from ") for part in text.splitlines() if "megatron.core.inference" in part)
    assert any(line in part for part in text.splitlines() if part.startswith("from megatron.core.inference"))
