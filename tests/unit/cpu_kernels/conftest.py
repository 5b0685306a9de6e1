"""The instruction sets of this CPU, each of which runs the tests that request `isa`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from run_record import used

from megatron_kernels.cpu.library import ISA_VARIABLE, instruction_set, instruction_sets, library


@pytest.fixture(params=instruction_sets())
def isa(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Select an instruction set for products, and for decoders that the test creates."""
    usual, name = instruction_set(), str(request.param)
    monkeypatch.setenv(ISA_VARIABLE, name)
    library().megatron_select(name.encode())
    used("CPU instruction set", name)
    yield name
    library().megatron_select(usual.encode())
