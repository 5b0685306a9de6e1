"""The configuration of a decoder, as plain data.

This module does not import torch, because schedulers and tools use it too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Activation = Literal["silu", "gelu_tanh"]


class UnsupportedModelError(ValueError):
    """Raised if the files are readable, but this runtime cannot run their model.

    The message names the field or tensor.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3Scaling:
    """Frequency scaling of Llama 3.1 (transformers `rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearScaling:
    """Scaling that divides positions by `factor` (transformers `rope_type: linear`)."""

    factor: float


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnScaling:
    """Frequency scaling of Peng et al. 2023, arXiv:2309.00071 (transformers `rope_type: yarn`).

    beta_fast, beta_slow: numbers of rotations within the original length. A rotary pair with more than beta_fast
                          rotations keeps its frequency. The frequency of a pair with fewer than beta_slow rotations is
                          divided by `factor`. Between the two, the frequency is interpolated.
    truncate:             whether to round the bounds of the interpolated range to whole pairs.
    attention_factor:     factor by which queries and keys are multiplied.
    """

    factor: float
    original_max_position_embeddings: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRopeScaling:
    """Frequency scaling of Ding et al. 2024, arXiv:2402.13753 (transformers `rope_type: longrope`).

    short_factor, long_factor: divisor of the frequency of each rotary pair. short_factor is for sequences within the
        original length, long_factor for longer sequences.
    attention_factor:          factor by which queries and keys are multiplied.
    """

    short_factor: tuple[float, ...]
    long_factor: tuple[float, ...]
    original_max_position_embeddings: int
    attention_factor: float


RopeScaling = Llama3Scaling | LinearScaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, slots=True, kw_only=True)
class SlidingWindow:
    """The sliding window of a model, which limits the attention of some layers to the last tokens of the sequence.

    window:     number of tokens, including the current token.
    is_local:   for each layer, whether it has the window. The other layers attend to all tokens.
    rope_theta: rotary base of the local layers, without scaling; None means the base and the scaling of the model.
    rotates:    whether the local layers rotate queries and keys.
    """

    window: int
    is_local: tuple[bool, ...]
    rope_theta: float | None = None
    rotates: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class MoEConfig:
    """The sizes of a mixture of experts, which replaces the feed-forward network in all layers but `dense_layers`.

    normalize: whether the weights of a token's selected experts are scaled to a sum of 1.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalize: bool
    dense_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """The configuration of a decoder: sizes, constants and traits of its family.

    family:             key of `families.FAMILIES`, which determines the names of tensors and configuration fields.
    eos_token_ids:      ids of the tokens that end an answer unless the request names others.
    qk_norm:            whether queries and keys are normalized, each head separately.
    joint_qk_norm:      with `qk_norm`, whether all heads of a token are normalized together instead of separately.
    norm_weight_offset: number to add to the stored weights of every norm.
    input_norms:        whether the inputs of attention and feed-forward are normalized.
    output_norms:       whether the outputs of attention and feed-forward are normalized before they are added to the
                        hidden states.
    embedding_scale:    factor by which the embeddings are multiplied.
    query_scale:        factor by which q·k is multiplied; None means head_dim ** -0.5.
    logit_scale:        factor by which the logits are multiplied.
    fused:              whether files store q, k and v as one tensor, and gate and up as one tensor.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    tie_embeddings: bool
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None = None
    rope_scaling: RopeScaling | None = None
    activation: Activation = "silu"
    qkv_bias: bool = False
    qk_norm: bool = False
    joint_qk_norm: bool = False
    norm_weight_offset: float = 0.0
    input_norms: bool = True
    output_norms: bool = False
    embedding_scale: float = 1.0
    query_scale: float | None = None
    logit_scale: float = 1.0
    fused: bool = False
    sliding: SlidingWindow | None = None
    moe: MoEConfig | None = None

    @property
    def kv_elements_per_token(self) -> int:
        """Number of key and value elements of all layers for one token."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def attention_scale(self) -> float:
        """Factor of q·k in the attention scores."""
        return self.head_dim**-0.5 if self.query_scale is None else self.query_scale

    @property
    def short_length(self) -> int | None:
        """Maximum length, prompt plus answer, of sequences that use the short rotary frequencies.

        The value is None if the model has only one set of frequencies.
        """
        scaling = self.rope_scaling
        return scaling.original_max_position_embeddings if isinstance(scaling, LongRopeScaling) else None

    def is_local(self, layer: int) -> bool:
        """Return whether `layer` has a sliding window."""
        return self.sliding is not None and self.sliding.is_local[layer]

    def is_mixture(self, layer: int) -> bool:
        """Return whether `layer` has experts."""
        return self.moe is not None and layer not in self.moe.dense_layers
