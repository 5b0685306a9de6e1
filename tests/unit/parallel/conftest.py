"""Ranks as processes. They are forked from one that has imported torch, which takes longer than all they do."""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import rank_program
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

SECONDS = 120
COMMON = {
    "vocab_size": 325,  # no multiple of the ranks
    "hidden_size": 72,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "initializer_range": 0.2,
}


@dataclass
class Engine:
    """The ranks of one engine, and what rank 0 says."""

    processes: list[ForkServerProcess]
    said: Connection

    def told(self) -> Any:
        """What rank 0 says next."""
        assert self.said.poll(SECONDS), "rank 0 says nothing"
        return self.said.recv()

    def exit_codes(self) -> list[int | None]:
        for process in self.processes:
            process.join(SECONDS)
        return [process.exitcode for process in self.processes]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Engine]]:
    """start(told, ranks=…): the ranks of an engine that does what rank_program says; all end with the test.

    Each writes its standard error to `rank-N` and its termination message to `rank-N.end` in tmp_path.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([rank_program.__name__])
    # Not every Python hands its path to the server, which then skips what it cannot import.
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
    engines: list[Engine] = []

    def start(told: dict[str, Any], *, ranks: list[int] | None = None) -> Engine:
        world = told["tensor"] * told["pipeline"] * told["expert"]
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        receiver, sender = context.Pipe(duplex=False)
        processes = [
            context.Process(
                target=rank_program.be_rank,
                args=(told, rank, world, port, str(tmp_path / f"rank-{rank}"), sender if rank == 0 else None),
            )
            for rank in (range(world) if ranks is None else ranks)
        ]
        for process in processes:
            process.start()
        engines.append(Engine(processes, receiver))
        return engines[-1]

    yield start
    for engine in engines:
        for process in engine.processes:
            process.kill()
            process.join()


@pytest.fixture(scope="package")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """llama(heads, kv_heads): the directory of a small random model."""
    made: dict[tuple[int, int], str] = {}

    def make(heads: int, kv_heads: int) -> str:
        if (heads, kv_heads) not in made:
            torch.manual_seed(1)
            directory = tmp_path_factory.mktemp("llama")
            config = LlamaConfig(**COMMON, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=8)
            LlamaForCausalLM(config).save_pretrained(directory)
            made[heads, kv_heads] = str(directory)
        return made[heads, kv_heads]

    return make


@pytest.fixture(scope="package")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small random model of experts."""
    torch.manual_seed(2)
    directory = tmp_path_factory.mktemp("mixtral")
    config = MixtralConfig(
        **COMMON,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        sliding_window=None,
    )
    MixtralForCausalLM(config).save_pretrained(directory)
    return str(directory)
