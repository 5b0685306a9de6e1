"""Images, audio and video of requests. vLLM's process reads them in the same way as vLLM's own server.

This module computes the features from the files that the client sent. Only files are sent between our processes, not
features. The server has expanded the prompt with the same classes of vLLM (server/formats/vllm_worker.py), and both
expansions must be equal.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

from vllm import TokensPrompt
from vllm.config import ModelConfig

from megatron_runtime.protocol.media import data_url

MAX_NAMES = 1 << 16
"""Number of media whose names in vLLM's cache events are remembered. The least recently used one is forgotten first."""

Item = tuple[str, bytes, bytes]
"""Kind (protocol.media.KINDS), digest and file."""


def takes_media(config: ModelConfig) -> bool:
    """Return whether the model takes images, audio or video, and this version of vLLM has the interface."""
    return bool(getattr(config, "supports_multimodal_inputs", False)) and _tracker() is not None


def _tracker() -> Any:
    """Return the class that loads the media of a conversation; None before vLLM 0.32."""
    try:
        from vllm.renderers.chat_utils import AsyncMultiModalItemTracker
    except ImportError:
        return None
    return AsyncMultiModalItemTracker


class MediaReader:
    """Converts prompts with media to inputs of vLLM's engine.

    renderer: the renderer of AsyncLLM.
    names:    digests of the media by the identifiers that vLLM gives them and that its cache events contain.
    """

    def __init__(self, renderer: Any) -> None:
        self._renderer = renderer
        self._tracker = _tracker()
        self.names: OrderedDict[str, bytes] = OrderedDict()

    async def engine_input(
        self, template: Sequence[int], items: Sequence[Item], tokens: Sequence[int]
    ) -> dict[str, Any]:
        """Return the input for `tokens`: the expanded prompt and tokens of its answer.

        template: the prompt with one placeholder for each item.

        Raises ValueError if the model does not support the media, or if the expanded template differs from `tokens`.
        """
        tracker = self._tracker(self._renderer.model_config)
        parser = tracker.create_parser()
        parse = {"image": parser.parse_image, "audio": parser.parse_audio, "video": parser.parse_video}
        for kind, _, data in items:
            parse[kind.partition("/")[0]](data_url(kind, data))
        loaded, names = await tracker.resolve_items()
        prompt = TokensPrompt(prompt_token_ids=list(template), multi_modal_data=loaded)
        if names is not None:
            prompt["multi_modal_uuids"] = names
        # Does not use the cache that this process and the engine core must keep in step: a request may be aborted in
        # between.
        made: dict[str, Any] = await self._renderer.process_for_engine_async(prompt, time.time(), skip_mm_cache=True)
        expanded = made["prompt_token_ids"]
        if list(tokens[: len(expanded)]) != list(expanded):
            raise ValueError(
                "the prompt of its images, audio or video has other tokens than in the server: give server and engines "
                "the same model and version of vLLM, and leave out engine arguments that change them, such as "
                "mm_processor_kwargs"
            )
        self._remember(items, made["mm_hashes"])
        return {**made, "prompt_token_ids": list(tokens)}

    def _remember(self, items: Sequence[Item], hashes: dict[str, Sequence[str]]) -> None:
        left = {modality: iter(names) for modality, names in hashes.items()}
        for kind, digest, _ in items:
            name = next(left.get(kind.partition("/")[0], iter(())), None)
            if name is not None:
                self.names[name] = digest
                self.names.move_to_end(name)
        while len(self.names) > MAX_NAMES:
            self.names.popitem(last=False)
