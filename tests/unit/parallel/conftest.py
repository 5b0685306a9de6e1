"""Ranks as processes, forked from one that has imported torch, because the import takes longer than the test."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import rank_program
from eventually import LONG_SECONDS
from random_checkpoint import LLAMA, random_tensors, write_model
from warm_python import warm_context

from megatron_runtime.cli.processes import free_ports
from megatron_runtime.models.config import MoEConfig
from megatron_runtime.process.listening import private_folder

SMALL = replace(
    LLAMA,
    vocab_size=325,  # no multiple of the ranks
    hidden_size=72,
    intermediate_size=96,
    max_position_embeddings=512,
)


@dataclass
class Engine:
    """The ranks of one engine, and the messages of rank 0."""

    processes: list[ForkServerProcess]
    messages: Connection

    def next_message(self) -> Any:
        """The next message of rank 0."""
        assert self.messages.poll(LONG_SECONDS), "rank 0 sends no message"
        return self.messages.recv()

    def exit_codes(self) -> list[int | None]:
        for process in self.processes:
            process.join(LONG_SECONDS)
        return [process.exitcode for process in self.processes]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Engine]]:
    """start(options, ranks=…): the ranks of an engine as rank_program describes them; all end with the test.

    Each writes its standard error to `rank-N` and its termination message to `rank-N.end` in tmp_path.
    """
    engines: list[Engine] = []

    def start(options: dict[str, Any], *, ranks: list[int] | None = None) -> Engine:
        world = options["tensor"] * options["pipeline"] * options["expert"]
        (port,) = free_ports(1)
        folder = stack.enter_context(private_folder())
        receiver, sender = warm_context().Pipe(duplex=False)
        processes = [
            warm_context().Process(
                target=rank_program.be_rank,
                args=(
                    options,
                    rank,
                    world,
                    port,
                    str(folder),
                    str(tmp_path / f"rank-{rank}"),
                    sender if rank == 0 else None,
                ),
            )
            for rank in (range(world) if ranks is None else ranks)
        ]
        for process in processes:
            process.start()
        engines.append(Engine(processes, receiver))
        return engines[-1]

    with contextlib.ExitStack() as stack:
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
            config = replace(SMALL, num_heads=heads, num_kv_heads=kv_heads)
            directory = write_model(tmp_path_factory.mktemp("llama"), config, random_tensors(config, seed=1))
            made[heads, kv_heads] = str(directory)
        return made[heads, kv_heads]

    return make


@pytest.fixture(scope="package")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small random model of experts."""
    experts = MoEConfig(num_experts=4, experts_per_token=2, intermediate_size=96, normalize=True)
    config = replace(SMALL, family="mixtral", num_heads=4, head_dim=16, moe=experts)
    return str(write_model(tmp_path_factory.mktemp("mixtral"), config, random_tensors(config, seed=2)))
