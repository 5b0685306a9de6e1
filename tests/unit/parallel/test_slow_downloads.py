"""Each machine of an engine downloads the model before the ranks connect, however long that takes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from fake_hub import FakeHub
from machine import scaled

LIMIT_SECONDS = scaled(1.5)
"""The limit of everything that the ranks do together."""


@pytest.fixture
def hubs(llama: Callable[..., str]) -> Iterator[list[FakeHub]]:
    """The hub that rank 0 uses, and that of rank 1."""
    with ExitStack() as running:
        yield [running.enter_context(FakeHub.of(Path(llama(4, 2))).running()) for _ in range(2)]


def options_of(hubs: list[FakeHub], directory: Path) -> dict[str, Any]:
    """Two ranks on two machines: each has its own hub and cache."""
    environment = {
        rank: {"HF_ENDPOINT": hub.url, "HF_HUB_CACHE": str(directory / f"cache-{rank}")}
        for rank, hub in enumerate(hubs)
    }
    return {
        "model": "hf:org/name",
        "tensor": 2,
        "pipeline": 1,
        "expert": 1,
        "prompts": [[1, 5, 9, 3]],
        "sampling": [{"temperature": 0.0}],
        "environment": environment,
        "rendezvous_seconds": LIMIT_SECONDS,
    }


@pytest.mark.parametrize("slow", [0, 1])
def test_a_slow_download_of_one_machine_does_not_end_the_engine(start, hubs, tmp_path: Path, slow: int) -> None:
    hubs[slow].delay_seconds = 2 * LIMIT_SECONDS
    engine = start(options_of(hubs, tmp_path))
    assert len(engine.next_message()[0]["tokens"]) == 12
    assert engine.exit_codes() == [0, 0]
    assert [bool(hub.requests) for hub in hubs] == [True, True]


def test_a_download_that_fails_names_its_rank_and_cause_at_the_other(start, hubs, tmp_path: Path) -> None:
    hubs[1].token = "secret"
    engine = start(options_of(hubs, tmp_path) | {"rendezvous_seconds": 600})
    assert engine.exit_codes() == [1, 1]
    message = json.loads((tmp_path / "rank-0.end").read_text())
    assert message["rank"] == 1
    assert "rank 1: it cannot open the model: " in message["message"]
    assert "401" in message["message"]


def test_a_rank_that_never_comes_is_named(start, hubs, tmp_path: Path) -> None:
    engine = start(options_of(hubs, tmp_path), ranks=[0])
    assert engine.exit_codes() == [1]
    message = json.loads((tmp_path / "rank-0.end").read_text())
    assert (message["reason"], message["rank"]) == ("RendezvousFailed", 1)
