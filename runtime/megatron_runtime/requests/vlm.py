"""A request with images."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from megatron_runtime.requests.dynamic import DynamicInferenceRequest


@dataclass(kw_only=True)
class VLMInferenceRequest(DynamicInferenceRequest):
    """A request of a vision-language model. Prefix caching is off: a hash of tokens does not cover the images.

    num_img_embeddings_per_tile: embeddings that take the place of one tile in the sequence.
    imgs:               pixels of all tiles, shape [tiles, channels, height, width]; None for text alone.
    num_tiles:          tiles of each image, shape [images].
    decoder_seq_length: length of the sequence with the embeddings in place.
    """

    num_img_embeddings_per_tile: int = 0
    imgs: Any = None
    num_tiles: Any = None
    decoder_seq_length: int | None = None

    def __post_init__(self) -> None:
        self.enable_prefix_caching = False
        super().__post_init__()

    @property
    def num_img_embeddings(self) -> int:
        """Embeddings of all images together."""
        return 0 if self.num_tiles is None else int(sum(self.num_tiles)) * self.num_img_embeddings_per_tile

    def continued(self) -> Self:
        segment = super().continued()
        segment.num_img_embeddings_per_tile = self.num_img_embeddings_per_tile
        segment.imgs = self.imgs
        segment.num_tiles = self.num_tiles
        if self.decoder_seq_length is not None:
            segment.decoder_seq_length = self.decoder_seq_length + len(self.generated_tokens)
        return segment
