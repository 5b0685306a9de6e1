"""Every parser of untrusted bytes against hostile input: README.md."""

from __future__ import annotations

import os

import pytest
from soak import repeated, size

from tests.fuzz import harness
from tests.fuzz.harness import CORPUS, fuzz, keep, replay
from tests.fuzz.large_inputs import LARGE_INPUTS
from tests.fuzz.misbehaving import MISBEHAVING
from tests.fuzz.targets import TARGETS

TEST_SECONDS, SOAK_SECONDS = 3.0, 3600.0
"""Time for all targets together."""
SECONDS = float(
    os.environ.get("MEGATRON_FUZZ_SECONDS") or size(int(TEST_SECONDS), soak=int(SOAK_SECONDS)) / len(TARGETS)
)


@pytest.mark.long
@pytest.mark.parametrize("name", TARGETS)
@repeated(soak=1)
def test_a_parser_survives_hostile_input(name: str, seed: int) -> None:
    target = TARGETS[name]
    outcome = fuzz(target, seconds=SECONDS, seed=seed)
    assert outcome.inputs > len(target.corpus()), "no new input was run"
    if outcome.finding is not None:
        pytest.fail(f"{name} {outcome.finding.what}; the input is {keep(target, outcome.finding)}: see README.md")


@pytest.mark.parametrize("name", LARGE_INPUTS)
def test_a_parser_survives_large_input(name: str) -> None:
    inputs = LARGE_INPUTS[name]()
    outcome = replay(TARGETS[name], list(inputs.values()))
    if outcome.finding is not None:
        whole = next((what for what, data in inputs.items() if data.startswith(outcome.finding.data)), "a valid input")
        pytest.fail(f"{name} {outcome.finding.what} for {whole}")
    assert outcome.inputs > len(inputs)


def test_the_corpora_are_small() -> None:
    files = [path for path in CORPUS.rglob("*") if path.is_file()]
    assert {path.parent.name for path in files} == set(TARGETS), "a corpus without a target, or the reverse"
    assert sum(path.stat().st_size for path in files) < 200_000


# --- the harness itself ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (b"raise", "raised KeyError"),
        (b"hang", "took more than 1 s of CPU time"),
        (b"wait", "took no new input"),
        (b"crash", "terminated the process with -6"),
        (b"memory", "MiB of memory: at most 256"),
        (b"hidden", "ran out of memory"),
        (b"reject", None),
    ],
)
def test_the_harness_notices(data: bytes, what: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    if data == b"wait":
        monkeypatch.setattr(harness, "STALL_SECONDS", 3.0)
    outcome = harness._run(MISBEHAVING, [b"x", data], seconds=0, seed=1)
    if what is None:
        assert outcome.finding is None
    else:
        assert outcome.finding is not None
        assert what in outcome.finding.what
        assert outcome.finding.data == data
