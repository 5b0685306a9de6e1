"""Images, audio and video of requests. vLLM's process reads them in the same way as vLLM's own server.

This module computes the features from the files that the client has sent. Our processes exchange only files, not
features. The server expands the prompt with the same classes of vLLM (server/formats/vllm_worker.py), and both
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
"""Maximum number of media whose names in vLLM's cache events are stored.

The least recently used name is removed first.
"""

Item = tuple[str, bytes, bytes]
"""Kind (see protocol.media.KINDS), digest and content of a media file."""


def takes_media(config: ModelConfig) -> bool:
    """Return whether the model accepts images, audio or video, and this version of vLLM has the required interface."""
    return bool(getattr(config, "supports_multimodal_inputs", False)) and _tracker() is not None


def _tracker() -> Any:
    """Return vLLM's class that loads the media of a conversation, or None if vLLM is older than 0.32."""
    try:
        from vllm.renderers.chat_utils import AsyncMultiModalItemTracker
    except ImportError:
        return None
    return AsyncMultiModalItemTracker


class MediaReader:
    """A converter of prompts with media to inputs for vLLM's engine.

    renderer: the renderer of AsyncLLM.
    names:    digests of the media, by vLLM's identifiers for them. vLLM's cache events contain these identifiers.
    """

    def __init__(self, renderer: Any) -> None:
        self._renderer = renderer
        self._tracker = _tracker()
        self.names: OrderedDict[str, bytes] = OrderedDict()

    async def engine_input(
        self, template: Sequence[int], items: Sequence[Item], tokens: Sequence[int]
    ) -> dict[str, Any]:
        """Return vLLM's input for a request whose prompt contains the media `items`.

        template: the prompt, with one placeholder for each item.
        tokens:   the prompt, in which vLLM has expanded the placeholders, and the tokens of the answer so far.

        Raises ValueError if the model does not support the media, or if `tokens` does not start with the expanded
        template.
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
        # Skip the media cache. This process and the engine core would have to keep it in sync, but a request can be
        # aborted between their updates.
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
