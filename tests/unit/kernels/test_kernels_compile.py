"""Every kernel compiles for an H100 or H200, fits its shared memory, and spills no register, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_MEMORY = 227 * 1024
"""Shared memory of one block on compute capability 9.0."""

VARIANTS = {
    "_add_rms_norm": 2,
    "_choose": 1,
    "_decode_part": 4,
    "_expert_product": 4,
    "_norm_rope_append": 3,
    "_place": 1,
    "_prefill_block": 3,
    "_reduce_parts": 2,
    "_route": 2,
    "_sample": 3,
    "_sum_blocks": 1,
    "_swiglu": 2,
}
"""Number of compilations by kernel: with and without an addition, splits, norms of each or of all heads, or a window;
two head sizes; both activations; expert slots and pairs; tiles for few and for many tokens; logits of the model,
changed ones, and ones to report. Once for all batch sizes.
"""


@pytest.fixture(scope="module")
def usage():
    """Run the compiler in a separate process: a process uses Triton either as interpreter or as compiler. Triton
    caches compiled kernels in the user's cache."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    environment["TRITON_CACHE_DIR"] = str(cache / "megatron" / "triton")
    program = Path(__file__).with_name("sm90_compiler.py")
    run = subprocess.run([sys.executable, program], env=environment, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_every_kernel_compiles_once_for_all_batches(usage):
    assert {kernel: len(variants) for kernel, variants in usage.items()} == VARIANTS


@pytest.mark.parametrize("kernel", sorted(VARIANTS))
def test_a_kernel_fits(usage, kernel):
    for variant in usage[kernel]:
        assert variant["shared"] <= SHARED_MEMORY
        assert variant["local"] == 0
