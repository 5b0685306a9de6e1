"""Arguments of the compiled step, as records in memory. Addresses and strides are in bytes. All fields have 64 bits."""

from __future__ import annotations

import numpy as np

FLOAT32, BFLOAT16, INT4, INT8 = range(4)
"""Formats of a packed matrix; see tiles.py."""

SILU, GELU_TANH = range(2)


def _record(*words: str, floats: tuple[str, ...] = ()) -> np.dtype[np.void]:
    return np.dtype([*((word, np.int64) for word in words), *((name, np.float64) for name in floats)])


MATRIX = _record(
    "format",
    "address",
    "inputs",
    "outputs",
    "rows",  # most rows of a tile
    "ahead",  # bytes before they are needed, weights are asked for
)

FROM_Q4_0, FROM_Q4_1, FROM_Q8_0, FROM_FLOAT32, FROM_BFLOAT16, FROM_FLOAT16 = range(6)
"""Source formats of packing; see blocks.py."""

PACKING = _record(
    "kind",
    "source",
    "row_bytes",  # from one row of the source to the next
    "matrix",  # MATRIX: integers from blocks of integers, floats from anything
    "square",  # SQUARE_BYTES
)
"""One matrix to be packed."""

VALIDATION = _record(
    "address",
    "num_words",  # of eight bytes
    "scales",  # address of the scales of the first block; 0: there are none
    "num_blocks",
    "block_bytes",
    "mask",  # bits of four bytes from there on that are exponents of float16 numbers
    "sum",  # to be written: of all words
    "is_finite",  # to be written
)
"""Arguments of weight validation."""

LAYER = _record(
    "is_local",
    "attention_norm",
    "qkv_bias",
    "q_norm",
    "k_norm",
    "attention_output_norm",
    "mlp_norm",
    "mlp_output_norm",
)
"""Norm weights and bias are float32; address 0 where the model has none."""

QKV, OUTPUT, GATE_UP, DOWN = range(4)
"""Index of each matrix among a layer's MATRICES_PER_LAYER."""
MATRICES_PER_LAYER = 4

ITEM = np.dtype([(name, np.int64) for name in ("sequence", "kv_head", "first", "count")])
"""An attention work item: `count` tokens of a sequence of the step, from its token `first`, for one group of heads."""

STEP = _record(
    "threads",
    "counters",  # int64 [num_layers]: next attention work item of each layer; set to 0 before the step
    "barrier",  # see sync.py
    # the model
    "num_layers",
    "layers",  # LAYER [num_layers]
    "matrices",  # MATRIX [num_layers · MATRICES_PER_LAYER + 1], the head last
    "hidden",
    "heads",
    "kv_heads",
    "head_dim",
    "feed_forward",
    "activation",
    "window",
    "norm",  # of the last layer's output
    # the step
    "tokens",
    "x",  # float32 [tokens][hidden]
    "positions",  # int64 [tokens]
    "slots",  # int64 [tokens]: row of the cache
    "sequence_starts",  # int64 [sequences]: first token
    "sequence_lengths",  # int64 [sequences]: tokens in the cache after the step
    "sequence_counts",  # int64 [sequences]: tokens of the step
    "block_tables",  # int32
    "block_table_stride",
    "items",  # ITEM [num_items]
    "num_items",
    "logit_rows",  # int64 [num_logits]
    "num_logits",
    "logits",  # float32 [num_logits][vocabulary]
    # the cache
    "cache",
    "layer_stride",
    "row_stride",
    "page_size",
    "is_bfloat16",
    "cos",  # float32 [positions][head_dim / 2]
    "sin",
    "local_cos",
    "local_sin",
    # room for what is in between
    "qkv",
    "attended",
    "gated",
    "added",
    "shared_inputs",
    "width",  # floats of a row of inputs
    "scratch",  # of each thread
    "scratch_stride",
    "context",  # tokens that a row of scratch holds, a multiple of 16
    floats=("epsilon", "scale"),
)

PRODUCT = _record(
    "threads",
    "barrier",
    "matrix",  # MATRIX
    "tokens",
    "x",
    "y",
    "shared_inputs",
    "width",
)
"""One matrix product by itself."""
