"""Maps the tensors of a decoder to the tensors that Megatron-Core stores. This module uses neither torch nor files.

Megatron stores the same matrix of all layers as one tensor (axis 0: layer), and the same matrix of all experts as one
tensor (axes 0 and 1: layer and expert). Queries, keys and values share `linear_qkv`, which has, for each key-value
head, its query heads, its key and its value. Gate and up share `linear_fc1`, gate first. A tensor of the decoder is
therefore a list of row ranges at one index of the leading axes. If layers differ, the names contain layer numbers.
Newer files can also number experts, or store gate and up separately.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

from megatron_runtime.models.config import ModelConfig
from megatron_runtime.models.tensors import Shape, tensor_shapes

Rows = tuple[tuple[int, int], ...]
"""Row ranges, as (first, count), in the order of the decoder's tensor."""

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
"""Tensors that can have padding after their rows."""

_GLOBAL_KEYS = {"embedding": EMBEDDING, "norm": "decoder.final_layernorm.weight", "head": HEAD}
_LAYERS, _EXPERTS = "decoder.layers.", "mlp.experts.experts."
_LAYER_KEYS = {
    "attention_norm": "self_attention.linear_qkv.layer_norm_weight",
    **dict.fromkeys("qkv", "self_attention.linear_qkv.weight"),
    **dict.fromkeys(("q_bias", "k_bias", "v_bias"), "self_attention.linear_qkv.bias"),
    "q_norm": "self_attention.q_layernorm.weight",
    "k_norm": "self_attention.k_layernorm.weight",
    "output": "self_attention.linear_proj.weight",
    "mlp_norm": "mlp.linear_fc1.layer_norm_weight",
    "router": "mlp.router.weight",
    "gate": "mlp.linear_fc1.weight",
    "up": "mlp.linear_fc1.weight",
    "down": "mlp.linear_fc2.weight",
}
_SEPARATE_NORMS = {"attention_norm": "input_layernorm.weight", "mlp_norm": "pre_mlp_layernorm.weight"}
_SPLIT_GATE = {"gate": "mlp.linear_fc1.weight_w", "up": "mlp.linear_fc1.weight_v"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The naming scheme of a set of tensors. The default is Megatron-Core's scheme for equal layers.

    mixture_norm_in_mlp: whether the norm before a mixture of experts has the same key as the norm before a dense
                         feed-forward layer. The two keys are the same in Megatron's local layer spec, which does not
                         use Transformer Engine.
    """

    prefix: str = ""
    numbered_layers: bool = False
    numbered_experts: bool = False
    split_gate: bool = False
    separate_norms: bool = False
    mixture_norm_in_mlp: bool = False


@dataclass(frozen=True, slots=True)
class PlacedTensor:
    """The place of a decoder's tensor within a stored tensor.

    name:    short name, as in models/tensors.py.
    key:     name of the stored tensor.
    index: index on the axes before the rows (layer, expert); empty if the stored tensor has no such axes.
    rows: ranges of rows in the stored tensor at this index.
    columns: sizes of the axes after the rows: one size for a matrix, none for a vector.
    """

    name: str
    key: str
    index: tuple[int, ...]
    rows: Rows
    columns: Shape

    @property
    def shape(self) -> Shape:
        return (sum(count for _, count in self.rows), *self.columns)


@dataclass(frozen=True, slots=True)
class Stored:
    """The shape of a stored tensor. grid: sizes of the axes before the rows. cell: sizes of the rows and columns."""

    grid: Shape
    cell: Shape

    @property
    def shape(self) -> Shape:
        return (*self.grid, *self.cell)


def layout_for(config: ModelConfig) -> Layout:
    """Return the naming scheme of Megatron-Core for a model."""
    return Layout(numbered_layers=config.moe is not None and bool(config.moe.dense_layers))


def find_layout(keys: Collection[str]) -> Layout:
    """Return the naming scheme that the keys of a set of tensors follow."""
    prefix = next((key.removesuffix(EMBEDDING) for key in sorted(keys) if key.endswith(EMBEDDING)), "")
    start = prefix + _LAYERS
    layers = [key.removeprefix(start) for key in keys if key.startswith(start)]
    numbered_layers = any(name[:1].isdigit() for name in layers)
    if numbered_layers:
        layers = [name.partition(".")[2] for name in layers]
    experts = [name.removeprefix(_EXPERTS) for name in layers if name.startswith(_EXPERTS)]
    return Layout(
        prefix=prefix,
        numbered_layers=numbered_layers,
        numbered_experts=any(name[:1].isdigit() for name in experts),
        split_gate=any(name.endswith("linear_fc1.weight_w") for name in layers),
        separate_norms="input_layernorm.weight" in layers,
        mixture_norm_in_mlp=bool(experts) and _SEPARATE_NORMS["mlp_norm"] not in layers,
    )


def pieces(config: ModelConfig, at: Layout) -> Iterator[PlacedTensor]:
    """Yield the place of each tensor of a model within the tensors that Megatron stores.

    Tensors that Megatron lacks, such as norms after a block, are left out.
    """
    keys = {**_LAYER_KEYS, **(_SPLIT_GATE if at.split_gate else {}), **(_SEPARATE_NORMS if at.separate_norms else {})}
    for name, (count, *columns) in tensor_shapes(config).items():
        if name in _GLOBAL_KEYS:
            yield PlacedTensor(name, at.prefix + _GLOBAL_KEYS[name], (), ((0, count),), tuple(columns))
            continue
        _, layer, own = name.split(".", 2)
        _, expert, own = own.split(".") if own.startswith("experts.") else ("", "", own)
        if own not in keys:
            continue
        key = keys[own]
        if own == "mlp_norm" and config.is_mixture(int(layer)) and not at.mixture_norm_in_mlp:
            key = _SEPARATE_NORMS[own]
        if expert:
            key = key.replace("mlp.", _EXPERTS + (f"{expert}." if at.numbered_experts else ""))
        if at.numbered_layers:
            key = f"{layer}.{key}"
        numbers = ((layer, at.numbered_layers), (expert, at.numbered_experts))
        index = tuple(int(number) for number, is_in_name in numbers if number and not is_in_name)
        rows: Rows = ((0, count),)
        if own.removesuffix("_bias") in ("q", "k", "v"):
            rows = _qkv_rows(config, own[0])
        elif own == "up" and not at.split_gate:
            rows = ((count, count),)
        yield PlacedTensor(name, at.prefix + _LAYERS + key, index, rows, tuple(columns))


def stored_tensors(config: ModelConfig, at: Layout) -> dict[str, Stored]:
    """Return the shapes of a model's stored tensors, by key. The shapes do not include padding."""
    tensors: dict[str, Stored] = {}
    experts = config.moe.num_experts if config.moe is not None else 0
    grid = (experts,) if at.numbered_layers else (config.num_layers, experts)
    for piece in pieces(config, at):
        rows = max(first + count for first, count in piece.rows)
        if piece.key not in tensors or tensors[piece.key].cell[0] < rows:
            tensors[piece.key] = Stored(grid[: len(piece.index)], (rows, *piece.columns))
    return tensors


def _qkv_rows(config: ModelConfig, letter: str) -> Rows:
    size, queries = config.head_dim, config.num_heads // config.num_kv_heads
    before = {"q": 0, "k": queries, "v": queries + 1}[letter]
    count = queries if letter == "q" else 1
    group = (queries + 2) * size
    return tuple((head * group + before * size, count * size) for head in range(config.num_kv_heads))
