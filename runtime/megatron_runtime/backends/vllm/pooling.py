"""Requests of pooling models (embeddings, classification, scores of text pairs), rendered as in vLLM's own server.

vLLM's own code tokenizes the texts, so the limits, special tokens, templates and token types of pairs match the model.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from vllm import PoolingParams
from vllm.config import VllmConfig
from vllm.entrypoints.pooling.base.io_processor import PoolingIOProcessor
from vllm.entrypoints.pooling.embed.protocol import EmbeddingCompletionRequest
from vllm.entrypoints.pooling.scoring.io_processor import CrossEncoderIOProcessor
from vllm.entrypoints.pooling.scoring.protocol import ScoreTextRequest
from vllm.entrypoints.pooling.scoring.utils import truncate_text_to_tokens
from vllm.entrypoints.pooling.typing import PoolingServeContext
from vllm.exceptions import VLLMClientError
from vllm.lora.request import LoRARequest
from vllm.outputs import PoolingRequestOutput
from vllm.renderers.chat_utils import ChatTemplateConfig
from vllm.v1.engine.async_llm import AsyncLLM

from megatron_runtime.requests.sampling_params import POOLING_TASKS

TASKS = {"bi-encoder": "embed", "cross-encoder": "classify", "late-interaction": "token_embed"}
"""Map from vLLM's score type of a model to the model's task."""
READS_ALL_AT_ONCE = "JinaForRanking"
"""Architecture of a model that reads the query and all documents in one prompt."""
_RENDERED = (
    *("add_special_tokens", "truncate_prompt_tokens", "truncation_side", "max_tokens_per_query", "max_tokens_per_doc"),
)


class PoolingRejectedError(ValueError):
    """Raised if vLLM rejects a request.

    field: the key of `pooling`, or vLLM's name of the invalid argument; empty if unknown.
    """

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True, slots=True)
class PoolingSubmission:
    """A pooling request as the engine sends it to vLLM's process.

    pooling:    SamplingParams.pooling.
    text:       the prompt as text; None if `prompt` has the prompt's tokens.
    adapter:    key of a loaded LoRA adapter; empty for the base model.
    cache_salt: salt of the prefix cache; None if the request has no salt.
    """

    request_id: int
    pooling: dict[str, Any]
    text: str | None
    prompt: list[int]
    adapter: str
    priority: int
    cache_salt: str | None


def task_of(config: VllmConfig) -> str:
    """Return the task of a pooling model. Raises ValueError for a task that this release does not offer."""
    model = config.model_config
    of_tokens = any("ForTokenClassification" in architecture for architecture in model.architectures)
    by_files = "token_classify" if of_tokens else TASKS[model.score_type]
    task = (None if model.pooler_config is None else model.pooler_config.task) or by_files
    if task not in POOLING_TASKS or model.architecture == READS_ALL_AT_ONCE:
        raise ValueError(
            f"the pooling model {model.architecture} with the task {task} is not offered: use a model that embeds, "
            "classifies or scores"
        )
    return task


class Pooling:
    """The component that renders and runs the requests of one loaded pooling model.

    Raises ValueError if the loaded model's task differs from the task that the configuration names.
    """

    def __init__(self, llm: AsyncLLM, config: VllmConfig, supported: tuple[Any, ...]) -> None:
        task, loaded = task_of(config), config.model_config.get_pooling_task(supported)
        if task != loaded:
            raise ValueError(
                f"the model has the pooling task {loaded}, not {task}: set the engine argument pooler_config of vLLM "
                f'to {{"task": "{loaded}"}}'
            )

        def reader(kind: type[PoolingIOProcessor]) -> PoolingIOProcessor:
            return kind(vllm_config=config, renderer=llm.renderer, chat_template_config=ChatTemplateConfig())

        self._llm = llm
        model = config.model_config.hf_config
        self._labels: dict[int, str] = getattr(model, "id2label", None) or {}
        self._texts = reader(PoolingIOProcessor)
        scores_pairs = task == "classify" and getattr(model, "num_labels", 0) == 1
        self._pairs = reader(CrossEncoderIOProcessor) if scores_pairs else None

    async def run(self, request: PoolingSubmission, lora: LoRARequest | None) -> list[Any]:
        """Run a request, and return the fields of the message to the engine.

        The fields are the request id, "pooled", the shape of the result, its float32 values, the number of prompt
        tokens, the number of cached prompt tokens, and, for a classifier, the name of the most likely class.

        Raises PoolingRejectedError, or RuntimeError if vLLM cannot compute the result.
        """
        try:
            output = await self._run(request, lora)
        except VLLMClientError as error:
            message, field = str(error.args[0]), getattr(error, "parameter", None) or ""
            if not field and "dimensions" in request.pooling and "dimensions" in message:
                field = "dimensions"
            raise PoolingRejectedError(message, field) from error
        if (failure := getattr(output, "error", None)) is not None:
            raise RuntimeError(f"vLLM could not compute it: {failure}")
        values = output.outputs.data.float().cpu().numpy().astype("<f4")
        tokens, cached = len(output.prompt_token_ids), output.num_cached_tokens or 0
        label = self._labels.get(int(values.argmax())) if request.pooling["task"] == "classify" else None
        return [request.request_id, "pooled", list(values.shape), values.tobytes(), tokens, cached, label]

    async def _run(self, request: PoolingSubmission, lora: LoRARequest | None) -> PoolingRequestOutput:
        pooling = request.pooling
        fields = {name: pooling[name] for name in _RENDERED if name in pooling}
        body: EmbeddingCompletionRequest | ScoreTextRequest
        rendering, text = self._texts, request.text
        if text is None and not request.prompt:
            raise PoolingRejectedError("the prompt is empty: give at least one token")
        if "pair" in pooling:
            if text is None or self._pairs is None:
                problem = "a pair is two texts, for a classifier with num_labels 1: give texts, or no pair"
                raise PoolingRejectedError(problem, "pair")
            rendering = self._pairs
            body = ScoreTextRequest(text_1=text, text_2=pooling["pair"], **fields)
        else:
            longest = fields.pop("max_tokens_per_query", None) or fields.pop("max_tokens_per_doc", None)
            if text is not None and longest is not None:
                text = await asyncio.to_thread(truncate_text_to_tokens, text, self._llm.get_tokenizer(), longest)
            body = EmbeddingCompletionRequest(input=request.prompt if text is None else text, **fields)
        context = PoolingServeContext(
            request=body,
            model_name="",
            request_id="",
            pooling_params=PoolingParams(
                task=pooling["task"],
                dimensions=pooling.get("dimensions"),
                use_activation=pooling.get("use_activation"),
            ),
            lora_request=lora,
            priorities=request.priority,
            prompt_extras={"cache_salt": request.cache_salt} if request.cache_salt else None,
        )
        [prompt] = rendering.get_request_factory_online(context)
        rendered = await rendering.render_async(prompt)
        outputs = self._llm.encode(
            rendered["prompts"],
            rendered["params"],
            str(request.request_id),
            lora_request=lora,
            priority=request.priority,
        )
        async for output in outputs:
            last = output
        return last
