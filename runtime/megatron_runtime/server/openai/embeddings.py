"""POST /v1/embeddings: the hidden state of a decoder after each text, with length 1."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import Field, PrivateAttr, StrictBool, StrictInt, StrictStr
from starlette.requests import Request
from starlette.responses import Response

from megatron_runtime.requests.rules import MAX_INT32
from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.json_text import to_json
from megatron_runtime.server.openai.answer import Piece
from megatron_runtime.server.openai.completions import tokenized_prompts
from megatron_runtime.server.openai.fields import EMBEDDINGS_POLICY, sampled, served, within
from megatron_runtime.server.openai.generation import generation_of
from megatron_runtime.server.openai.jobs import Options
from megatron_runtime.server.openai.schema import (
    MAX_PROMPTS,
    CompletionRequest,
    ModelRequest,
    PromptIds,
)
from megatron_runtime.server.openai.service import Service
from megatron_runtime.server.streaming import until_disconnect

_FIELD = "return_hidden_state"


class EmbeddingRequest(ModelRequest):
    """POST /v1/embeddings."""

    policy = EMBEDDINGS_POLICY
    own_names: ClassVar[Mapping[str, str]] = {"prompt": "input"}
    token_field = "input"

    input: (
        str
        | Annotated[list[str], Field(max_length=MAX_PROMPTS, fail_fast=True)]
        | PromptIds
        | Annotated[list[PromptIds], Field(max_length=MAX_PROMPTS, fail_fast=True)]
    ) = Field(description="A text, a list of token ids, or a list of either. Each has a vector, in this order.")
    encoding_format: Literal["float", "base64"] | None = served(
        "`float` or `base64`, which is little-endian float32; `float` if absent."
    )

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

    @property
    def completion(self) -> CompletionRequest:
        """Return the completion whose prompts are embedded, of a request that was prepared()."""
        assert self._completion is not None
        return self._completion

    def prepared(self) -> Self:
        """Return the request with its input in its completion alone. Raises ApiError 400 for input without a text."""
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


async def create_embedding(service: Service, request: Request) -> Response:
    """Answer with one vector for each text. Raises ApiError 501 if the engines return no hidden states."""
    body = await service.read(request, EmbeddingRequest)
    service.check_in_flight(tenant=request.state.tenant)
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
    is_text = body.encoding_format == "base64"
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(vector.tobytes()).decode() if is_text else vector.tolist(),
        }
        for index, vector in enumerate(vectors)
    ]
    tokens = generation.usage.prompt
    answer = {
        "object": "list",
        "data": data,
        "model": generation.adapter or service.settings.served_name,
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }
    return service.answer(request, to_json(answer))


def _vector(piece: Piece) -> Any:
    """Return float32 [D] of length 1. Raises ApiError 500 for a vector with a number that is not finite."""
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
    message = "POST /v1/embeddings is not offered: only native engines of this release return hidden states."
    return ApiError(501, message, code="not_implemented", is_final=True)
