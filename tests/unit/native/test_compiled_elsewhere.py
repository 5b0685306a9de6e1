"""The kernels as other machines run them: NEON by qemu, AMX by emulated instructions, and with sanitizers.

Run by `make soak` only: each test compiles the library again.
"""

import platform
import shutil
import subprocess
from pathlib import Path

import pytest
from soak import SOAK

from megatron_kernels.cpu import build
from megatron_kernels.cpu.library import instruction_sets

SOURCES = Path(build.__file__).parent / "src"
PROGRAM = Path(__file__).parent / "products.cpp"
CROSS_COMPILER, EMULATOR = "aarch64-linux-gnu-g++-12", "qemu-aarch64-static"

pytestmark = [pytest.mark.skipif(not SOAK, reason="compiles the kernels: run by make soak"), pytest.mark.timeout(1800)]


def run(
    folder: Path,
    instruction_sets: tuple[str, ...],
    *,
    compiler: str = "g++",
    machine: str | None = None,
    flags: tuple[str, ...] = (),
    emulator: tuple[str, ...] = (),
) -> dict[tuple[str, str], tuple[str, str]]:
    """Return (hash of the panels, hash of the results) by instruction set and format."""
    library, program = folder / "libmegatron_cpu.so", folder / "products"
    build.build(library, compiler=compiler, machine=machine, flags=flags)
    link = [str(PROGRAM), str(library), f"-Wl,-rpath,{folder}", "-pthread", "-o", str(program)]
    subprocess.run([compiler, "-std=c++20", "-O1", *flags, f"-I{SOURCES}", *link], check=True)
    done = subprocess.run([*emulator, str(program), *instruction_sets], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines()]
    assert len(lines) == 15 * len(instruction_sets)
    return {(isa, format): (panels, results) for isa, format, panels, results in lines}


def test_sanitizers_find_nothing(tmp_path: Path) -> None:
    flags = ("-O1", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
    run(tmp_path, instruction_sets(), flags=flags)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="emulates AMX with AVX-512 around it")
@pytest.mark.skipif("avx512_bf16" not in instruction_sets(), reason="the code around the tiles needs AVX-512 BF16")
def test_amx_tiles_multiply_as_other_instructions(tmp_path: Path) -> None:
    results = run(tmp_path, ("amx", "avx512_bf16"), flags=("-include", str(PROGRAM.with_name("amx_emulation.h"))))
    for (isa, format), hashes in results.items():
        # bfloat16 sums of tiles have another order.
        assert format == "bfloat16" or hashes == results["avx512_bf16", format], f"{isa} {format}"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="cross-compiles")
def test_neon_multiplies_as_this_machine(tmp_path: Path) -> None:
    for tool in (CROSS_COMPILER, EMULATOR):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is missing: apt-get install g++-12-aarch64-linux-gnu qemu-user-static")
    here, there = tmp_path / "here", tmp_path / "there"
    emulator = (EMULATOR, "-L", "/usr/aarch64-linux-gnu")
    expected = run(here, ("portable",))
    seen = run(there, tuple(build.VARIANTS["aarch64"]), compiler=CROSS_COMPILER, machine="aarch64", emulator=emulator)
    for (isa, format), (panels, results) in seen.items():
        assert panels == expected["portable", format][0], f"{isa} {format}"
        if isa == "portable":
            assert results == expected["portable", format][1], format
