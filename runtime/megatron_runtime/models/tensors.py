"""The names and shapes of a decoder's tensors, and the Checkpoint protocol that reads them. Does not import torch.

Short names of tensors are "embedding", "norm", "head", and for each layer "layers.N." + "q", "router",
"experts.E.gate", and so on.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Protocol

from megatron_runtime.models.config import ModelConfig

if TYPE_CHECKING:
    import torch

    from megatron_kernels.cpu.packing import PackedMatrix
    from megatron_kernels.quantized import QuantizedTensor

Shape = tuple[int, ...]
Part = tuple[slice, ...]
"""A part of a tensor: one slice per axis, with step 1. Axes without a slice are whole."""


@dataclass(frozen=True, slots=True)
class TensorKind:
    """Shape and type of one tensor.

    dtype: type of the values that read() returns; float32 for quantized tensors.
    """

    shape: Shape
    dtype: torch.dtype


class Checkpoint(Protocol):
    """A set of weights in any file format. The constructor reads only headers, and rejects truncated files.

    kinds: shape and type of each tensor, by the tensor's name in transformers. Tensors have the layout of transformers.
           Each expert has its own tensors.
    """

    config: ModelConfig
    kinds: Mapping[str, TensorKind]
    panels_of: str | None = None
    """Number format of the matrices if they are stored in the panels of the CPU kernels; otherwise None."""

    def read(self, name: str, part: Part = ()) -> torch.Tensor:
        """Return the values of a tensor, or of a part of the tensor, possibly as a view of the file.

        The caller must copy the values if it keeps or changes them.
        """

    def blocks(self, name: str, part: Part = (), *, wanted: Container[int]) -> QuantizedTensor | None:
        """Return a quantized matrix in its stored form, possibly as a view of the file.

        Returns None if the type of the tensor is not in `wanted`, or if `part` cuts through the tensor's blocks. The
        default implementation returns None.

        wanted: accepted GGML type numbers.
        """
        return None

    def panels(self, name: str, part: Part = (), *, wanted: Container[int]) -> PackedMatrix | None:
        """Return a matrix that is stored in panels of the CPU kernels, possibly as a view of the file.

        Returns None if the tensor is not stored in a format in `wanted`, or if `part` cuts through panels or blocks.

        wanted: accepted formats.
        """
        return None

    def close(self) -> None:
        """Release the files and memory that read() uses.

        The default implementation does nothing. Views of files stay valid.
        """
        return


def tensor_shapes(config: ModelConfig) -> dict[str, Shape]:
    """Return the shape of every tensor of the model, by short name."""
    table = (config.vocab_size, config.hidden_size)
    shapes: dict[str, Shape] = {"embedding": table, "norm": (config.hidden_size,)}
    if not config.tie_embeddings:
        shapes["head"] = table
    for layer in range(config.num_layers):
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in layer_shapes(config, layer).items()}
    return shapes


def layer_shapes(config: ModelConfig, layer: int) -> dict[str, Shape]:
    """Return the shape of every tensor of one layer, by short name without the layer's prefix."""
    hidden, size = config.hidden_size, config.head_dim
    rows = {"q": config.num_heads * size, "k": config.num_kv_heads * size, "v": config.num_kv_heads * size}
    shapes: dict[str, Shape] = {"attention_norm": (hidden,), "mlp_norm": (hidden,)} if config.input_norms else {}
    shapes["output"] = (hidden, rows["q"])
    if config.fused:
        shapes["qkv"] = (sum(rows.values()), hidden)
    for name, count in rows.items():
        if not config.fused:
            shapes[name] = (count, hidden)
        if config.qkv_bias:
            shapes[f"{name}_bias"] = (count,)
    if config.qk_norm:
        shapes |= {f"{name}_norm": (rows[name] if config.joint_qk_norm else size,) for name in "qk"}
    if config.output_norms:
        shapes |= {"attention_output_norm": (hidden,), "mlp_output_norm": (hidden,)}
    if config.moe is None or not config.is_mixture(layer):
        if config.fused:
            size = config.intermediate_size
            return shapes | {"gate_up": (2 * size, hidden), "down": (hidden, size)}
        return shapes | _feed_forward("", hidden, config.intermediate_size)
    shapes["router"] = (config.moe.num_experts, hidden)
    for expert in range(config.moe.num_experts):
        shapes |= _feed_forward(f"experts.{expert}.", hidden, config.moe.intermediate_size)
    return shapes


def num_parameters(config: ModelConfig, *, expert_ranks: int = 1) -> int:
    """Return the number of values in all tensors.

    expert_ranks: number of ranks among which the experts are divided. Only the experts of one rank are counted.
    """
    shapes = tensor_shapes(config).items()
    return sum(prod(shape) // (expert_ranks if ".experts." in name else 1) for name, shape in shapes)


def _feed_forward(prefix: str, hidden: int, size: int) -> dict[str, Shape]:
    return {f"{prefix}gate": (size, hidden), f"{prefix}up": (size, hidden), f"{prefix}down": (hidden, size)}
