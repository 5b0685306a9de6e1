"""POST /v1/embeddings: the vectors of a pooling model, or the hidden states of a generative model."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, StrictBool, StrictInt
from starlette.requests import Request
from starlette.responses import Response

from megatron_runtime.requests.capabilities import GENERATE
from megatron_runtime.requests.rules import MAX_INT32
from megatron_runtime.server.errors import ApiError, invalid_value
from megatron_runtime.server.json_text import to_json
from megatron_runtime.server.openai.answer import Piece
from megatron_runtime.server.openai.completions import tokenized_prompts
from megatron_runtime.server.openai.fields import EMBEDDINGS_POLICY, served
from megatron_runtime.server.openai.generation import generation_of
from megatron_runtime.server.openai.jobs import Options
from megatron_runtime.server.openai.pooling import PoolingRun
from megatron_runtime.server.openai.service import Service
from megatron_runtime.server.openai.texts import TextsRequest
from megatron_runtime.server.streaming import until_disconnect

_FIELD = "return_hidden_state"


class EmbeddingRequest(TextsRequest):
    """The request body of POST /v1/embeddings."""

    policy = EMBEDDINGS_POLICY

    dimensions: Annotated[StrictInt, Field(ge=1, le=MAX_INT32)] | None = served(
        "Size of the vectors, of a pooling model that was trained for several."
    )
    use_activation: StrictBool | None = served(
        "`false`: the vectors of a pooling model are not normalised. Absent: as the model has it."
    )
    encoding_format: Literal["float", "base64"] | None = served(
        "`float` or `base64`, which is little-endian float32; `float` if absent."
    )


async def create_embedding(service: Service, request: Request) -> Response:
    """Answer with one embedding vector per text. Raises ApiError 404 if the engines offer no embeddings."""
    body = await service.read(request, EmbeddingRequest)
    service.check_in_flight(tenant=request.state.tenant)
    tasks = await service.tasks()
    if "embed" in tasks:
        run = PoolingRun(service, request, body.model, body.priority, body.cache_salt)
        options = {"dimensions": body.dimensions, "use_activation": body.use_activation}
        vectors = await run.collect(body.prompts(task="embed", **options))
        return _answer(service, request, body, vectors, tokens=run.tokens, adapter=run.adapter)
    if GENERATE not in tasks:
        raise _not_offered()
    return await _of_decoder(service, request, body)


async def _of_decoder(service: Service, request: Request, body: EmbeddingRequest) -> Response:
    """Answer with one vector per text: the hidden state of a generative model after the last token of the text."""
    if body.dimensions is not None:
        raise invalid_value("dimensions", "the vectors have the hidden size of the model: leave it out")
    if body.use_activation is False:
        raise invalid_value("use_activation", "the vectors have length 1: leave it out or use true")
    completion = body.completion
    service.check_choices(len(completion.prompt), tenant=request.state.tenant)
    prompts = await tokenized_prompts(service, request, completion)
    options = Options(max_tokens=0, log_probs=None, hidden_state=True)
    generation = generation_of(service, request, completion, prompts, options)
    try:
        pieces = await until_disconnect(request.receive, generation.collect(), expired=service.expired)
    except ApiError as error:
        raise _not_offered() if error.param == _FIELD else error from error
    vectors = [_vector(piece) for piece in pieces]
    tokens, adapter = generation.usage.prompt, generation.adapter
    return _answer(service, request, body, vectors, tokens=tokens, adapter=adapter)


def _answer(
    service: Service, request: Request, body: EmbeddingRequest, vectors: Sequence[Any], *, tokens: int, adapter: str
) -> Response:
    """Return the response with one embedding per text.

    vectors: float32 [D] for each text.
    tokens:  total number of tokens in all texts.
    adapter: adapter that computed the vectors; empty for the base model.
    """
    is_text = body.encoding_format == "base64"
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(vector.tobytes()).decode() if is_text else vector.tolist(),
        }
        for index, vector in enumerate(vectors)
    ]
    answer = {
        "object": "list",
        "data": data,
        "model": adapter or service.settings.served_name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return service.answer(request, to_json(answer))


def _vector(piece: Piece) -> Any:
    """Return the hidden state as float32 [D], scaled to length 1. Raises ApiError 500 if an element is not finite."""
    if not piece.hidden_state:
        raise _not_offered()
    vector = np.frombuffer(piece.hidden_state, dtype="<f4")
    if not np.isfinite(vector).all():
        message = (
            f"The hidden state of input {piece.index} has numbers that are not finite: change the text or the model."
        )
        raise ApiError(500, message, code="internal_error", is_final=True)
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return vector / np.float32(length) if length else vector


def _not_offered() -> ApiError:
    message = (
        "POST /v1/embeddings is not offered: vLLM engines with an embedding model return vectors, and of models that "
        "generate, native engines return hidden states."
    )
    return ApiError(404, message, code="not_offered")
