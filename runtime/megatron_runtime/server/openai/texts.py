"""POST /v1/classify and /v1/pooling: requests with texts for pooling models."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, PrivateAttr, StrictBool, StrictInt, StrictStr, field_validator
from starlette.requests import Request
from starlette.responses import Response

from megatron_runtime.protocol import strict_json as json
from megatron_runtime.requests.rules import MAX_INT32
from megatron_runtime.requests.sampling_params import POOLING_TASKS
from megatron_runtime.server.errors import ApiError, invalid_value
from megatron_runtime.server.json_text import to_json
from megatron_runtime.server.openai.bodies import Lease
from megatron_runtime.server.openai.fields import CLASSIFY_POLICY, POOLING_POLICY, sampled, served, within
from megatron_runtime.server.openai.pooling import PoolingPrompt, PoolingRun, Vector, chosen, offered
from megatron_runtime.server.openai.schema import MAX_PROMPTS, CompletionRequest, ModelRequest, PromptIds
from megatron_runtime.server.openai.service import Service


class TextsRequest(ModelRequest):
    """The common fields of classify, pooling and embedding requests."""

    own_names: ClassVar[Mapping[str, str]] = {"prompt": "input"}
    token_field = "input"

    input: (
        str
        | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
        | PromptIds
        | Annotated[list[PromptIds], Field(max_length=MAX_PROMPTS, fail_fast=True)]
    ) = Field(description="A text, a list of token ids, or a list of either. Each has a result, in this order.")
    add_special_tokens: StrictBool | None = served(
        "Put what the model expects before a text, such as its begin-of-sequence token; `true` if absent."
    )
    truncate_prompt_tokens: Annotated[StrictInt, Field(ge=-1, le=MAX_INT32)] | None = served(
        "Keep this many tokens of each text. -1 keeps as many as the model takes."
    )
    truncation_side: Literal["left", "right"] | None = served(
        "The side that `truncate_prompt_tokens` removes; `right` if absent."
    )
    priority: Annotated[StrictInt, within("priority")] | None = sampled("priority")
    cache_salt: Annotated[StrictStr, Field(min_length=1, max_length=1024)] | None = served(
        "Cached prefixes are shared only among requests of one salt, and of one API key."
    )

    _completion: CompletionRequest | None = PrivateAttr(None)

    @field_validator("input", mode="before")
    @classmethod
    def _are_not_too_many(cls, value: Any) -> Any:
        if isinstance(value, list) and len(value) > MAX_PROMPTS and not isinstance(value[0], int):
            raise ValueError(f"it has {len(value)} texts, at most {MAX_PROMPTS} are allowed: send several requests")
        return value

    @property
    def completion(self) -> CompletionRequest:
        """Return the completion request whose prompts are the texts of this request. Call prepared() first."""
        assert self._completion is not None
        return self._completion

    def prepared(self) -> Self:
        """Move the input to a completion request, and return `self`.

        Raises ApiError 400 if the input contains no text.
        """
        super().prepared()
        try:
            self._completion = CompletionRequest(
                model=self.model,
                prompt=self.input,  # type: ignore[arg-type]
                temperature=0,
                add_special_tokens=self.add_special_tokens,
                truncate_prompt_tokens=self.truncate_prompt_tokens,
                truncation_side=self.truncation_side or "right",
                priority=self.priority,
                cache_salt=self.cache_salt,
            )
        except ValueError as error:
            message = "Invalid value for input: give a text, token ids, or a list of texts or of lists of token ids."
            raise ApiError(400, message, param="input", code="invalid_value") from error
        self.input = ""
        return self

    def prompts(self, **options: Any) -> list[PoolingPrompt]:
        """Return one prompt per text. options: additional keys of the sampling parameter `pooling`."""
        given: Sequence[str | list[int]] = self.completion.prompt
        pooling = chosen(
            **options,
            add_special_tokens=self.add_special_tokens,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side,
        )
        return [
            PoolingPrompt(content=item, param="input" if len(given) == 1 else f"input[{place}]", pooling=pooling)
            for place, item in enumerate(given)
        ]


class ClassifyRequest(TextsRequest):
    """The request body of POST /v1/classify."""

    policy = CLASSIFY_POLICY

    use_activation: StrictBool | None = served("`false`: logits in place of probabilities. `true` if absent.")


class PoolingRequest(TextsRequest):
    """The request body of POST /v1/pooling."""

    policy = POOLING_POLICY

    task: Literal["embed", "classify", "token_embed", "token_classify"] | None = served(
        "What is computed: the task of the model, which it is if absent."
    )
    use_activation: StrictBool | None = served(
        "`false`: vectors that are not normalised, logits in place of probabilities. `true` if absent."
    )
    encoding_format: Literal["float", "base64", "bytes", "bytes_only"] | None = served(
        "`float`: lists of numbers. `base64`: a text with little-endian float32, by rows. `bytes`: the body of the "
        "answer has the same of all texts, and the header `metadata` is the rest as JSON, with `start`, `end` and "
        "`shape` of each. `bytes_only`: without the header. `float` if absent."
    )


async def classify(service: Service, request: Request) -> Response:
    """Answer with the classes of each text. Raises ApiError 404 if no engine can classify texts."""
    await offered(service, request, ("classify",))
    body = await service.read(request, ClassifyRequest)
    run = PoolingRun(service, request, body.model, body.priority, body.cache_salt)
    results = await run.collect(body.prompts(task="classify", use_activation=body.use_activation))
    data = [
        {"index": index, "label": run.labels[index], "probs": values.tolist(), "num_classes": len(values)}
        for index, values in enumerate(results)
    ]
    return service.answer(request, to_json({**run.base_fields("classify"), "data": data}))


async def pool(service: Service, request: Request) -> Response:
    """Answer with the model's result for each text. Raises ApiError 404 if no engine has a pooling model."""
    tasks = await offered(service, request, POOLING_TASKS)
    body = await service.read(request, PoolingRequest)
    task = body.task or tasks[0]
    if task not in tasks:
        raise invalid_value("task", f"{task!r} is not a task of the model: use {', '.join(tasks)}, or leave it out")
    run = PoolingRun(service, request, body.model, body.priority, body.cache_salt)
    lease, is_json = service.lease(request), body.encoding_format in (None, "float", "base64")
    shapes: dict[int, tuple[int, ...]] = {}

    async def encoded(place: int, values: Vector) -> bytes:
        """Return a result in the requested encoding, and add its bytes to the lease. place: index of the prompt."""
        shapes[place] = values.shape
        if is_json and body.encoding_format != "base64":
            return await _numbers(values, lease)
        content = values.tobytes()
        content = b'"%b"' % base64.b64encode(content) if is_json else content
        lease.add(len(content))
        return content

    prompts = body.prompts(task=task, use_activation=body.use_activation)
    results: list[bytes] = await run.collect(prompts, reduce=encoded)
    fields = run.base_fields("pooling")
    if is_json:
        items = (b'{"index":%d,"object":"pooling","data":%b}' % item for item in enumerate(results))
        return service.answer(request, b'%b,"data":[%b]}' % (to_json(fields)[:-1], b",".join(items)))
    answer = service.answer(request, b"".join(results), media_type="application/octet-stream")
    if body.encoding_format == "bytes":
        ends = [*accumulate(map(len, results))]
        shared = {"embed_dtype": "float32", "endianness": "native"}
        fields["data"] = [
            {"index": index, **shared, "start": end - len(content), "end": end, "shape": shapes[index]}
            for index, (content, end) in enumerate(zip(results, ends, strict=True))
        ]
        answer.headers["metadata"] = json.dumps(fields)
    return answer


async def _numbers(values: Vector, lease: Lease) -> bytes:
    """Return an array as JSON. Let other requests run between the rows of the array."""
    if values.ndim == 1:
        text = to_json(values.tolist())
        lease.add(len(text))
        return text
    rows = []
    for row in values:
        rows.append(await _numbers(row, lease))
        await asyncio.sleep(0)
    return b"[%b]" % b",".join(rows)
