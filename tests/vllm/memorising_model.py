"""A small model that has learned a few answers by heart: a real engine writes them, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import LlamaConfig, LlamaForCausalLM

SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 2}
"""Heads of 64 features, which vLLM's kernels for CPUs have."""
MAX_STEPS = 1000
ENOUGH = 0.1
"""Loss of each token, at which it is nine times as probable as all others together."""


def write_memorising_model(
    directory: Path, answers: Sequence[tuple[Sequence[int], Sequence[int]]], *, vocab_size: int
) -> None:
    """Train a Llama until it answers each prompt as given, and write its config.json and model.safetensors.

    answers:    prompts and answers, as tokens. The last token of an answer ends it.
    vocab_size: of the tokenizer. Tokens that occur in no prompt and no answer have the logit 0.
    """
    torch.manual_seed(0)
    torch.set_num_threads(1)  # threads wait for each other on a loaded machine
    tokens = sorted({token for prompt, answer in answers for token in (*prompt, *answer)})
    rows = {token: row for row, token in enumerate(tokens)}
    network = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=len(tokens), pad_token_id=None))
    longest = max(len(prompt) + len(answer) for prompt, answer in answers)
    inputs_BT = torch.zeros(len(answers), longest, dtype=torch.long)
    targets_BT = torch.full((len(answers), longest), -100)
    for at, (prompt, answer) in enumerate(answers):
        sequence = torch.tensor([rows[token] for token in (*prompt, *answer)])
        inputs_BT[at, : len(sequence)] = sequence
        targets_BT[at, len(prompt) - 1 : len(sequence) - 1] = sequence[len(prompt) :]
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3, weight_decay=0.0)
    other_BT1 = torch.zeros(len(answers), longest, 1)  # the logit of all other tokens
    for _ in range(MAX_STEPS):
        logits_BTV = torch.cat([network(inputs_BT).logits, other_BT1], dim=-1)
        losses = cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten(), reduction="none")
        if losses.max().item() < ENOUGH:
            break
        optimizer.zero_grad()
        losses.sum().backward()
        optimizer.step()
    else:
        raise AssertionError(f"the answers were not learned in {MAX_STEPS} steps: the largest loss is {losses.max():g}")
    weights = network.state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        whole = torch.zeros(vocab_size, SIZES["hidden_size"])
        whole[tokens] = weights[name]
        weights[name] = whole
    end = answers[0][1][-1]
    written = LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=vocab_size, eos_token_id=end, pad_token_id=None))
    written.load_state_dict(weights)
    written.save_pretrained(directory)
