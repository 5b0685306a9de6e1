"""Map the tensors of a decoder to the tensors that Megatron-Core stores. No torch, no files.

Megatron stores one tensor for all layers (axis 0), and one for all experts of all layers (axes 0 and 1). Queries, keys
and values share `linear_qkv`: for each key-value head its query heads, then its key, then its value. Gate and up share
`linear_fc1`, gate first. A tensor of the decoder is therefore a list of row ranges at one index of the leading axes.
If layers differ, their numbers are in the names; newer files may also number experts, or separate gate and up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from megatron_runtime.models.config import ModelConfig

Rows = tuple[tuple[int, int], ...]
"""Row ranges, as (first, count), in the order of the decoder's tensor."""

EMBEDDING, HEAD = "embedding.word_embeddings.weight", "output_layer.weight"
VOCABULARY_KEYS = (EMBEDDING, HEAD)
"""Their rows may be followed by padding."""

_LAYERS = "decoder.layers."
_EXPERTS = "mlp.experts.experts."


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """The naming scheme of a set of files. The default is that of Megatron-Core if all layers are equal."""

    prefix: str = ""
    numbered_layers: bool = False
    numbered_experts: bool = False
    split_gate: bool = False
    separate_norms: bool = False


@dataclass(frozen=True, slots=True)
class Piece:
    """A tensor of the decoder in a stored tensor.

    name:    short name, as in models/tensors.py.
    key:     name of the stored tensor.
    index:   on the axes before the rows (layer, expert); empty if the stored tensor has no such axes.
    rows:    in the stored tensor, at that index.
    columns: second extent; None for a vector.
    """

    name: str
    key: str
    index: tuple[int, ...]
    rows: Rows
    columns: int | None

    @property
    def shape(self) -> tuple[int, ...]:
        count = sum(count for _, count in self.rows)
        return (count,) if self.columns is None else (count, self.columns)


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored tensor. grid: extents of the axes before the rows."""

    grid: tuple[int, ...]
    rows: int
    columns: int | None

    @property
    def cell(self) -> tuple[int, ...]:
        """Extents at one index of the grid."""
        return (self.rows,) if self.columns is None else (self.rows, self.columns)

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.grid, *self.cell)


def layout_for(config: ModelConfig) -> Layout:
    """Return the naming scheme of Megatron-Core for a model."""
    return Layout(numbered_layers=config.moe is not None and bool(config.moe.dense_layers))


def find_layout(keys: Collection[str]) -> Layout:
    """Return the naming scheme of `keys`."""
    prefix = next((key.removesuffix(EMBEDDING) for key in sorted(keys) if key.endswith(EMBEDDING)), "")
    inner = [key.removeprefix(prefix) for key in keys if key.startswith(prefix)]
    layers = [key.removeprefix(_LAYERS) for key in inner if key.startswith(_LAYERS)]
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
    )


def pieces(config: ModelConfig, at: Layout) -> Iterator[Piece]:
    """Yield every tensor of the model, in the order of its layers."""
    table = ((0, config.vocab_size),)
    yield Piece("embedding", at.prefix + EMBEDDING, (), table, config.hidden_size)
    for layer in range(config.num_layers):
        place = f"{_LAYERS}{layer}." if at.numbered_layers else _LAYERS
        index = () if at.numbered_layers else (layer,)
        for piece in (*_attention(config, at), *_feed_forward(config, at, layer)):
            name, key = f"layers.{layer}.{piece.name}", at.prefix + place + piece.key
            yield replace(piece, name=name, key=key, index=(*index, *piece.index))
    yield Piece("norm", f"{at.prefix}decoder.final_layernorm.weight", (), ((0, config.hidden_size),), None)
    if not config.tie_embeddings:
        yield Piece("head", at.prefix + HEAD, (), table, config.hidden_size)


def stored_tensors(config: ModelConfig, at: Layout) -> dict[str, Stored]:
    """Return the tensors that the files hold, by key, without padding."""
    found: dict[str, Stored] = {}
    experts = config.moe.num_experts if config.moe is not None else 0
    for piece in pieces(config, at):
        grid = (experts,) if at.numbered_layers else (config.num_layers, experts)
        rows = max(first + count for first, count in piece.rows)
        known = found.get(piece.key)
        if known is None or known.rows < rows:
            found[piece.key] = Stored(grid[: len(piece.index)], rows, piece.columns)
    return found


def _attention(config: ModelConfig, at: Layout) -> Iterator[Piece]:
    hidden, heads = ((0, config.hidden_size),), config.num_heads * config.head_dim
    norm = "input_layernorm.weight" if at.separate_norms else "self_attention.linear_qkv.layer_norm_weight"
    yield Piece("attention_norm", norm, (), hidden, None)
    for letter in "qkv":
        rows = _qkv_rows(config, letter)
        yield Piece(letter, "self_attention.linear_qkv.weight", (), rows, config.hidden_size)
        if config.qkv_bias:
            yield Piece(f"{letter}_bias", "self_attention.linear_qkv.bias", (), rows, None)
    if config.qk_norm:
        for letter in "qk":
            key = f"self_attention.{letter}_layernorm.weight"
            yield Piece(f"{letter}_norm", key, (), ((0, config.head_dim),), None)
    yield Piece("output", "self_attention.linear_proj.weight", (), hidden, heads)


def _feed_forward(config: ModelConfig, at: Layout, layer: int) -> Iterator[Piece]:
    moe, hidden = config.moe, config.hidden_size
    mixture = moe is not None and config.is_mixture(layer)
    norm = "pre_mlp_layernorm.weight" if mixture or at.separate_norms else "mlp.linear_fc1.layer_norm_weight"
    yield Piece("mlp_norm", norm, (), ((0, hidden),), None)
    if moe is None or not mixture:
        for piece in _gated(hidden, config.intermediate_size, at):
            yield replace(piece, key=f"mlp.{piece.key}")
        return
    yield Piece("router", "mlp.router.weight", (), ((0, moe.num_experts),), hidden)
    for expert in range(moe.num_experts):
        number = f"{expert}." if at.numbered_experts else ""
        for piece in _gated(hidden, moe.intermediate_size, at):
            yield replace(
                piece,
                name=f"experts.{expert}.{piece.name}",
                key=f"{_EXPERTS}{number}{piece.key}",
                index=() if at.numbered_experts else (expert,),
            )


def _gated(hidden: int, feed: int, at: Layout) -> Iterator[Piece]:
    gate, up, first_up = ("_w", "_v", 0) if at.split_gate else ("", "", feed)
    yield Piece("gate", f"linear_fc1.weight{gate}", (), ((0, feed),), hidden)
    yield Piece("up", f"linear_fc1.weight{up}", (), ((first_up, feed),), hidden)
    yield Piece("down", "linear_fc2.weight", (), ((0, hidden),), feed)


def _qkv_rows(config: ModelConfig, letter: str) -> Rows:
    size, queries = config.head_dim, config.num_heads // config.num_kv_heads
    before = {"q": 0, "k": queries, "v": queries + 1}[letter]
    count = queries if letter == "q" else 1
    group = (queries + 2) * size
    return tuple((head * group + before * size, count * size) for head in range(config.num_kv_heads))
