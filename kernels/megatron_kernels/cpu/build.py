"""Builds the library of the CPU kernels from src/ with g++, once per machine and version of the sources.

A package that was built for distribution contains the library next to this file. Otherwise, the library is built into
the user's cache directory, with parallel compilation. `python -m megatron_kernels.cpu.build` or the first process that
needs the library builds it.
"""

from __future__ import annotations

import argparse
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path

_LOG = logging.getLogger(__name__)
_HERE = Path(__file__).parent
_SOURCES = _HERE / "src"
_OPTIMISATION = ("-O3", "-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off")
# GCC 12 reports the undefined operands of its own AVX-512 intrinsics as uninitialised variables.
_WARNINGS = ("-Wall", "-Wextra", "-Wno-uninitialized", "-Wno-maybe-uninitialized")
_FLAGS = ("-std=c++20", "-fPIC", "-fvisibility=hidden", *_OPTIMISATION, *_WARNINGS)
_AVX2 = ("-mavx2", "-mfma", "-mf16c", "-mbmi2")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512")
_VNNI = (*_AVX512, "-mavx512vnni")
_BF16 = (*_VNNI, "-mavx512bf16")
_PORTABLE = {"portable": ("-DMEGATRON_PORTABLE",)}
VARIANTS: dict[str, dict[str, tuple[str, ...]]] = {
    "x86_64": {
        "avx2": _AVX2,
        "avx512": _AVX512,
        "avx512_vnni": _VNNI,
        "avx512_bf16": _BF16,
        "amx": (*_BF16, "-mamx-tile", "-mamx-bf16"),
        **_PORTABLE,
    },
    "aarch64": {
        "neon": ("-march=armv8-a",),
        "neon_dotprod": ("-march=armv8.2-a+dotprod",),
        "neon_i8mm": ("-march=armv8.2-a+dotprod+i8mm+bf16",),
        **_PORTABLE,
    },
}
"""Compiler flags by machine and instruction set, as listed in operations.h. Other machines use the portable variant."""


class BuildError(OSError):
    """Raised if the library cannot be built. The message contains the reason and the remedy."""


def library() -> Path:
    """Return the path of the CPU kernels' library. Build it if it does not exist. Raises BuildError if this fails."""
    name = f"libmegatron_cpu-{_digest()}.so"
    packaged, cached = _HERE / name, _cache_folder() / name
    if packaged.is_file():
        return packaged
    if not cached.is_file():
        build(cached)
    return cached


def build(target: Path, *, compiler: str = "g++", machine: str | None = None, flags: tuple[str, ...] = ()) -> None:
    """Compile the source files in parallel, and link the library. Raises BuildError if the compiler fails.

    flags: additional compiler flags, such as -fsanitize=address.
    """
    if shutil.which(compiler) is None:
        raise BuildError(
            f"the CPU kernels must be compiled and {compiler} is missing: install g++ 12 or newer "
            "(apt-get install g++), or install a wheel of this package, which contains them"
        )
    begun = time.perf_counter()
    variants = VARIANTS.get(machine or platform.machine(), _PORTABLE)
    units: list[tuple[Path, tuple[str, ...], str]] = [
        (path, (), path.stem) for path in sorted(_SOURCES.glob("*.cpp")) if path.stem != "variant"
    ]
    units += [(_SOURCES / "variant.cpp", (f"-DMEGATRON_VARIANT={name}", *own), name) for name, own in variants.items()]
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BuildError(
            f"the CPU kernels must be compiled, and their folder {target.parent} cannot be created ({error.strerror}): "
            "set XDG_CACHE_HOME to a folder that can be written, or install a wheel, which contains the kernels"
        ) from error
    with tempfile.TemporaryDirectory(dir=target.parent) as folder, ThreadPoolExecutor(os.cpu_count()) as pool:
        objects = [Path(folder, f"{name}.o") for _, _, name in units]
        commands = [
            [compiler, *_FLAGS, *flags, *own, "-c", str(path), "-o", str(object)]
            for (path, own, _), object in zip(units, objects, strict=True)
        ]
        list(pool.map(_run, commands))
        linked = Path(folder, target.name)
        _run([compiler, "-shared", *flags, "-pthread", *map(str, objects), "-o", str(linked)])
        linked.chmod(0o755)
        # The replacement is atomic, because other processes may build at the same time.
        linked.replace(target)
    _LOG.info("compiled the CPU kernels in %.0f s", time.perf_counter() - begun)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise BuildError(f"{' '.join(command)}\n{done.stderr}")
    if done.stderr:
        _LOG.warning("%s", done.stderr)


@cache
def _digest() -> str:
    """Return a digest of all inputs of the build: sources, flags and machine.

    The compiler's version is not included, because a machine without a compiler does not know it.
    """
    digest = hashlib.sha256(repr((_FLAGS, VARIANTS, platform.machine())).encode())
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:16]


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "megatron"


def main() -> None:
    parser = argparse.ArgumentParser(description="Build the library of the CPU kernels.")
    parser.add_argument(
        "--into-package",
        action="store_true",
        help="write the library next to the Python modules, for a wheel or an image",
    )
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    path = library()
    if parser.parse_args().into_package and path.parent != _HERE:
        shutil.copy2(path, _HERE)


if __name__ == "__main__":
    try:
        main()
    except BuildError as error:
        sys.exit(str(error))
