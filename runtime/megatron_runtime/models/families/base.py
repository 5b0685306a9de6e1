"""What a family of models is: the names of its tensors, and how files write its configuration.

The rotary embedding, sliding windows and experts, which several families share, are read and written here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeGuard

from megatron_runtime.models.config import (
    LinearScaling,
    Llama3Scaling,
    ModelConfig,
    MoEConfig,
    RopeScaling,
    SlidingWindow,
    UnsupportedModelError,
)
from megatron_runtime.protocol.text import shown

Traits = dict[str, Any]
"""Fields of a ModelConfig that differ between families."""

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
_GLOBAL_NAMES = {"embedding": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}

MAX_LAYERS, MAX_EXPERTS, MAX_ALL_EXPERTS = 1024, 1024, 1 << 16
"""Layers, experts of a layer, experts of all layers. Each is some Python objects before any tensor is looked for."""
MAX_SIZE = (1 << 31) - 1
_LARGEST_CONSTANT = 1e18
_TOLERANCE = 1e-3
"""Of rotary factors that were computed in float32."""
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
"""Limits of sizes that loops count to, or that are multiplied; MAX_SIZE is the limit of the others."""


class Fields:
    """A configuration as read from a file. Missing and wrong fields are rejected by name.

    where: the file, for messages.

    All methods raise UnsupportedModelError naming the field, its value and what is supported.
    """

    def __init__(self, values: Mapping[str, Any], *, where: str) -> None:
        self.values = values
        self.where = where

    def need(self, key: str) -> Any:
        """Return the value of a field, which must be present."""
        found = self.values.get(key)
        if found is None:
            raise UnsupportedModelError(f"{self.where} has no field {key!r}, which this model needs")
        return found

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a field, or `default` if it is absent or null."""
        found = self.values.get(key)
        return default if found is None else found

    def size(self, key: str, default: int | None = None) -> int:
        """Return a whole number above zero and up to a limit. The field is needed unless it has a default."""
        found = self.need(key) if default is None else self.get(key, default)
        most = _MOST.get(key, MAX_SIZE)
        if not _is_whole(found) or not 1 <= found <= most:
            raise self._wrong(key, found, f"want a whole number above zero and up to {most}")
        return int(found)

    def whole(self, key: str, default: int) -> int:
        """Return a whole number, which may be zero."""
        return 0 if self.get(key, default) == 0 else self.size(key, default)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return true or false."""
        found = self.get(key, default)
        if not isinstance(found, bool):
            raise self._wrong(key, found, "want true or false")
        return found

    def token(self, key: str) -> int | None:
        """Return a token id, if there is one."""
        found = self.get(key)
        if found is None:
            return None
        if not _is_whole(found) or not 0 <= found <= MAX_SIZE:
            raise self._wrong(key, found, "want a token id")
        return int(found)

    def below(self, key: str) -> Fields:
        """Return the object in a field, empty if it is absent."""
        found = self.get(key, {})
        if not isinstance(found, Mapping):
            raise self._wrong(key, found, "want an object")
        return Fields(found, where=f"{self.where}, {key}")

    def listed(self, key: str, kind: type) -> list[Any]:
        """Return a list with at most one element per layer, empty if it is absent."""
        found = self.get(key, [])
        if not isinstance(found, list) or len(found) > MAX_LAYERS or not all(type(one) is kind for one in found):
            raise self._wrong(key, found, f"want a list of at most {MAX_LAYERS} of type {kind.__name__}")
        return found

    def constant(self, key: str, default: float | None = None) -> float:
        """Return a finite number above zero. The field is needed unless it has a default."""
        found = self.need(key) if default is None else self.get(key, default)
        if not isinstance(found, int | float) or isinstance(found, bool) or not 0 < found <= _LARGEST_CONSTANT:
            raise self._wrong(key, found, f"want a number above zero and up to {_LARGEST_CONSTANT:g}")
        return found

    def only(self, key: str, *allowed: Any) -> None:
        """Accept a field that is absent, null, false or one of `allowed`."""
        found = self.values.get(key)
        if found and found not in allowed:
            supported = f"supported: {', '.join(map(repr, allowed))}" if allowed else "supported without it"
            raise self._wrong(key, found, supported)

    def _wrong(self, key: str, found: object, wanted: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.where} has {key} {shown(found)}: {wanted}")


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family.

    name:              of the model type in transformers.
    architecture:      class in transformers.
    gguf_architecture: `general.architecture` of GGUF files; None for a family whose files are named a Llama.
    layer_names:       of a layer's tensors, short name -> name in transformers; `{expert}` stands for a number.
    activation_field:  field of config.json with the activation, and its only supported value.
    unsupported:       fields of config.json that must be absent, null or false.
    from_hf, to_hf:    traits of config.json, both ways.
    from_gguf:         traits of a GGUF file's metadata, whose keys are without the architecture's prefix.
    tied:              the head is the embedding if config.json does not say.
    rope_theta:        used if a file does not say.
    pairs_rotary_rows: in GGUF files the two rows of q and k that rotate together are adjacent.
    is_mixture:        has experts; distinguishes two families with the same GGUF architecture.
    """

    name: str
    architecture: str
    layer_names: Mapping[str, str]
    activation_field: tuple[str, str] = ("hidden_act", "silu")
    unsupported: tuple[str, ...] = ()
    from_hf: Callable[[Fields], Traits] = lambda fields: {}
    to_hf: Callable[[ModelConfig], dict[str, Any]] = lambda config: {}
    from_gguf: Callable[[Fields], Traits] = lambda fields: {}
    gguf_architecture: str | None = None
    tied: bool = False
    rope_theta: float = 10000.0
    pairs_rotary_rows: bool = False
    is_mixture: bool = False

    def hf_name(self, name: str) -> str:
        """Return the name in transformers of the tensor with the short name `name`."""
        if name in _GLOBAL_NAMES:
            return _GLOBAL_NAMES[name]
        _, layer, own = name.split(".", 2)
        if own.startswith("experts."):
            _, expert, own = own.split(".")
            return f"model.layers.{layer}.{self.layer_names[f'experts.{own}'].format(expert=expert)}"
        return f"model.layers.{layer}.{self.layer_names[own]}"


def window_everywhere(fields: Fields) -> Traits:
    """Return the sliding window of a family in which all layers have one or none."""
    return sliding_traits(fields, is_local=[True] * fields.size("num_hidden_layers"))


def sliding_traits(fields: Fields, *, is_local: Sequence[bool], rope_theta: float | None = None) -> Traits:
    """Return the sliding window of some layers. is_local: by layer, used if the file does not list `layer_types`."""
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
    """Return the fields of the sliding window in config.json."""
    if config.sliding is None:
        return {"sliding_window": None}
    kinds = ["sliding_attention" if local else "full_attention" for local in config.sliding.is_local]
    return {"sliding_window": config.sliding.window, "layer_types": kinds}


def mixture(fields: Fields, experts: str, per_token: str, size: str, **others: Any) -> Traits:
    """Return the experts of a family.

    experts, per_token, size: fields with the number of experts, of experts per token, and of rows of an expert.
    """
    counts = fields.size(experts), fields.size(per_token), fields.size(size)
    names = ("num_experts", "experts_per_token", "intermediate_size")
    return {"moe": MoEConfig(**{"normalize": True, **dict(zip(names, counts, strict=True)), **others})}


def rope_of_hf(fields: Fields, *, theta: float) -> tuple[float, RopeScaling | None]:
    """Return base and scaling of the layers without a window. theta: used if the file has none."""
    # transformers 5 writes rope_parameters, for each kind of layer where they differ; version 4 wrote rope_theta and
    # rope_scaling.
    values = fields.below("rope_parameters" if fields.get("rope_parameters") else "rope_scaling")
    if "full_attention" in values.values:
        values = values.below("full_attention")
    base = values if values.get("rope_theta") else fields
    return base.constant("rope_theta", theta), _scaling(values)


def rope_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json, in the form that transformers 4 and 5 read."""
    scaling, values = config.rope_scaling, None
    if scaling is not None:
        kind = "llama3" if isinstance(scaling, Llama3Scaling) else "linear"
        values = {"rope_type": kind, **asdict(scaling)}
    return {"rope_theta": config.rope_theta, "rope_scaling": values}


def rope_of_gguf(fields: Fields, *, theta: float) -> tuple[float, RopeScaling | None]:
    """Return base and scaling from the metadata of a GGUF file. theta: used if the file has none."""
    kind = fields.get("rope.scaling.type", "none")
    base = fields.constant("rope.freq_base", theta)
    if kind == "none":
        return base, None
    if kind != "linear":
        raise UnsupportedModelError(f"{fields.where} has rope scaling {shown(kind)}: supported are 'none' and 'linear'")
    return base, LinearScaling(factor=fields.constant("rope.scaling.factor"))


def scaling_of_factors(factors: Sequence[float], *, theta: float, head_dim: int, where: str) -> Llama3Scaling:
    """Return the scaling that divides the frequency of each rotary pair by these factors.

    GGUF files have these factors instead of the constants of the scaling. All Llama 3 models have the same constants
    except the factor. Raises UnsupportedModelError for other factors.
    """
    if not factors or not all(0 < factor < math.inf for factor in factors):
        raise UnsupportedModelError(f"tensor 'rope_freqs.weight' of {where} has a value that is no factor above zero")
    found = Llama3Scaling(
        factor=round(max(factors), 3), low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    for pair, factor in enumerate(factors):
        rotations = found.original_max_position_embeddings * theta ** (-2 * pair / head_dim) / (2 * math.pi)
        blend = (rotations - found.low_freq_factor) / (found.high_freq_factor - found.low_freq_factor)
        blend = min(max(blend, 0.0), 1.0)
        frequency = (1 - blend) / found.factor + blend
        if abs(factor * frequency - 1) > _TOLERANCE:
            raise UnsupportedModelError(
                f"tensor 'rope_freqs.weight' of {where} divides the frequency of pair {pair} by {factor}: supported "
                f"is the scaling of Llama 3, which comes to {1 / frequency:.4g}"
            )
    return found


def _scaling(values: Fields) -> RopeScaling | None:
    kind = values.get("rope_type", values.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return LinearScaling(factor=values.constant("factor"))
    if kind != "llama3":
        raise UnsupportedModelError(
            f"{values.where} has rope type {shown(kind)}: supported are 'default', 'linear' and 'llama3'"
        )
    return Llama3Scaling(
        factor=values.constant("factor"),
        low_freq_factor=values.constant("low_freq_factor"),
        high_freq_factor=values.constant("high_freq_factor"),
        original_max_position_embeddings=values.size("original_max_position_embeddings"),
    )
