"""An engine without a model: the native engine's thread and core on an EchoExecutor.

As a program it takes the options of `megatron engine` and its own, which inject faults.

An adapter changes the answers. If its source is a path, the engine checks that it exists; it fetches no repository.

With a task, the engine has a pooling model: it answers echo_pooled() after one step and generates no tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
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
from megatron_runtime.engine.engine_request import EngineRequest, RequestOutput
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.process.children import end_with_parent
from megatron_runtime.protocol.headers import ErrorCode
from megatron_runtime.protocol.media import Media, media_digest
from megatron_runtime.requests.sampling_params import POOLING_TASKS

PROGRAM = __file__
PAGE_SIZE = 16
TOKEN_BYTES = 4
MAX_CACHE_BYTES = 16 << 20
"""Four million tokens. The default size of a cache would hold hundreds of millions, and take seconds to allocate."""


def echo_prompt(prompt: list[int], media: Media) -> list[int]:
    """Return the prompt that an echo engine answers: a hash of each media item replaces the item's tokens."""
    prompt = list(prompt)
    for item in media.items:
        assert item.digest == media_digest(item.kind, item.data), "a file and its digest differ"
        prompt[item.offset : item.offset + item.length] = [
            int.from_bytes(item.digest[:2], "big") % 50_000
        ] * item.length
    return prompt


ECHO_LABELS = ("short", "long")
"""The classes of a text, which has 8 bytes or tokens at most, or more."""


def echo_pooled(pooling: dict[str, Any], content: str | Sequence[int]) -> np.ndarray:
    """Return the answer of an echo engine with a pooling model.

    Depending on the task, it is a vector of 8 numbers, such a vector per byte or token, classes, or a score of a pair.
    """
    values = list(content.encode() if isinstance(content, str) else content)
    if pooling["task"] == "classify" and "pair" not in pooling:
        is_long = len(values) > 8
        return np.array([not is_long, is_long], dtype=np.float32)
    if pooling["task"] == "classify":
        return np.array([1 / (1 + abs(len(values) - len(pooling["pair"].encode())))], dtype=np.float32)
    rows = [values] if pooling["task"] == "embed" else [[value] for value in values]
    vectors = np.array([[sum(row) * place % 31 + len(row) for place in range(1, 9)] for row in rows], dtype=np.float32)
    vectors = vectors[:, : pooling.get("dimensions")]
    if pooling.get("use_activation") is not False:
        vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors[0] if pooling["task"] == "embed" else vectors


class EchoBackend(NativeBackend):
    """Implements EngineBackend.

    ranks:    the ranks that acknowledge verbs; None: one rank that acknowledges every verb.
    lacks:    capabilities that the backend does not declare.
    takes_media: whether it accepts images, audio and video. It answers as if the prompt contained their digests.
    task:     task of a pooling model; None: the backend generates tokens.
    executor: options of EchoExecutor.
    """

    def __init__(
        self,
        settings: EngineSettings,
        *,
        ranks: Ranks | None = None,
        lacks: Iterable[Capability] = (),
        takes_media: bool = False,
        task: str | None = None,
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
        if task is not None:
            declared = frozenset({Capability.SUSPEND, Capability.TEXT, Capability[task.upper()]})
        self.info = replace(self.info, capabilities=declared, task=task)
        self._step_seconds = executor.get("step_seconds", 0.0)
        self._pooling: dict[int, asyncio.TimerHandle] = {}
        self.adapters: dict[str, str] = {}
        """Sources of the loaded adapters by name."""

    def submit(self, request: EngineRequest) -> None:
        if request.media is not None:
            prompt = echo_prompt(request.prompt_tokens.tolist(), request.media)
            request = replace(request, prompt_tokens=np.array(prompt, np.int32))
        if self.info.task is None:
            super().submit(request)
            return
        assert self._loop is not None
        answer = self._loop.call_later(self._step_seconds, self._pool, request)
        self._pooling[request.request_id] = answer

    def _pool(self, request: EngineRequest) -> None:
        """Answer the request now or, if the engine is paused, after it continues."""
        if not self._running:
            self.submit(request)
            return
        del self._pooling[request.request_id]
        pooling = request.sampling_params.pooling
        assert pooling is not None
        content = request.prompt_tokens.tolist() if request.text is None else request.text
        kept = pooling.get("truncate_prompt_tokens")
        content = content if kept is None else content[:kept]
        tokens, limit = len(content), self.info.max_sequence_length
        output = RequestOutput(request.request_id, [], tokens, finish_reason="stop")
        if tokens > limit:
            output.finish_reason, output.error_code = "error", ErrorCode.INVALID_REQUEST
            output.error = ValueError(f"This model's maximum context length is {limit} tokens: the prompt has {tokens}")
        else:
            output.pooled = echo_pooled(pooling, content)
            if pooling["task"] == "classify":
                output.label = ECHO_LABELS[int(output.pooled.argmax())]
        assert self._listener is not None
        self._listener.on_outputs([output])

    def abort(self, request_id: int) -> asyncio.Future[Any]:
        if (answer := self._pooling.pop(request_id, None)) is not None:
            answer.cancel()
        return super().abort(request_id)

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
@click.option("--echo-token-seconds", type=float, default=0.0, help="Additional duration for each token of it.")
@click.option("--echo-crash-token", type=int, help="First token of a prompt that ends the process by SIGSEGV.")
@click.option("--echo-crash-length", type=int, default=1, help="Tokens of its prompt and answer when it does so.")
@click.option("--echo-takes-media", is_flag=True, help="Take images, audio and video.")
@click.option("--echo-task", type=click.Choice(POOLING_TASKS), help="Of a pooling model.")
@click.option("--echo-lacks", type=click.Choice(Capability.__members__), multiple=True, help="A capability.")
def main(
    *,
    echo_step_seconds: float,
    echo_token_seconds: float,
    echo_crash_token: int | None,
    echo_crash_length: int,
    echo_lacks: tuple[str, ...],
    echo_takes_media: bool,
    echo_task: str | None,
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
        task=echo_task,
        step_seconds=echo_step_seconds,
        token_seconds=echo_token_seconds,
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
