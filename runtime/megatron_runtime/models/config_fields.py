"""Reads and checks fields of config.json and of GGUF metadata.

It also reads the fields of rotary embeddings and sliding windows, which several families share.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeGuard

from megatron_runtime.models.config import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    ModelConfig,
    RopeScaling,
    SlidingWindow,
    UnsupportedModelError,
    YarnScaling,
)
from megatron_runtime.protocol.text import shown

Traits = dict[str, Any]
"""Fields of a ModelConfig that differ between families."""

OTHERS = "`backend: VLLM` runs others"
"""The remedy in errors for a transformers model that this runtime cannot run."""
GGUF_OTHERS = f"{OTHERS}, from safetensors"
"""The remedy for a GGUF file that this runtime cannot run. vLLM engines also use this runtime's readers for GGUF
files.
"""
MAX_LAYERS, MAX_EXPERTS, MAX_ALL_EXPERTS = 1024, 1024, 1 << 16
"""Maximum numbers of layers, of experts per layer, and of all experts.

Each needs Python objects before tensors are read.
"""
MAX_SIZE = (1 << 31) - 1
_NO_TOKEN = (-1, (1 << 32) - 1)
_LARGEST_CONSTANT = 1e18
_MAX_LISTED = 1 << 12
_TOLERANCE = 1e-3  # tolerance for rotary factors that were computed in float32
_MAX_SIZES = {
    **dict.fromkeys(("num_hidden_layers", "num_layers", "block_count"), MAX_LAYERS),
    **dict.fromkeys(("num_local_experts", "num_experts", "expert_count"), MAX_EXPERTS),
    **dict.fromkeys(("max_position_embeddings", "context_length"), 1 << 24),
    **dict.fromkeys(("num_attention_heads", "attention.head_count", "head_dim", "attention.key_length"), 1 << 16),
}
"""Maximum values of sizes that limit loops or are multiplied. MAX_SIZE is the maximum of all other sizes."""


class Fields:
    """The fields of a configuration that was read from a file. where: name of the file, for error messages.

    If the value of a field is not supported, the methods raise UnsupportedModelError, which names the field, its value
    and the supported values.
    """

    def __init__(self, values: Mapping[str, Any], *, where: str) -> None:
        self.values = values
        self.where = where

    def need(self, key: str) -> Any:
        """Return the value of a required field."""
        value = self.values.get(key)
        if value is None:
            raise UnsupportedModelError(f"{self.where} has no field {key!r}, which this model needs")
        return value

    def get(self, key: str, default: Any = None) -> Any:
        """Return the value of a field, or `default` if it is absent or null."""
        value = self.values.get(key)
        return default if value is None else value

    def size(self, key: str, default: int | None = None) -> int:
        """Return the value of a field, an integer from 1 to the maximum for this field.

        The field is required if `default` is None. Otherwise, return `default` if the field is absent or null.
        """
        value = self.need(key) if default is None else self.get(key, default)
        limit = _MAX_SIZES.get(key, MAX_SIZE)
        if not _is_whole(value) or not 1 <= value <= limit:
            raise self._wrong(key, value, f"want a whole number above zero and up to {limit}")
        return int(value)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return the boolean value of a field, or `default` if the field is absent or null."""
        value = self.get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, value, "want true or false")
        return value

    def token(self, key: str) -> int | None:
        """Return a token id, or None if the field is absent, null or -1, which in GGUF files has 32 bits."""
        value = self.get(key)
        if value is None or (_is_whole(value) and value in _NO_TOKEN):
            return None
        if not _is_whole(value) or not 0 <= value <= MAX_SIZE:
            raise self._wrong(key, value, "want a token id")
        return int(value)

    def below(self, key: str) -> Fields:
        """Return the fields of the JSON object in field `key`. If the field is absent, the result has no fields."""
        value = self.get(key, {})
        if not isinstance(value, Mapping):
            raise self._wrong(key, value, "want an object")
        return Fields(value, where=f"{self.where}, {key}")

    def listed(self, key: str, kind: type) -> list[Any]:
        """Return the list in a field, which has at most one element per layer.

        Return an empty list if the field is absent.
        """
        values = self.get(key, [])
        if not isinstance(values, list) or len(values) > MAX_LAYERS or not all(type(one) is kind for one in values):
            raise self._wrong(key, values, f"want a list of at most {MAX_LAYERS} of type {kind.__name__}")
        return values

    def constant(self, key: str, default: float | None = None) -> float:
        """Return the value of a field, a finite number above zero.

        The field is required if `default` is None. Otherwise, return `default` if the field is absent or null.
        """
        value = self.need(key) if default is None else self.get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value <= _LARGEST_CONSTANT:
            raise self._wrong(key, value, f"want a number above zero and up to {_LARGEST_CONSTANT:g}")
        return value

    def constants(self, key: str) -> list[float]:
        """Return the list in a required field. The list has at most _MAX_LISTED numbers, all finite and above zero."""
        values = self.need(key)
        if not isinstance(values, list) or len(values) > _MAX_LISTED:
            raise self._wrong(key, values, f"want a list of at most {_MAX_LISTED} numbers")
        return [Fields({key: each}, where=self.where).constant(key) for each in values]

    def only(self, key: str, *allowed: Any) -> None:
        """Raise an error unless a field is absent, null, false or equal to one of `allowed`."""
        value = self.values.get(key)
        if value and value not in allowed:
            supported = f"supported: {', '.join(map(repr, allowed))}" if allowed else "supported without it"
            raise self._wrong(key, value, f"{supported}; {OTHERS}")

    def require_causal(self, key: str, *, remedy: str) -> None:
        """Raise an error if a field says that tokens attend to later tokens, as in some embedding models."""
        if not self.flag(key, True):
            raise self._wrong(key, False, f"supported: True; {remedy}")

    def _wrong(self, key: str, value: object, wanted: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.where} has {key} {shown(value)}: {wanted}")


def _is_whole(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def window_everywhere(fields: Fields) -> Traits:
    """Return the ModelConfig field `sliding` of a family in which either all layers or no layers have a window.

    Returns no field if no layer has a sliding window.
    """
    return sliding_traits(fields, is_local=[True] * fields.size("num_hidden_layers"))


def sliding_traits(fields: Fields, *, is_local: Sequence[bool], rope_theta: float | None = None) -> Traits:
    """Return the ModelConfig field `sliding` of a family in which some layers have a sliding window.

    Returns no field if no layer has a sliding window.

    is_local: for each layer, whether it has a window. Used if the file does not list `layer_types`.
    """
    window = fields.size("sliding_window") if fields.get("sliding_window") is not None else None
    if fields.get("layer_types") is not None:
        kinds = fields.listed("layer_types", str)
        unknown = sorted(set(kinds) - {"sliding_attention", "full_attention"})
        if unknown or len(kinds) != fields.size("num_hidden_layers"):
            among = f" and among them {shown(unknown[0])}" if unknown else ""
            raise UnsupportedModelError(
                f"{fields.where} lists {len(kinds)} layer_types{among}: "
                f"want {fields.size('num_hidden_layers')} of 'sliding_attention' and 'full_attention'; {OTHERS}"
            )
        is_local = [kind == "sliding_attention" for kind in kinds]
    if window is None or not any(is_local):
        return {}
    return {"sliding": SlidingWindow(window=window, is_local=tuple(is_local), rope_theta=rope_theta)}


def windows_of_gguf(fields: Fields, *, is_local: Sequence[bool], rope_theta: float | None = None) -> Traits:
    """Return the ModelConfig field `sliding` that a GGUF file describes, or no field if no layer has a sliding window.

    A window of 0 in the file means no window.

    is_local:   for each layer, whether it has a window. Used if the file has no pattern of layers.
    rope_theta: rotary base of the layers with a window; None if all layers have the same rotary embedding.
    """
    pattern, layers = "attention.sliding_window_pattern", fields.size("block_count")
    if isinstance(fields.get(pattern), list):  # one flag per layer; otherwise the field is a period
        is_local = fields.listed(pattern, bool)
        if len(is_local) != layers:
            raise UnsupportedModelError(f"{fields.where} has {pattern} of {len(is_local)} layers: want {layers}")
    elif fields.get(pattern) is not None:
        is_local = is_local_by_period(layers, fields.size(pattern))
    window = fields.get("attention.sliding_window") or None
    return sliding_traits(
        Fields({"sliding_window": window}, where=fields.where), is_local=is_local, rope_theta=rope_theta
    )


def is_local_by_period(num_layers: int, period: int) -> list[bool]:
    """Return, for each layer, whether it has a sliding window.

    In each group of `period` layers, the last layer has no window.
    """
    return [bool((layer + 1) % period) for layer in range(num_layers)]


def layer_types(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json that describe the sliding window."""
    if config.sliding is None:
        return {"sliding_window": None}
    kinds = ["sliding_attention" if local else "full_attention" for local in config.sliding.is_local]
    return {"sliding_window": config.sliding.window, "layer_types": kinds}


def rope_of_hf(fields: Fields, *, theta: float) -> Traits:
    """Return the rotary base and scaling of the layers without a window. theta: the base if the file states no base."""
    # transformers 5 writes rope_parameters, by kind of layer if the kinds differ. transformers 4 wrote rope_theta and
    # rope_scaling.
    values = fields.below("rope_parameters" if fields.get("rope_parameters") else "rope_scaling")
    if "full_attention" in values.values:
        values = values.below("full_attention")
    values.only("partial_rotary_factor", 1.0)
    base = values if values.get("rope_theta") else fields
    return {"rope_theta": base.constant("rope_theta", theta), "rope_scaling": _scaling(values, fields)}


def rope_to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return the fields of config.json for the rotary embedding, in a format that transformers 4 and 5 read."""
    scaling, more = config.rope_scaling, {}
    if scaling is None:
        return {"rope_theta": config.rope_theta, "rope_scaling": None}
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in asdict(scaling).items()}
    if isinstance(scaling, LongRopeScaling):
        more["original_max_position_embeddings"] = scaling.original_max_position_embeddings
    values["rope_type"] = _NAMES_OF_SCALINGS[type(scaling)]
    return {"rope_theta": config.rope_theta, "rope_scaling": values, **more}


def rope_of_gguf(fields: Fields, *, theta: float) -> Traits:
    """Return the rotary base and scaling from the metadata of a GGUF file. theta: the base if the file states no
    base.
    """
    kind = fields.get("rope.scaling.type", "linear")
    base = fields.constant("rope.freq_base", theta)
    scaling: RopeScaling | None = None
    if kind == "linear":  # older files have the factor in rope.scale_linear
        factor = fields.constant("rope.scaling.factor", fields.constant("rope.scale_linear", 1.0))
        scaling = LinearScaling(factor=factor) if factor != 1 else None
    elif kind == "yarn":
        factor = fields.constant("rope.scaling.factor")
        scaling = YarnScaling(
            factor=factor,
            original_max_position_embeddings=fields.size("rope.scaling.original_context_length"),
            attention_factor=fields.constant("rope.scaling.attn_factor", 1.0) * _yarn_magnitude(factor),
            beta_fast=fields.constant("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=fields.constant("rope.scaling.yarn_beta_slow", 1.0),
        )
    elif kind not in ("none", "longrope"):  # the factors of 'longrope' are tensors: see long_rope()
        raise UnsupportedModelError(
            f"{fields.where} has rope scaling {shown(kind)}: supported are 'none', 'linear', 'yarn' and 'longrope'; "
            f"{GGUF_OTHERS}"
        )
    return {"rope_theta": base, "rope_scaling": scaling}


def scaling_of_factors(factors: Sequence[float], *, theta: float, head_dim: int, where: str) -> Llama3Scaling:
    """Return the Llama 3 scaling that divides the frequencies of the rotary pairs by `factors`.

    Raises UnsupportedModelError if no Llama 3 scaling has these divisors.

    factors: the divisor of each rotary pair. GGUF files contain the divisors instead of the constants of the scaling.
    """
    if not factors or not all(0 < factor < math.inf for factor in factors):
        raise UnsupportedModelError(
            f"tensor 'rope_freqs.weight' of {where} has a value that is not above zero and finite"
        )
    scaling = Llama3Scaling(
        factor=round(max(factors), 3), low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=8192
    )
    for pair, factor in enumerate(factors):
        rotations = scaling.original_max_position_embeddings * theta ** (-2 * pair / head_dim) / (2 * math.pi)
        blend = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
        blend = min(max(blend, 0.0), 1.0)
        frequency = (1 - blend) / scaling.factor + blend
        if abs(factor * frequency - 1) > _TOLERANCE:
            raise UnsupportedModelError(
                f"tensor 'rope_freqs.weight' of {where} divides the frequency of pair {pair} by {factor}: supported "
                f"is the scaling of Llama 3, here {1 / frequency:.4g}; {GGUF_OTHERS}"
            )
    return scaling


_NAMES_OF_SCALINGS: dict[type, str] = {
    LinearScaling: "linear",
    Llama3Scaling: "llama3",
    YarnScaling: "yarn",
    LongRopeScaling: "longrope",
}


def _scaling(values: Fields, model: Fields) -> RopeScaling | None:
    """Return the scaling that the rotary fields `values` describe, or None if they describe no scaling.

    model: fields of the whole configuration.
    """
    kind = values.get("rope_type", values.get("type", "default"))
    # "dynamic" changes only the frequencies of sequences above the model's limit, and such sequences are rejected.
    if kind in ("default", "dynamic"):
        return None
    if kind == "linear":
        return LinearScaling(factor=values.constant("factor"))
    if kind == "yarn":
        return _yarn(values, model)
    if kind in ("longrope", "su"):
        return _longrope(values, model)
    if kind != "llama3":
        raise UnsupportedModelError(
            f"{values.where} has rope type {shown(kind)}: supported are 'default', "
            f"{', '.join(map(repr, _NAMES_OF_SCALINGS.values()))}, and 'dynamic' within the model's length; {OTHERS}"
        )
    return Llama3Scaling(
        factor=values.constant("factor"),
        low_freq_factor=values.constant("low_freq_factor"),
        high_freq_factor=values.constant("high_freq_factor"),
        original_max_position_embeddings=values.size("original_max_position_embeddings"),
    )


def _yarn(values: Fields, model: Fields) -> YarnScaling:
    length = model.size("max_position_embeddings")
    # If the file lacks the training length, transformers uses the model's length.
    original = values.size("original_max_position_embeddings", model.size("original_max_position_embeddings", length))
    factor = values.constant("factor", max(length / original, 1.0))
    attention = values.constant("attention_factor", 1.0)
    if values.get("attention_factor") is None:
        scales = [values.get(key) for key in ("mscale", "mscale_all_dim")]
        ratio = [values.constant(key) for key in ("mscale", "mscale_all_dim")] if all(scales) else [1.0, 0.0]
        attention = _yarn_magnitude(factor, ratio[0]) / _yarn_magnitude(factor, ratio[1])
    return YarnScaling(
        factor=factor,
        original_max_position_embeddings=original,
        attention_factor=attention,
        beta_fast=values.constant("beta_fast", 32.0),
        beta_slow=values.constant("beta_slow", 1.0),
        truncate=values.flag("truncate", True),
    )


def _yarn_magnitude(factor: float, scale: float = 1.0) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def longest_sequence(declared: int, scaling: RopeScaling | None) -> int:
    """Return the maximum sequence length of a model in tokens.

    declared: length in the model's file. Some files state the length before the extension by YaRN.
    """
    if isinstance(scaling, YarnScaling):
        return max(declared, int(scaling.original_max_position_embeddings * scaling.factor))
    return declared


def _longrope(values: Fields, model: Fields) -> LongRopeScaling:
    values.only("short_mscale")
    values.only("long_mscale")
    length = model.size("max_position_embeddings")
    # Phi-3 has this field among the model's sizes, where it takes precedence.
    original = model.size("original_max_position_embeddings", values.size("original_max_position_embeddings", length))
    has_attention = values.get("attention_factor") is not None
    return long_rope(
        values.constants("short_factor"),
        values.constants("long_factor"),
        original=original,
        factor=values.constant("factor", length / original),
        head_dim=_head_dim(model),
        attention_factor=values.constant("attention_factor") if has_attention else None,
        where=values.where,
    )


def long_rope(
    short: Sequence[float],
    long: Sequence[float],
    *,
    original: int,
    factor: float,
    head_dim: int,
    attention_factor: float | None,
    where: str,
) -> LongRopeScaling:
    """Return the LongRoPE scaling, given the factors of all rotary pairs.

    factor: maximum length of the model divided by the original length. If `attention_factor` is None, `factor`
            determines it.

    Raises UnsupportedModelError unless each pair has a factor above zero and the original length is above 1.
    """
    if original < 2:
        raise UnsupportedModelError(f"{where} has an original length of {original} tokens: want at least 2")
    for factors in (short, long):
        if len(factors) != head_dim // 2 or not all(0 < each < math.inf for each in factors):
            raise UnsupportedModelError(
                f"{where} has {len(factors)} factors of rotary pairs: want {head_dim // 2}, all above zero"
            )
    if attention_factor is None:
        attention_factor = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
    return LongRopeScaling(
        short_factor=tuple(short),
        long_factor=tuple(long),
        original_max_position_embeddings=original,
        attention_factor=attention_factor,
    )


def _head_dim(model: Fields) -> int:
    return model.size("head_dim", model.size("hidden_size") // model.size("num_attention_heads"))
