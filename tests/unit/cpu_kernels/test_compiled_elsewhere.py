"""The kernels as other machines run them: NEON by qemu, AMX by emulated instructions, and with sanitizers.

Run by `make soak` only: each test compiles the library again.
"""

import platform
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from soak import SOAK

from megatron_kernels.cpu import build
from megatron_kernels.cpu.library import instruction_sets

SOURCES = Path(build.__file__).parent / "src"
FOLDER = Path(__file__).parent
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++-12", "qemu-aarch64-static"
CACHE_MARGINS = {"float32": 1e-4, "bfloat16": 0.02, "float16": 0.002}
"""Largest difference of logits by type of the cache, relative to the largest logit."""

pytestmark = [pytest.mark.skipif(not SOAK, reason="compiles the kernels: run by make soak"), pytest.mark.timeout(1800)]


@dataclass
class Kernels:
    """The library in `folder`, and programs that use it."""

    folder: Path
    compiler: str = "g++"
    machine: str | None = None
    flags: tuple[str, ...] = ()
    emulator: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self.folder.mkdir(exist_ok=True)
        self._library = self.folder / "libmegatron_cpu.so"
        build.build(self._library, compiler=self.compiler, machine=self.machine, flags=self.flags)

    def run(self, name: str, instruction_sets: Iterable[str]) -> list[list[str]]:
        """Return the words of each line that a program prints."""
        program = self.folder / name
        inputs = [f"-I{SOURCES}", str(FOLDER / f"{name}.cpp"), str(self._library), f"-Wl,-rpath,{self.folder}"]
        compile = [self.compiler, "-std=c++20", "-O1", *self.flags, *inputs, "-pthread", "-o", str(program)]
        subprocess.run(compile, check=True)
        done = subprocess.run([*self.emulator, str(program), *instruction_sets], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return [line.split() for line in done.stdout.splitlines()]

    def products(self, instruction_sets: Sequence[str]) -> dict[tuple[str, str], tuple[str, str]]:
        """Return (hash of the panels, hash of the results) by instruction set and format."""
        lines = self.run("products", instruction_sets)
        assert len(lines) == 15 * len(instruction_sets)
        return {(isa, format): (panels, results) for isa, format, panels, results in lines}

    def steps(self, instruction_sets: Sequence[str]) -> dict[tuple[str, str, str], np.ndarray]:
        """Return the logits by instruction set, type of the cache and number of the step."""
        lines = self.run("steps", instruction_sets)
        assert len(lines) == 12 * len(instruction_sets)
        return {(isa, cache, number): np.array(logits, dtype=float) for isa, cache, number, *logits in lines}


def require_equal_steps(
    seen: dict[tuple[str, str, str], np.ndarray], expected: dict[tuple[str, str, str], np.ndarray]
) -> None:
    """expected: contains those of the portable instruction set, which other tests compare with torch."""
    for (isa, cache, number), logits in seen.items():
        reference = expected["portable", "float32", number]
        worst = np.abs(logits - reference).max() / np.abs(reference).max()
        assert worst < CACHE_MARGINS[cache], f"{isa}, cache in {cache}, step {number}: {worst}"


def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    kernels = Kernels(tmp_path, flags=("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all"))
    kernels.products(instruction_sets())
    steps = kernels.steps(instruction_sets())
    require_equal_steps(steps, steps)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="emulates AMX with AVX-512 around it")
@pytest.mark.skipif("avx512_bf16" not in instruction_sets(), reason="the code around the tiles needs AVX-512 BF16")
def test_amx_tiles_multiply_as_other_instructions(tmp_path: Path) -> None:
    kernels = Kernels(tmp_path, flags=("-include", str(FOLDER / "amx_emulation.h")))
    results = kernels.products(("amx", "avx512_bf16"))
    for (isa, format), hashes in results.items():
        # bfloat16 sums of tiles have another order.
        assert format == "bfloat16" or hashes == results["avx512_bf16", format], f"{isa} {format}"
    steps = kernels.steps(("amx", "portable"))
    require_equal_steps(steps, steps)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="cross-compiles")
def test_neon_computes_as_this_machine(tmp_path: Path) -> None:
    for tool in (CROSS_COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing: apt-get install g++-12-aarch64-linux-gnu qemu-user-static")
    here = Kernels(tmp_path / "here")
    emulator = (EMULATOR, "-L", "/usr/aarch64-linux-gnu")
    there = Kernels(tmp_path / "there", compiler=CROSS_COMPILER, machine="aarch64", emulator=emulator)
    neon = build.VARIANTS["aarch64"]
    expected = here.products(("portable",))
    for (isa, format), (panels, results) in there.products(tuple(neon)).items():
        assert panels == expected["portable", format][0], f"{isa} {format}"
        if isa == "portable":
            assert results == expected["portable", format][1], format
    require_equal_steps(there.steps(tuple(neon)), here.steps(("portable",)))
