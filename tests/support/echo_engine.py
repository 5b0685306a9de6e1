"""An engine without a model: the native engine's thread and core on an EchoExecutor.

As a program it takes the options of `megatron engine` and its own, which inject faults.

An adapter changes the answers. Of its source only a path is checked, a repository is not fetched.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import click
import numpy as np
from echo_executor import EchoExecutor

from megatron_runtime.backends.native.backend import NativeBackend, Ranks
from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.backends.text import ModelText
from megatron_runtime.checkpoints.adapters import adapter_directory
from megatron_runtime.cli.containers import engine
from megatron_runtime.engine import worker
from megatron_runtime.engine.backend import Capability, RankResults
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.process.children import end_with_parent
from megatron_runtime.protocol.media import Media, media_digest

PROGRAM = __file__
PAGE_SIZE = 16
TOKEN_BYTES = 4
MAX_CACHE_BYTES = 16 << 20
"""Four million tokens. The default size of a cache would hold hundreds of millions, and take seconds to allocate."""


def echo_prompt(prompt: list[int], media: Media) -> list[int]:
    """Return the prompt to which an echo engine answers: the tokens of each item become a number of its file."""
    prompt = list(prompt)
    for item in media.items:
        assert item.digest == media_digest(item.kind, item.data), "a file and its digest differ"
        prompt[item.offset : item.offset + item.length] = [
            int.from_bytes(item.digest[:2], "big") % 50_000
        ] * item.length
    return prompt


class EchoBackend(NativeBackend):
    """Implements EngineBackend.

    ranks:    None: one that acknowledges every verb.
    lacks:    capabilities that it does not declare.
    takes_media: whether it takes images, audio and video. It answers as if the digest of each were in the prompt.
    executor: options of EchoExecutor.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        ranks: Ranks | None = None,
        lacks: Iterable[Capability] = (),
        takes_media: bool = False,
        **executor: Any,
    ) -> None:
        memory = min(settings.kv_cache_memory or MAX_CACHE_BYTES, MAX_CACHE_BYTES)
        num_pages = 1 + max(1, memory // (PAGE_SIZE * TOKEN_BYTES))
        longest = settings.max_sequence_length or 4096
        super().__init__(
            EngineCore(
                EchoExecutor(max_sequence_length=longest, page_size=PAGE_SIZE, num_pages=num_pages, **executor),
                settings.inference_config,
            ),
            ModelText.of_model(settings.model),
            ranks=ranks,
            name="echo",
        )
        added = {Capability.ADAPTERS, *([Capability.MEDIA] if takes_media else [])}
        declared = (self.info.capabilities | added) - {Capability.HIDDEN_STATES, *lacks}
        self.info = replace(self.info, capabilities=declared)
        self.adapters: dict[str, str] = {}
        """Sources of the loaded adapters by name."""

    def submit(self, request: EngineRequest) -> None:
        if request.media is not None:
            prompt = echo_prompt(request.prompt_tokens.tolist(), request.media)
            request = replace(request, prompt_tokens=np.array(prompt, np.int32))
        super().submit(request)

    async def load_adapter(self, name: str, source: str) -> RankResults:
        if source.startswith("/"):
            await asyncio.to_thread(adapter_directory, source)
        self.adapters[name] = source
        return RankResults(self.ranks.count)

    async def unload_adapter(self, name: str) -> RankResults:
        del self.adapters[name]
        return RankResults(self.ranks.count)


@click.command(params=[*engine.params])
@click.option("--echo-step-seconds", type=float, default=0.0, envvar="ECHO_STEP_SECONDS", help="Duration of a step.")
@click.option("--echo-crash-token", type=int, help="First token of a prompt that ends the process by SIGSEGV.")
@click.option("--echo-crash-length", type=int, default=1, help="Tokens of its prompt and answer when it does so.")
@click.option("--echo-takes-media", is_flag=True, help="Take images, audio and video.")
@click.option("--echo-lacks", type=click.Choice(Capability.__members__), multiple=True, help="A capability.")
def main(
    *,
    echo_step_seconds: float,
    echo_crash_token: int | None,
    echo_crash_length: int,
    echo_lacks: tuple[str, ...],
    echo_takes_media: bool,
    is_check: bool,
    **options: Any,
) -> None:
    """Run an echo engine until SIGTERM."""
    for name in ("tensor_parallel", "pipeline_parallel", "expert_parallel", "data_parallel", "device"):
        del options[name]
    settings = EngineSettings(**options)
    make_backend = partial(
        EchoBackend,
        lacks=[Capability[name] for name in echo_lacks],
        takes_media=echo_takes_media,
        step_seconds=echo_step_seconds,
        crash_token=echo_crash_token,
        crash_length=echo_crash_length,
    )
    if is_check:
        make_backend(settings)
    else:
        worker.run(settings, make_backend)


if __name__ == "__main__":
    end_with_parent()
    main()
