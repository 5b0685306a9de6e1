"""The compiled function: from a cache on disk, or compiled now.

The machine code runs on every x86 CPU with AVX2, FMA and F16C, so an image can contain it. It is stored in this package
and in the user's cache directory, which other installations share.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import logging
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import Lock

import llvmlite
import llvmlite.binding as llvm

_LOG = logging.getLogger(__name__)
_HERE = Path(__file__).parent
_CPU = "x86-64-v3"
_NEEDED = ("avx2", "fma", "f16c", "bmi2")
_SYMBOL = "megatron_native"
_WORDS = 5
_SOURCES = (
    *("attention", "blocks", "entry", "entry_points", "validate", "ir", "lookup", "panels", "products", "records"),
    *("rows", "sizes", "step", "step_attention", "sync", "tiles"),
)
"""Modules that are compiled into the machine code. Their content is part of the cache key."""

Entry = Callable[[int, int, int, int, int], None]
_LOADING = Lock()


@cache
def is_supported() -> bool:
    """Whether this machine runs the compiled code: 64-bit x86 with AVX2, Linux; numba, where it is to be compiled."""
    if platform.machine() not in ("x86_64", "AMD64") or sys.platform != "linux":
        return False
    features = llvm.get_host_cpu_features()
    if not all(features.get(name, False) for name in _NEEDED):
        return False
    return importlib.util.find_spec("numba") is not None or any(path.is_file() for path in _paths())


def entry() -> Entry:
    """Return the compiled function; see entry_points.py. Thread-safe."""
    with _LOADING:
        return _entry()


@cache
def _entry() -> Entry:
    for path in _paths():
        if path.is_file():
            return _load(path.read_bytes())
    code = compile_now()
    if not any([_write(path, code) for path in _paths()]):
        _LOG.warning("compiled code cannot be kept in any of %s: each start compiles again", [*map(str, _paths())])
    return _load(code)


def keep() -> None:
    """Store the function at every path where entry() searches for it."""
    entry()
    present = [path for path in _paths() if path.is_file()]
    for path in _paths():
        if present and path not in present:
            _write(path, present[0].read_bytes())


def compile_now() -> bytes:
    """Compile and return the object file. Takes seconds and needs numba."""
    from numba import cfunc, types

    from megatron_kernels.cpu.entry import entry as source

    begun = time.perf_counter()
    callback = cfunc(types.void(*[types.int64] * _WORDS), error_model="numpy")(source)
    module = llvm.parse_assembly(callback.inspect_llvm())
    # The function without its Python wrapper: it needs no symbol of numba.
    inner = callback.native_name.removeprefix("cfunc.")
    for function in module.functions:
        if function.name == inner:
            function.name = _SYMBOL
        elif not function.is_declaration:
            function.linkage = llvm.Linkage.internal
    passes = llvm.create_new_module_pass_manager()
    passes.add_global_dead_code_eliminate_pass()
    passes.run(module, llvm.create_pass_builder(_target_machine(), llvm.create_pipeline_tuning_options()))
    code: bytes = _target_machine().emit_object(module)
    _LOG.info("compiled the CPU kernels in %.1f s", time.perf_counter() - begun)
    return code


def _target_machine() -> llvm.TargetMachine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=_CPU, opt=3, reloc="pic", codemodel="jitdefault", jit=True
    )


@cache
def _engine() -> llvm.ExecutionEngine:
    """Return the execution engine. It owns the machine code, so the process keeps it."""
    return llvm.create_mcjit_compiler(llvm.parse_assembly(""), _target_machine())


def _load(code: bytes) -> Entry:
    engine = _engine()
    engine.add_object_file(llvm.ObjectFileRef.from_data(code))
    engine.finalize_object()
    address = engine.get_function_address(_SYMBOL)
    # numba's calling convention: addresses for a result and an exception, then the arguments; returns 0.
    function = ctypes.CFUNCTYPE(ctypes.c_int32, *[ctypes.c_void_p] * 2, *[ctypes.c_int64] * _WORDS)(address)
    nowhere = (ctypes.c_void_p * 2)()
    places = ctypes.addressof(nowhere), ctypes.addressof(nowhere) + ctypes.sizeof(ctypes.c_void_p)

    def call(what: int, a: int, b: int, c: int, d: int) -> None:
        assert nowhere is not None
        function(*places, what, a, b, c, d)

    return call


@cache
def _paths() -> list[Path]:
    digest = hashlib.sha256(f"{llvmlite.__version__} {_CPU}".encode())
    for name in _SOURCES:
        digest.update((_HERE / f"{name}.py").read_bytes())
    file = f"native-{digest.hexdigest()[:16]}.o"
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return [_HERE / "__pycache__" / file, home / "megatron" / file]


def _write(path: Path, code: bytes) -> bool:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(code)
        os.chmod(file.name, 0o644)
        # Atomic, because other processes may start at the same time.
        os.replace(file.name, path)
    except OSError as error:
        _LOG.info("compiled code cannot be kept at %s: %s", path, error)
        return False
    return True


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    keep()
