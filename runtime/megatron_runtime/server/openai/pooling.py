"""Runs requests on pooling models, and serves POST /v1/score and /v1/rerank.

The engine renders and tokenizes the texts, because the way in which a pair of texts becomes a prompt depends on the
model.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from pydantic import BeforeValidator, Field, StrictBool, StrictInt, StrictStr
from starlette.requests import Request
from starlette.responses import Response

from megatron_runtime.process import tracing
from megatron_runtime.requests.request import unpack_value
from megatron_runtime.requests.rules import MAX_INT32
from megatron_runtime.requests.sampling_params import InvalidSamplingParamsError, SamplingParams
from megatron_runtime.server.auth import tenant_salt
from megatron_runtime.server.errors import CONTEXT_LENGTH_PHRASE, ApiError, from_reply_error, invalid_value
from megatron_runtime.server.json_text import to_json
from megatron_runtime.server.metrics import RequestObserver
from megatron_runtime.server.openai.fields import SCORING_POLICY, sampled, served, within
from megatron_runtime.server.openai.generation import rejections_as_errors, start_all
from megatron_runtime.server.openai.jobs import MAX_SENT_BYTES
from megatron_runtime.server.openai.schema import ModelRequest
from megatron_runtime.server.openai.service import BYTES_PER_TOKEN, Service
from megatron_runtime.server.rate_limits import Reservation
from megatron_runtime.server.streaming import cancel, until_disconnect

MAX_DOCUMENTS = 1000
"""Maximum number of documents in one score or rerank request."""
TOKEN_BYTES = 4
_SCORING_TASKS = ("classify", "embed", "token_embed")
"""Tasks of models that can score pairs of texts: by classifying the pair, by the angle between the vectors of the two
texts, or by the angles between token vectors.
"""
_FIELDS = frozenset(
    {
        *("dimensions", "use_activation", "truncate_prompt_tokens", "truncation_side"),
        *("max_tokens_per_query", "max_tokens_per_doc"),
    }
)
"""Fields that have the same names in an engine's error and in the request."""
_TINY = np.float32(1e-8)
"""Minimum length of a vector that has a direction."""

Vector = npt.NDArray[np.float32]
Reduce = Callable[[int, Vector], Awaitable[Any]]


def _checked_texts(value: Any) -> Any:
    if isinstance(value, str) or value is None:
        return value
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise ValueError("expected a text, or a list of texts")
    if not 1 <= len(value) <= MAX_DOCUMENTS:
        remedy = "give at least one" if not value else f"at most {MAX_DOCUMENTS} are allowed: send several requests"
        raise ValueError(f"it has {len(value)} texts, {remedy}")
    return value


Texts = Annotated[str | list[str], BeforeValidator(_checked_texts)]
TokenLimit = Annotated[StrictInt, Field(ge=0, le=MAX_INT32)]


class ScoringRequest(ModelRequest):
    """The common fields of score and rerank requests."""

    policy = SCORING_POLICY

    use_activation: StrictBool | None = served(
        "`false`: the score of a model that reads pairs is the logit, without the sigmoid. `true` if absent."
    )
    truncate_prompt_tokens: Annotated[StrictInt, Field(ge=-1, le=MAX_INT32)] | None = served(
        "Keep this many tokens of each prompt, which for a model that reads pairs has both texts. -1 keeps as many as "
        "the model takes."
    )
    truncation_side: Literal["left", "right"] | None = served(
        "The side that `truncate_prompt_tokens` removes; `right` if absent."
    )
    max_tokens_per_query: TokenLimit | None = served("Keep this many tokens of each query. 0 keeps all.")
    max_tokens_per_doc: TokenLimit | None = served("Keep this many tokens of each document. 0 keeps all.")
    priority: Annotated[StrictInt, within("priority")] | None = sampled("priority")
    cache_salt: Annotated[StrictStr, Field(min_length=1, max_length=1024)] | None = served(
        "Cached prefixes are shared only among requests of one salt, and of one API key."
    )

    def pooling(self, task: str, *, is_query: bool | None = None, pair: str | None = None) -> dict[str, Any]:
        """Return the sampling parameter `pooling`.

        is_query: whether a single text is the query and not a document; None for a pair of texts.
        pair:     the second text of a pair; None for a single text.
        """
        limits = {"max_tokens_per_query": self.max_tokens_per_query, "max_tokens_per_doc": self.max_tokens_per_doc}
        if is_query is not None:
            limits.pop("max_tokens_per_doc" if is_query else "max_tokens_per_query")
        return chosen(
            task=task,
            pair=pair,
            use_activation=self.use_activation,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
            truncation_side=self.truncation_side,
            **{name: limit or None for name, limit in limits.items()},
        )


def chosen(**fields: Any) -> dict[str, Any]:
    """Return the fields whose values are not None."""
    return {name: value for name, value in fields.items() if value is not None}


class Side(NamedTuple):
    """One of the two text fields in POST /v1/score. texts: the field's texts; None if the request lacks the field."""

    name: str
    texts: str | list[str] | None


class ScoreRequest(ScoringRequest):
    """The request body of POST /v1/score.

    Instead of `queries` and `documents`, the two fields can be called `queries` and `items`, `data_1` and `data_2`, or
    `text_1` and `text_2`.
    """

    queries: Texts | None = served("A text that is compared with each document, or one text for each document.")
    documents: Texts | None = served("A text, or a list of texts. Each has a score, in this order.")
    items: Texts | None = served("Another name of `documents`.")
    data_1: Texts | None = served("Another name of `queries`.")
    data_2: Texts | None = served("Another name of `documents`.")
    text_1: Texts | None = served("Another name of `queries`.")
    text_2: Texts | None = served("Another name of `documents`.")

    def pairs(self) -> Iterator[tuple[Side, Side]]:
        """Yield the pairs of text fields that belong together, including fields that the request lacks."""
        queries = Side("queries", self.queries)
        yield queries, Side("documents", self.documents)
        yield queries, Side("items", self.items)
        yield Side("data_1", self.data_1), Side("data_2", self.data_2)
        yield Side("text_1", self.text_1), Side("text_2", self.text_2)

    @property
    def sides(self) -> tuple[Side, Side]:
        """Return the two text fields of the request. Call prepared() first."""
        return next(pair for pair in self.pairs() if all(side.texts is not None for side in pair))

    def prepared(self) -> Self:
        """Return `self` after validation.

        Raises ApiError 400 unless the request has exactly one of the field pairs in pairs(), such as `queries` and
        `documents`, and the numbers of texts in both fields match.
        """
        super().prepared()
        given = {side.name for pair in self.pairs() for side in pair if side.texts is not None}
        names = [tuple(side.name for side in pair) for pair in self.pairs()]
        if not any(given == set(pair) for pair in names):
            lacking = next((second for first, second in names if given == {first}), "queries")
            listed_names = ", or ".join(" and ".join(pair) for pair in names)
            problem = f"give {listed_names}; the request has {', '.join(sorted(given)) or 'none of them'}"
            raise invalid_value(lacking, problem)
        first, second = self.sides
        queries, documents = listed(first.texts), listed(second.texts)
        if len(queries) not in (1, len(documents)):
            problem = f"it has {len(queries)} texts, and {second.name} has {len(documents)}: give one text, or as many"
            raise invalid_value(first.name, problem)
        return self


class RerankRequest(ScoringRequest):
    """The request body of POST /v1/rerank and /v2/rerank."""

    query: StrictStr = Field(description="The text that is compared with each document.")
    documents: Texts = Field(description="A list of texts. The results name them by their places in it.")
    top_n: Annotated[StrictInt, Field(ge=0, le=MAX_INT32)] | None = served(
        "Return this many of the most relevant documents. 0 returns all, as does leaving it out."
    )


def listed(texts: str | list[str] | None) -> list[str]:
    return [texts] if isinstance(texts, str) else texts or []


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingPrompt:
    """One prompt of a pooling model.

    content: text, which the engine tokenizes, or token ids.
    param:   the request field that contains the prompt, for errors.
    pooling: value of the sampling parameter `pooling`.
    """

    content: str | list[int]
    param: str
    pooling: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        """Upper bound for the number of bytes that the server sends to the engine for this prompt."""
        if not isinstance(self.content, str):
            return TOKEN_BYTES * len(self.content)
        return sum(
            len(text) if text.isascii() else 4 * len(text) for text in (self.content, self.pooling.get("pair", ""))
        )

    @property
    def estimated_tokens(self) -> int:
        """Number of tokens to reserve from the limit of the API key. The engine later reports the exact number."""
        if not isinstance(self.content, str):
            return len(self.content)
        return 1 + (len(self.content) + len(self.pooling.get("pair", ""))) // BYTES_PER_TOKEN


@dataclass(slots=True)
class PoolingRun:
    """The prompts of one request to a pooling model.

    model, priority, cache_salt: fields of the request.
    tokens: number of tokens in all computed prompts.
    labels: name of the class that the model predicts, by prompt index; None: the class has no name.
    """

    service: Service
    request: Request
    model: str | None
    priority: int | None
    cache_salt: str | None
    tokens: int = 0
    adapter: str = ""
    labels: dict[int, str | None] = field(default_factory=dict)
    _reservation: Reservation | None = None
    """Reservation from the token limit of the API key; None: the key has no token limit."""

    async def collect(self, prompts: Sequence[PoolingPrompt], *, reduce: Reduce | None = None) -> list[Any]:
        """Return the model's result for each prompt. If the client disconnects, the open prompts are aborted.

        reduce: awaited with the index of a prompt and its result array. The return value replaces the array, so that
                its memory is released.

        Raises ApiError 400 if the model does not accept a prompt or the prompts have too many bytes. Raises 404 if no
        engine has a pooling model. Raises 429 if too many requests are open, the server holds too many bytes, or the
        API key has too few tokens left in this minute.
        """
        service, state = self.service, self.request.state
        service.check_open(len(prompts), tenant=state.tenant)
        service.check_priority(self.priority)
        size = sum(prompt.num_bytes for prompt in prompts)
        if size > MAX_SENT_BYTES:
            message = f"The prompts take {size} bytes, at most {MAX_SENT_BYTES} are allowed: send several requests."
            raise ApiError(400, message, param=prompts[-1].param.partition("[")[0], code="request_too_large")
        service.lease(self.request).add(size)
        self.adapter = service.adapter_of(self.model)
        span = getattr(state, "span", None)
        if span is not None:
            name = self.adapter or service.settings.served_name
            span.set({tracing.REQUEST_N: len(prompts), tracing.RESPONSE_MODEL: name})
        work = self._collect(prompts, reduce)
        return await until_disconnect(self.request.receive, work, expired=service.expired)

    async def _collect(self, prompts: Sequence[PoolingPrompt], reduce: Reduce | None) -> list[Any]:
        service, key = self.service, self.request.state.key
        await service.until_connected()
        tasks: list[asyncio.Task[Any]] = []
        reserved = [prompt.estimated_tokens for prompt in prompts]
        self._reservation = await service.reserve(key, prompt=0, choices=[*reserved])
        self.request.state.body_bytes = 0  # the prompts are charged now, so later errors must not charge the body
        try:
            await start_all(tasks, (self._run(place, prompt, reduce) for place, prompt in enumerate(prompts)))
            return list(await asyncio.gather(*tasks))
        finally:
            await cancel(*tasks)
            if self._reservation is not None:
                self._reservation.settle()

    async def _run(self, place: int, prompt: PoolingPrompt, reduce: Reduce | None) -> Any:
        service, state = self.service, self.request.state
        observer = RequestObserver(service.metrics, prompt_tokens=0, tenant=state.tenant, streams=False)
        with observer, _named(prompt):
            reply = await service.client.add_request(
                prompt.content,
                self._params(prompt),
                tenant=state.tenant,
                adapter=self.adapter,
                request_id=state.request_id,
                traceparent="" if getattr(state, "span", None) is None else state.span.traceparent,
            )
            if reply.get("status") == "FAILED" or reply.get("error"):
                raise from_reply_error(reply.get("error"), field_names={})
            tokens = observer.prompt_tokens = int(reply.get("prompt_length") or 0)
            self.tokens += tokens
            if self._reservation is not None:
                self._reservation.add(tokens)
            service.count_answer(state.key, prompt=tokens, generated=0)
            observer.finished("stop", reply)
        vector: Any = unpack_value(reply.get("pooled"))
        if not isinstance(vector, np.ndarray):
            raise ApiError(500, "The engine's answer has no vector: upgrade the engines.", code="internal_error")
        if not np.isfinite(vector).all():
            message = (
                f"The model computed numbers that are not finite for {prompt.param}: change the text or the model."
            )
            raise ApiError(500, message, code="not_finite", is_final=True)
        self.labels[place] = reply.get("label")
        lease = service.lease(self.request)
        lease.add(vector.nbytes)
        if reduce is None:
            return vector
        reduced = await reduce(place, vector)
        lease.add(-vector.nbytes)
        return reduced

    def base_fields(self, kind: str) -> dict[str, Any]:
        """Return all fields of an answer except its data. Call this after collect(). kind: prefix of the `id`."""
        return {
            "id": f"{kind}-{uuid.uuid4().hex}",
            "object": "list",
            "created": int(time.time()),
            "model": self.adapter or self.service.settings.served_name,
            "usage": {"prompt_tokens": self.tokens, "total_tokens": self.tokens, "completion_tokens": 0},
        }

    def _params(self, prompt: PoolingPrompt) -> SamplingParams:
        tenant = "" if self.service.settings.share_prefix_cache else self.request.state.tenant
        try:
            return SamplingParams(
                pooling=prompt.pooling,
                num_tokens_to_generate=0,
                priority=self.priority or 0,
                cache_salt=tenant_salt(tenant, self.cache_salt),
            )
        except InvalidSamplingParamsError as error:
            raise ApiError(400, f"{error}.", param=error.field, code="invalid_value") from error


@contextmanager
def _named(prompt: PoolingPrompt) -> Iterator[None]:
    """Return a context manager that converts an engine's rejection of `prompt` to ApiError.

    The error names the request field of the prompt. If no engine has a pooling model, the status is 404.
    """
    try:
        with rejections_as_errors({}):
            yield
    except ApiError as error:
        if error.code == "unsupported_value" or error.param == "pair":  # for example, a classifier with several labels
            raise not_offered() from error
        if error.status != 400:
            raise
        param = error.param if error.param in _FIELDS else prompt.param
        code = "context_length_exceeded" if CONTEXT_LENGTH_PHRASE in error.message else "invalid_value"
        raise replace(error, param=param, code=code) from error


def not_offered() -> ApiError:
    """Return the 404 error for a route that needs a kind of model that no engine has."""
    message = (
        "This route is not offered: no engine has a pooling model for it. Serve one with vLLM engines (--backend vllm, "
        "spec.engine.backend: VLLM)."
    )
    return ApiError(404, message, code="not_offered")


async def create_score(service: Service, request: Request) -> Response:
    """Answer with a score for each pair of texts. Raises ApiError 404 if no engine can score pairs."""
    task, *_ = await offered(service, request, _SCORING_TASKS)
    body = await service.read(request, ScoreRequest)
    first, second = body.sides
    params = first.name, second.name
    run = PoolingRun(service, request, body.model, body.priority, body.cache_salt)
    scores = await _scores(run, task, body, listed(first.texts), listed(second.texts), params=params)
    data = [{"index": index, "object": "score", "score": score} for index, score in enumerate(scores)]
    return service.answer(request, to_json({**run.base_fields("score"), "data": data}))


async def rerank(service: Service, request: Request) -> Response:
    """Answer with the documents in descending order of score. Raises ApiError 404 if no engine can score pairs."""
    task, *_ = await offered(service, request, _SCORING_TASKS)
    body = await service.read(request, RerankRequest)
    documents = listed(body.documents)
    run = PoolingRun(service, request, body.model, body.priority, body.cache_salt)
    scores = await _scores(run, task, body, [body.query], documents, params=("query", "documents"))
    results = [
        {"index": index, "document": {"text": documents[index], "multi_modal": None}, "relevance_score": score}
        for index, score in sorted(enumerate(scores), key=lambda item: -item[1])
    ]
    answer = {
        "id": f"rerank-{uuid.uuid4().hex}",
        "model": run.adapter or service.settings.served_name,
        "usage": {"prompt_tokens": run.tokens, "total_tokens": run.tokens},
        "results": results[: body.top_n or None],
    }
    return service.answer(request, to_json(answer))


async def offered(service: Service, request: Request, tasks: Sequence[str]) -> list[str]:
    """Return the tasks in `tasks` that the engines offer.

    Raises ApiError 404 if the engines offer none of the tasks.
    """
    service.check_in_flight(tenant=request.state.tenant)
    served_tasks = await service.tasks()
    names = [name for name in tasks if name in served_tasks]
    if not names:
        raise not_offered()
    return names


async def _scores(
    run: PoolingRun,
    task: str,
    body: ScoringRequest,
    queries: list[str],
    documents: list[str],
    *,
    params: tuple[str, str],
) -> list[float]:
    """Return the score of each pair of a query and a document. If there is one query, it is paired with every document.

    params: names of the request fields for queries and documents, for errors.
    """
    first, second = params
    if task == "classify":
        pairs = zip(queries * len(documents) if len(queries) == 1 else queries, documents, strict=True)
        prompts = [
            PoolingPrompt(content=query, param=f"{second}[{place}]", pooling=body.pooling(task, pair=document))
            for place, (query, document) in enumerate(pairs)
        ]
        return [float(values.reshape(-1)[0]) for values in await run.collect(prompts)]
    score = _cosine if task == "embed" else _best_matches
    of_queries = await run.collect(_alone(body, task, queries, param=first, is_query=True))

    async def scored(place: int, document: Vector) -> float:
        return float(score(of_queries[place if len(of_queries) > 1 else 0], document))

    prompts = _alone(body, task, documents, param=second, is_query=False)
    return await run.collect(prompts, reduce=scored)


def _alone(body: ScoringRequest, task: str, texts: list[str], *, param: str, is_query: bool) -> list[PoolingPrompt]:
    """Return one prompt per text, for tasks that compute vectors of single texts."""
    pooling = body.pooling(task, is_query=is_query)
    return [PoolingPrompt(content=text, param=f"{param}[{place}]", pooling=pooling) for place, text in enumerate(texts)]


def _cosine(query: Vector, document: Vector) -> np.float32:
    """Return the cosine of the angle between two vectors of shape [D]."""
    lengths = [np.maximum(np.linalg.norm(vector), _TINY) for vector in (query, document)]
    return np.float32(np.dot(query, document) / (lengths[0] * lengths[1]))


def _best_matches(query: Vector, document: Vector) -> np.float32:
    """Return the sum over the query tokens [n, D] of the largest cosine with any document token [m, D].

    Source: ColBERT's MaxSim, Khattab and Zaharia 2020, arXiv:2004.12832.
    """
    return np.float32((query @ document.T).max(axis=1).sum())
