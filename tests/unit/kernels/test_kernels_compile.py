"""Every kernel compiles for an H100 or H200, fits its shared memory, and spills no register, without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SHARED_MEMORY = 227 * 1024
"""What one block may use on compute capability 9.0."""

KERNELS = {
    "_add_rms_norm",
    "_choose",
    "_decode_part",
    "_norm_rope_append",
    "_place",
    "_prefill_block",
    "_reduce_parts",
    "_sample",
    "_sum_blocks",
    "_swiglu",
}


@pytest.fixture(scope="module")
def usage(tmp_path_factory):
    """A process of its own: triton is either an interpreter or a compiler, from its import on."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    program = Path(__file__).with_name("sm90_compiler.py")
    run = subprocess.run([sys.executable, program], env=environment, check=False, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_every_kernel_compiles(usage):
    assert set(usage) == KERNELS


@pytest.mark.parametrize("kernel", sorted(KERNELS))
def test_a_kernel_fits(usage, kernel):
    for variant in usage[kernel]:
        assert variant["shared"] <= SHARED_MEMORY
        assert variant["local"] == 0
