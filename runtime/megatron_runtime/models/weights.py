"""Builds the fused weights of one rank from the named tensors of a checkpoint.

First, the tensors of the checkpoint are compared with the tensors that the model needs. Then each matrix is built from
the parts that the rank holds.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from megatron_runtime.distributed.shard import IndivisibleError, Shard
from megatron_runtime.models.config import ModelConfig, UnsupportedModelError
from megatron_runtime.models.decoder import DecoderWeights, ExpertWeights, FeedForward, LayerWeights
from megatron_runtime.models.families import FAMILIES
from megatron_runtime.models.layers.linear import Linear, LinearFactory, Weight
from megatron_runtime.models.tensors import Checkpoint, Part, tensor_shapes

NamedPart = tuple[str, Part]
"""Short name of a tensor, and the part of it to read."""

_READ_VALUES = 1 << 20
"""Number of values per read, so that the bytes stay in the CPU cache while they are decoded and copied."""
_NAMED = 8
"""Maximum number of tensors that an error message names."""


def load_weights(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    *,
    shard: Shard | None = None,
    linears: LinearFactory | None = None,
    threads: int = 1,
) -> DecoderWeights:
    """Read the weights of a rank. Each tensor is read once.

    dtype:   type of norms, biases and dense matrices.
    shard: the part of the model that the rank holds; None means the whole model.
    linears: creates the matrices; None means dense matrices.
    threads: number of threads that read and create matrices. If there is more than one, checkpoint and `linears` must
             be thread-safe.

    Raises UnsupportedModelError if tensors are missing, unknown or of a wrong shape, and IndivisibleError if the model
    cannot be divided among the ranks. These checks come before the first tensor is read.
    """
    require_fitting(checkpoint)
    require_divisible(checkpoint.config, shard or Shard())
    return _Loader(checkpoint, dtype, shard or Shard(), linears or LinearFactory()).weights(threads)


def require_fitting(checkpoint: Checkpoint) -> None:
    """Raise UnsupportedModelError if tensors are missing, unknown or of a wrong shape. The message names them."""
    config, kinds = checkpoint.config, checkpoint.kinds
    family = FAMILIES[config.family]
    wanted = {family.hf_name(name): shape for name, shape in tensor_shapes(config).items()}
    misshapen = [
        f"{name!r} has shape {tuple(kinds[name].shape)}, the model's configuration needs {shape}"
        for name, shape in wanted.items()
        if name in kinds and tuple(kinds[name].shape) != shape
    ]
    # A checkpoint may contain a tied head as a separate tensor.
    unknown = sorted(set(kinds) - set(wanted) - ({family.hf_name("head")} if config.tie_embeddings else set()))
    missing = sorted(set(wanted) - set(kinds))
    for what, names in (
        ("tensors of another shape: tensor", misshapen),
        (f"tensors that a {family.architecture} lacks:", list(map(repr, unknown))),
        ("no", list(map(repr, missing))),
    ):
        if names:
            more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
            raise UnsupportedModelError(f"the checkpoint has {what} {', '.join(names[:_NAMED])}{more}")


def require_divisible(config: ModelConfig, shard: Shard) -> None:
    """Raise IndivisibleError if the model cannot be divided among the ranks of `shard`."""
    shard.layers(config.num_layers)
    shard.heads(config.num_heads)
    shard.kv_heads(config.num_kv_heads)
    if config.moe is None or config.moe.dense_layers:
        shard.feed_forward(config.intermediate_size)
    if config.moe is not None:
        shard.experts(config.moe.num_experts)
        shard.feed_forward(config.moe.intermediate_size)
    elif shard.sizes.expert > 1:
        raise IndivisibleError(f"expert_parallel_size={shard.sizes.expert}: this model has no experts: use 1")


class _Scratch(threading.local):
    """Memory that a thread reuses for each weight that it reads.

    Without this memory, every page of the model would cause a page fault.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def take(self, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor, which is valid until the next call."""
        size = shape[0] * shape[1] * dtype.itemsize
        if size > len(self._memory):
            self._memory = torch.empty(size, dtype=torch.uint8)
        return self._memory[:size].view(dtype).view(shape)


@dataclass(frozen=True, slots=True)
class _Loader:
    checkpoint: Checkpoint
    dtype: torch.dtype
    shard: Shard
    linears: LinearFactory
    scratch: _Scratch = field(default_factory=_Scratch)

    @property
    def config(self) -> ModelConfig:
        return self.checkpoint.config

    def weights(self, threads: int) -> DecoderWeights:
        shard, numbers = self.shard, self.shard.layers(self.config.num_layers)
        if threads == 1:
            (embedding, head), layers = self._tables(), [self._layer(number) for number in numbers]
        else:
            with ThreadPoolExecutor(threads) as pool:
                # Start with the embedding table and the head, because they are the largest tasks.
                tables = pool.submit(torch.inference_mode()(self._tables))
                layers = list(pool.map(torch.inference_mode()(self._layer), numbers))
                embedding, head = tables.result()
        return DecoderWeights(
            embedding=embedding,
            layers=tuple(layers),
            # The head is linear, so the logits' factor can be applied to its input, in the norm.
            norm_D=self._norm("norm", scale=self.config.logit_scale) if shard.has_head else None,
            head_WD=head,
        )

    def _tables(self) -> tuple[Linear | None, Linear | None]:
        shard, config = self.shard, self.config
        rows = (_slice(shard.vocabulary(config.vocab_size)),)
        if config.tie_embeddings and shard.has_embedding and shard.has_head:
            tied = self.linears.embedding(self._weight(("embedding", rows)))
            return tied, tied
        head_name = "embedding" if config.tie_embeddings else "head"
        embedding = self.linears.embedding(self._weight(("embedding", rows))) if shard.has_embedding else None
        head = self.linears.linear(self._weight((head_name, rows))) if shard.has_head else None
        return embedding, head

    def _layer(self, number: int) -> LayerWeights:
        config, shard, size = self.config, self.shard, self.config.head_dim
        at = f"layers.{number}."
        heads, kv_heads = shard.heads(config.num_heads), shard.kv_heads(config.num_kv_heads)
        rows = {"q": _slice(heads, size), "k": _slice(kv_heads, size), "v": _slice(kv_heads, size)}
        qkv = [(f"{at}{name}", (part,)) for name, part in rows.items()]
        if config.fused:
            firsts = (0, config.num_heads * size, (config.num_heads + config.num_kv_heads) * size)
            qkv = [(f"{at}qkv", (_moved(part, first),)) for part, first in zip(rows.values(), firsts, strict=True)]
        bias = None
        if config.qkv_bias:
            bias = torch.cat([self._dense(f"{at}{name}_bias", (part,)) for name, part in rows.items()])
        norm_rows = {name: (rows[name],) if config.joint_qk_norm else () for name in "qk"}
        return LayerWeights(
            attention_norm_D=self._norm(f"{at}attention_norm") if config.input_norms else None,
            qkv_QD=self._linear(*qkv),
            qkv_bias_Q=bias,
            q_norm_C=self._norm(f"{at}q_norm", norm_rows["q"]) if config.qk_norm else None,
            k_norm_C=self._norm(f"{at}k_norm", norm_rows["k"]) if config.qk_norm else None,
            output_DH=self._linear((f"{at}output", (slice(None), rows["q"]))),
            attention_output_norm_D=self._norm(f"{at}attention_output_norm") if config.output_norms else None,
            mlp_norm_D=self._norm(f"{at}mlp_norm") if config.input_norms else None,
            mlp=self._mlp(number),
            mlp_output_norm_D=self._norm(f"{at}mlp_output_norm") if config.output_norms else None,
        )

    def _mlp(self, number: int) -> FeedForward | ExpertWeights:
        moe, at = self.config.moe, f"layers.{number}."
        if moe is None or not self.config.is_mixture(number):
            return self._feed_forward(at, self.config.intermediate_size)
        held = self.shard.experts(moe.num_experts)
        # The router is small and decides which experts a token uses, so it is never quantized.
        router = Linear(self._dense(f"{at}router"))
        parts = [self._feed_forward_parts(f"{at}experts.{expert}.", moe.intermediate_size) for expert in held]
        gate_up = self.linears.several((self._weight(*gate_up) for gate_up, _ in parts), count=len(held))
        down = self.linears.several((self._weight(down) for _, down in parts), count=len(held))
        experts = tuple(FeedForward(gate_up_FD=one, down_DF=other) for one, other in zip(gate_up, down, strict=True))
        return ExpertWeights(router_XD=router, experts=experts, first=held.start)

    def _feed_forward(self, at: str, size: int) -> FeedForward:
        gate_up, down = self._feed_forward_parts(at, size)
        return FeedForward(gate_up_FD=self._linear(*gate_up), down_DF=self._linear(down))

    def _feed_forward_parts(self, at: str, size: int) -> tuple[list[NamedPart], NamedPart]:
        """Return the parts of the gate and up matrices, and the part of the down matrix, that this rank holds."""
        part = _slice(self.shard.feed_forward(size))
        if self.config.fused:
            gate_up: list[NamedPart] = [(f"{at}gate_up", (part,)), (f"{at}gate_up", (_moved(part, size),))]
        else:
            gate_up = [(f"{at}gate", (part,)), (f"{at}up", (part,))]
        return gate_up, (f"{at}down", (slice(None), part))

    def _norm(self, name: str, part: Part = (), *, scale: float = 1.0) -> torch.Tensor:
        weight_D = self._dense(name, part)
        offset = self.config.norm_weight_offset
        is_stored = not offset and scale == 1.0
        return weight_D if is_stored else weight_D.float().add_(offset).mul_(scale).to(self.dtype)

    def _linear(self, *parts: NamedPart) -> Linear:
        return self.linears.linear(self._weight(*parts))

    def _weight(self, *parts: NamedPart) -> Weight:
        """Return the matrix that consists of the rows of all parts.

        The matrix keeps its stored format if the factory accepts this format. Otherwise, it is dense, with type
        `dtype`.
        """
        if self.checkpoint.panels_of is not None and self.linears.panel_formats:
            panels = [
                self.checkpoint.panels(self._hf_name(name), part, wanted=self.linears.panel_formats)
                for name, part in parts
            ]
            packed = [matrix for matrix in panels if matrix is not None]
            if len(packed) == len(parts):
                return packed
        wanted = self.linears.quantized_kinds
        if wanted:
            stored = [self.checkpoint.blocks(self._hf_name(name), part, wanted=wanted) for name, part in parts]
            blocks = [block for block in stored if block is not None]
            if len(blocks) == len(parts):
                return blocks
        kinds = [self.checkpoint.kinds[self._hf_name(name)] for name, _ in parts]
        shapes = [
            torch.empty(kind.shape, device="meta")[part].shape for kind, (_, part) in zip(kinds, parts, strict=True)
        ]
        shape = (sum(rows for rows, _ in shapes), shapes[0][1])
        if len({kind.dtype for kind in kinds}) == 1 and kinds[0].dtype in self.linears.dense_dtypes:
            weight_NK = self.scratch.take(shape, kinds[0].dtype)
        else:
            weight_NK = torch.empty(shape, dtype=self.dtype)
        for target, (name, part) in zip(weight_NK.split([rows for rows, _ in shapes]), parts, strict=True):
            self._copy(name, part, target)
        return weight_NK

    def _copy(self, name: str, part: Part, target: torch.Tensor) -> None:
        """Copy a part of a tensor into `target`, some rows at a time, to limit the memory for decoded values."""
        columns = part[1] if len(part) > 1 else slice(None)
        first = (part[0].start or 0) if part else 0
        # Read a multiple of eight rows, so that the digest over all reads equals the digest of the whole tensor.
        count = max(8, _READ_VALUES // target.shape[1] // 8 * 8)
        for start in range(0, len(target), count):
            stop = min(start + count, len(target))
            target[start:stop].copy_(
                self.checkpoint.read(self._hf_name(name), (slice(first + start, first + stop), columns))
            )

    def _dense(self, name: str, part: Part = ()) -> torch.Tensor:
        # Copy the values, because read() may return a view of the file.
        return self.checkpoint.read(self._hf_name(name), part).to(self.dtype, copy=True)

    def _hf_name(self, name: str) -> str:
        return FAMILIES[self.config.family].hf_name(name)


def _moved(part: slice, rows: int) -> slice:
    return slice(part.start + rows, part.stop + rows)


def _slice(held: range, size: int = 1) -> slice:
    """Return the slice of the rows (or columns) of the items `held`, such as heads. Each item has `size` rows."""
    return slice(held.start * size, held.stop * size)
