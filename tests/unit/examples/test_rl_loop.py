"""The example of reinforcement learning, in this process: other tests have imported transformers here, which takes
longer than all that the example does."""

import runpy
import sys
from pathlib import Path

import pytest
import torch

from megatron_runtime.tokenization import load_tokenizer

EXAMPLE = Path(__file__).parents[3] / "docs" / "examples" / "rl_loop.py"
BUILTIN = "builtin:smollm2-135m"


@pytest.fixture
def policy(tmp_path: Path) -> Path:
    """A small Llama of random weights with the built-in model's vocabulary."""
    from transformers import LlamaConfig, LlamaForCausalLM

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


def test_rl_loop(policy: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(policy), "--tokenizer", BUILTIN, "--steps", "2"]
    monkeypatch.setattr(sys, "argv", [str(EXAMPLE), *arguments])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert [line.split(":")[0] for line in capsys.readouterr().out.splitlines()] == ["epoch 1", "epoch 2"]
