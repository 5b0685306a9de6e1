"""What a family of models is: the names of its tensors, and how its configuration is written in files."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_runtime.models.config import ModelConfig, SlidingWindow, UnsupportedModelError
from megatron_runtime.protocol.text import shown

Traits = dict[str, Any]
"""Fields of a ModelConfig that are not the same for all families."""

LLAMA_NAMES: Mapping[str, str] = {
    "attention_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "output": "self_attn.o_proj.weight",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
}
QK_NORM_NAMES: Mapping[str, str] = {"q_norm": "self_attn.q_norm.weight", "k_norm": "self_attn.k_norm.weight"}
_GLOBAL_NAMES = {
    "embedding": "model.embed_tokens.weight",
    "norm": "model.norm.weight",
    "head": "lm_head.weight",
}


MAX_LAYERS, MAX_EXPERTS, MAX_ALL_EXPERTS = 1024, 1024, 1 << 16
"""Layers, experts of a layer, experts of all layers. Each is some Python objects before any tensor is looked for."""
MAX_SIZE = (1 << 31) - 1
_LARGEST_CONSTANT = 1e18
_MOST = {
    "num_hidden_layers": MAX_LAYERS,
    "num_layers": MAX_LAYERS,
    "block_count": MAX_LAYERS,
    "num_local_experts": MAX_EXPERTS,
    "num_experts": MAX_EXPERTS,
    "expert_count": MAX_EXPERTS,
    "max_position_embeddings": 1 << 24,
    "context_length": 1 << 24,
    "num_attention_heads": 1 << 16,
    "attention.head_count": 1 << 16,
    "head_dim": 1 << 16,
    "attention.key_length": 1 << 16,
}
"""Of sizes that are counted up to, or multiplied; MAX_SIZE of the others."""


class Fields:
    """A configuration as read from a file; what it lacks or has too much of is refused by name.

    where: the file, for messages.
    """

    def __init__(self, values: Mapping[str, Any], *, where: str) -> None:
        self.values = values
        self.where = where

    def need(self, key: str) -> Any:
        """Raises UnsupportedModelError if there is none."""
        found = self.values.get(key)
        if found is None:
            raise UnsupportedModelError(f"{self.where} has no field {key!r}, which this model needs")
        return found

    def get(self, key: str, default: Any = None) -> Any:
        """`default` where the field is absent or null."""
        found = self.values.get(key)
        return default if found is None else found

    def size(self, key: str, default: int | None = None) -> int:
        """A whole number above zero, up to what a model can have.

        Raises UnsupportedModelError for anything else, and for none without `default`.
        """
        found = self.need(key) if default is None else self.get(key, default)
        most = _MOST.get(key, MAX_SIZE)
        if not isinstance(found, int) or isinstance(found, bool) or not 1 <= found <= most:
            raise UnsupportedModelError(
                f"{self.where} has {key} {shown(found)}: want a whole number above zero and up to {most}"
            )
        return found

    def whole(self, key: str, default: int) -> int:
        """A whole number, which may be zero. Raises as size() does."""
        return 0 if self.get(key, default) == 0 else self.size(key, default)

    def flag(self, key: str, default: bool = False) -> bool:
        """Raises UnsupportedModelError for what is neither true nor false."""
        found = self.get(key, default)
        if not isinstance(found, bool):
            raise UnsupportedModelError(f"{self.where} has {key} {shown(found)}: want true or false")
        return found

    def token(self, key: str) -> int | None:
        """A token id, if there is one. Raises as size() does."""
        found = self.get(key)
        if found is not None and (not isinstance(found, int) or isinstance(found, bool) or not 0 <= found <= MAX_SIZE):
            raise UnsupportedModelError(f"{self.where} has {key} {shown(found)}: want a token id")
        return found

    def below(self, key: str) -> Fields:
        """The object under `key`, empty where it is absent. Raises UnsupportedModelError for anything else."""
        found = self.get(key, {})
        if not isinstance(found, Mapping):
            raise UnsupportedModelError(f"{self.where} has {key} {shown(found)}: want an object")
        return Fields(found, where=f"{self.where}, {key}")

    def listed(self, key: str, kind: type) -> list[Any]:
        """A list with an element for each layer at most, empty where it is absent. Raises UnsupportedModelError."""
        found = self.get(key, [])
        if not isinstance(found, list) or len(found) > MAX_LAYERS or not all(type(one) is kind for one in found):
            raise UnsupportedModelError(
                f"{self.where} has {key} {shown(found)}: want a list of at most {MAX_LAYERS} of type {kind.__name__}"
            )
        return found

    def constant(self, key: str, default: float | None = None) -> float:
        """A finite number above zero. Raises as size() does."""
        found = self.need(key) if default is None else self.get(key, default)
        if not isinstance(found, int | float) or isinstance(found, bool) or not 0 < found <= _LARGEST_CONSTANT:
            raise UnsupportedModelError(
                f"{self.where} has {key} {shown(found)}: want a number above zero and up to {_LARGEST_CONSTANT:g}"
            )
        return found

    def only(self, key: str, *allowed: Any) -> None:
        """Raises UnsupportedModelError if the field is there and not one of `allowed`. Absent, null, false pass."""
        found = self.values.get(key)
        if found and found not in allowed:
            supported = f"supported: {', '.join(map(repr, allowed))}" if allowed else "supported without it"
            raise UnsupportedModelError(f"{self.where} has {key} {shown(found)}: {supported}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """name:              of the transformers model type.
    architecture:      class of transformers.
    gguf_architecture: what `general.architecture` of a GGUF file says; None for a family whose files call it a Llama.
    layer_names:       of a layer's tensors, ours -> transformers'; `{expert}` stands for a number.
    from_hf, to_hf:    traits of config.json, both ways.
    from_gguf:         traits of a GGUF file's metadata, whose keys have lost the architecture's prefix.
    tied:              whether the head is the embedding where config.json does not say.
    rope_theta:        where a file does not say.
    pairs_rotary_rows: GGUF files hold the rows of q and k so that rotary pairs lie side by side.
    is_mixture:        has experts; tells two families apart that share a GGUF architecture.
    """

    name: str
    architecture: str
    layer_names: Mapping[str, str]
    from_hf: Callable[[Fields], Traits]
    to_hf: Callable[[ModelConfig], dict[str, Any]]
    from_gguf: Callable[[Fields], Traits]
    gguf_architecture: str | None = None
    tied: bool = False
    rope_theta: float = 10000.0
    pairs_rotary_rows: bool = False
    is_mixture: bool = False

    def hf_name(self, name: str) -> str:
        """The name in transformers of our tensor `name`."""
        if name in _GLOBAL_NAMES:
            return _GLOBAL_NAMES[name]
        _, layer, own = name.split(".", 2)
        if own.startswith("experts."):
            _, expert, own = own.split(".")
            return f"model.layers.{layer}.{self.layer_names[f'experts.{own}'].format(expert=expert)}"
        return f"model.layers.{layer}.{self.layer_names[own]}"


def no_traits(fields: Fields) -> Traits:
    return {}


def window_everywhere(fields: Fields) -> Traits:
    """The sliding window of a family in which all layers have it or none."""
    return sliding_traits(fields, is_local=[True] * fields.size("num_hidden_layers"))


def sliding_traits(fields: Fields, *, is_local: Sequence[bool], rope_theta: float | None = None) -> Traits:
    """is_local: by layer, where the file does not list `layer_types`."""
    window = fields.size("sliding_window") if fields.get("sliding_window") is not None else None
    if fields.get("layer_types") is not None:
        kinds = fields.listed("layer_types", str)
        unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
        if unknown or len(kinds) != fields.size("num_hidden_layers"):
            among = f" and among them {shown(unknown[0])}" if unknown else ""
            raise UnsupportedModelError(
                f"{fields.where} lists {len(kinds)} layer_types{among}: "
                f"want {fields.size('num_hidden_layers')} of 'sliding_attention' and 'full_attention'"
            )
        is_local = [kind == "sliding_attention" for kind in kinds]
    if window is None or not any(is_local):
        return {}
    return {"sliding": SlidingWindow(window=window, is_local=tuple(is_local), rope_theta=rope_theta)}


def layer_types(config: ModelConfig) -> dict[str, Any]:
    """config.json's fields of the sliding window."""
    if config.sliding is None:
        return {"sliding_window": None}
    kinds = ["sliding_attention" if local else "full_attention" for local in config.sliding.is_local]
    return {"sliding_window": config.sliding.window, "layer_types": kinds}
