"""Loads the library of the CPU kernels, and declares its C ABI for ctypes.

src/kernels.h documents the structures and their layouts.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from ctypes import POINTER, c_char_p, c_double, c_int64, c_uint64, c_void_p
from functools import cache

from megatron_kernels.cpu import build

ISA_VARIABLE = "MEGATRON_CPU_ISA"
"""Environment variable that selects an instruction set instead of this CPU's best instruction set."""

FLOAT32, BFLOAT16, FLOAT16, INT8, INT5, INT4, Q2_K, Q3_K, Q4_K, Q5_K, Q6_K = range(11)
"""Number formats of a packed matrix."""

PANEL = 16
"""Number of outputs in a panel. The head size and the number of tokens of a cache page must be multiples of PANEL."""

BFLOAT16_INSTRUCTION_SETS = frozenset(("amx", "avx512_bf16", "neon_i8mm"))
"""Instruction sets that can multiply bfloat16."""

SILU, GELU_TANH = range(2)
"""Activation functions."""


class InstructionSetError(ValueError):
    """Raised if ISA_VARIABLE names an instruction set that this CPU lacks.

    The message has the value and the allowed values.
    """


class Matrix(ctypes.Structure):
    _fields_ = (("format", c_int64), ("inputs", c_int64), ("outputs", c_int64), ("panels", c_void_p))


class Packing(ctypes.Structure):
    """The arguments of the function that packs weights, as in src/operations.h.

    The arguments describe rows in a file, and the matrix into which these rows are packed.
    """

    _fields_ = (
        ("source", c_int64),
        ("rows", c_void_p),
        ("row_bytes", c_int64),
        ("matrix", Matrix),
        ("panels", c_void_p),
    )


class Layer(ctypes.Structure):
    _fields_ = (
        ("is_local", c_int64),
        ("attention_norm", c_void_p),
        ("qkv_bias", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("attention_output_norm", c_void_p),
        ("mlp_norm", c_void_p),
        ("mlp_output_norm", c_void_p),
        ("num_qkv", c_int64),
        ("qkv", POINTER(Matrix)),
        ("output", Matrix),
        ("num_experts", c_int64),
        ("gate", POINTER(Matrix)),
        ("up", POINTER(Matrix)),
        ("down", POINTER(Matrix)),
        ("router", c_void_p),
    )


class Model(ctypes.Structure):
    _fields_ = (
        ("num_layers", c_int64),
        ("layers", POINTER(Layer)),
        ("hidden", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("activation", c_int64),
        ("window", c_int64),
        ("routed", c_int64),
        ("routed_first", c_int64),
        ("routed_per_token", c_int64),
        ("routed_normalize", c_int64),
        ("norm", c_void_p),
        ("head", Matrix),
        ("epsilon", c_double),
        ("scale", c_double),
        ("joint_qk_norm", c_int64),
    )


class Step(ctypes.Structure):
    _fields_ = (
        ("tokens", c_int64),
        ("x", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("sequences", c_int64),
        ("query_lengths", c_void_p),
        ("context_lengths", c_void_p),
        ("block_tables", c_void_p),
        ("block_table_stride", c_int64),
        ("cache", c_void_p),
        ("layer_bytes", c_int64),
        ("row_bytes", c_int64),
        ("page_size", c_int64),
        ("cache_format", c_int64),
        ("cos", c_void_p),
        ("sin", c_void_p),
        ("local_cos", c_void_p),
        ("local_sin", c_void_p),
        ("logit_rows", c_void_p),
        ("num_logits", c_int64),
        ("logits", c_void_p),
        ("sums", c_void_p),
        ("gathered_tokens", c_int64),
        ("gathered", c_void_p),
        ("gathered_sums", c_void_p),
        ("routing", c_void_p),
        ("means", c_void_p),
    )


_FUNCTIONS = {
    "megatron_instruction_set": (c_char_p, c_int64),
    "megatron_runs": (c_int64, c_char_p),
    "megatron_select": (None, c_char_p),
    "megatron_create_pool": (c_void_p, c_int64),
    "megatron_destroy_pool": (None, c_void_p),
    "megatron_create_decoder": (c_void_p, POINTER(Model)),
    "megatron_destroy_decoder": (None, c_void_p),
    "megatron_run": (c_int64, c_void_p, c_void_p, POINTER(Step), c_int64, c_int64),
    "megatron_add_sums": (None, c_void_p, c_void_p, POINTER(Step), c_int64),
    "megatron_multiply": (c_int64, c_void_p, POINTER(Matrix), c_void_p, c_int64, c_void_p),
    "megatron_look_up": (None, POINTER(Matrix), c_void_p, c_int64, c_void_p),
    "megatron_matrix_bytes": (c_int64, POINTER(Matrix)),
    "megatron_pack": (None, POINTER(Packing), c_int64, c_int64),
    "megatron_sum": (c_uint64, c_void_p, c_int64),
    "megatron_sum_of_values": (c_int64, c_void_p, c_int64, c_uint64, c_void_p),
    "megatron_scales_are_finite": (c_int64, c_void_p, c_int64, c_int64, c_int64),
}
"""The result type and the argument types of each function."""


@cache
def library() -> ctypes.CDLL:
    """Load the CPU kernels' library, select its instruction set, and return the library.

    Its functions release the interpreter lock.

    Raises BuildError if the library cannot be built, and InstructionSetError if ISA_VARIABLE names an instruction set
    that this CPU lacks.
    """
    loaded = _load()
    loaded.megatron_select(select_instruction_set(instruction_sets(), os.environ).encode())
    return loaded


@cache
def _load() -> ctypes.CDLL:
    loaded = ctypes.CDLL(str(build.library()))
    for name, (result, *arguments) in _FUNCTIONS.items():
        function = getattr(loaded, name)
        function.restype, function.argtypes = result, arguments
    return loaded


@cache
def instruction_sets() -> tuple[str, ...]:
    """Return the instruction sets of the library that this CPU supports. The best is first, "portable" is last."""
    loaded, names, number = _load(), [], 0
    while (name := loaded.megatron_instruction_set(number)) is not None:
        if loaded.megatron_runs(name):
            names.append(name.decode())
        number += 1
    return tuple(names)


def instruction_set() -> str:
    """Return the selected instruction set."""
    return select_instruction_set(instruction_sets(), os.environ)


def select_instruction_set(available: tuple[str, ...], environment: Mapping[str, str]) -> str:
    """Return the instruction set that ISA_VARIABLE names, or the best available instruction set.

    Raises InstructionSetError if ISA_VARIABLE names an instruction set that is not available.
    """
    name = environment.get(ISA_VARIABLE) or available[0]
    if name not in available:
        raise InstructionSetError(
            f"{ISA_VARIABLE} is no instruction set of this CPU, which has {', '.join(available)}; unset it for the best"
        )
    return name
