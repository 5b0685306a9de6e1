"""Each program of docs/examples runs as a reader would run it."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from megatron_runtime.tokenization import load_tokenizer

EXAMPLES = Path(__file__).parents[3] / "docs" / "examples"
BUILTIN = "builtin:smollm2-135m"

Start = Callable[..., subprocess.Popen[str]]


@pytest.fixture
def start() -> Iterator[Start]:
    running: list[subprocess.Popen[str]] = []

    def run(name: str, *arguments: str) -> subprocess.Popen[str]:
        command = [sys.executable, str(EXAMPLES / name), *arguments]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        running.append(process)
        return process

    yield run
    for process in running:
        process.kill()
        process.communicate()


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A small Llama of random weights with the built-in model's vocabulary."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=load_tokenizer(BUILTIN).vocab_size,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path / "policy")
    return tmp_path / "policy"


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=240)
    assert process.returncode == 0, output
    return output


@pytest.mark.long
def test_offline_sync(start: Start) -> None:
    output = finish(start("offline_sync.py", "--new-tokens", "4"))
    assert "The capital of France is| Paris" in output
    assert len(output.splitlines()) >= 4


def test_concurrent_async(start: Start) -> None:
    output = finish(start("concurrent_async.py", "--new-tokens", "4"))
    assert output.count("length") + output.count("stop") == 4


def test_openai_server(start: Start) -> None:
    process = start("openai_server.py", "--port", "0")
    assert process.stdout is not None
    url = process.stdout.readline().split()[-1]
    body = {"model": "smollm2-135m", "prompt": "The capital of France is", "max_tokens": 2, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(request, timeout=120) as answer:
        assert json.load(answer)["choices"][0]["text"].startswith(" Paris")
    process.send_signal(signal.SIGTERM)
    finish(process)


def test_rl_loop(start: Start, policy: Path) -> None:
    output = finish(start("rl_loop.py", "--model", str(policy), "--tokenizer", BUILTIN, "--steps", "2"))
    assert [line.split(":")[0] for line in output.splitlines()] == ["epoch 1", "epoch 2"]
