"""`ApiError`, the exception for error answers, and its conversion to the JSON format of the OpenAI API."""

from __future__ import annotations

import math
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any

from megatron_runtime.server.json_text import JsonResponse

TYPE_OF_STATUS = {
    **dict.fromkeys((400, 405, 413, 415, 431), "invalid_request_error"),
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    **dict.fromkeys((408, 504), "timeout_error"),
    409: "conflict_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
}
_SHOWN_CHARACTERS = 80
_PLACE_CHARACTERS = 200
_BRIEF = reprlib.Repr()
_BRIEF.maxstring = _BRIEF.maxother = _BRIEF.maxlong = _SHOWN_CHARACTERS
CONTEXT_LENGTH_PHRASE = "This model's maximum context length"
"""Clients detect an overlong conversation by this phrase, and then shorten the conversation."""


@dataclass(eq=False)
class ApiError(Exception):
    """The error answer to an HTTP request.

    status: HTTP status.
    param:  name of the invalid request field.
    code:   a short identifier that programs can test.
    retry_after_seconds: number of seconds after which the client should try again.
    is_final: whether the same request will fail again. If False, OpenAI's clients repeat the request after a 5xx
              answer.
    """

    status: int
    message: str
    _: KW_ONLY
    param: str | None = None
    code: str | None = None
    retry_after_seconds: float | None = None
    is_final: bool = False

    def __post_init__(self) -> None:
        super().__init__(self.message)

    def body(self) -> dict[str, Any]:
        kind = TYPE_OF_STATUS.get(self.status, "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        if self.retry_after_seconds is not None:
            headers["Retry-After"] = str(max(1, math.ceil(self.retry_after_seconds)))
        if self.is_final:
            headers["x-should-retry"] = "false"
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        return headers

    def response(self) -> JsonResponse:
        return JsonResponse(self.body(), status_code=self.status, headers=self.headers)


@dataclass(eq=False)
class ContextLengthError(ApiError):
    """A 400 error for a prompt that leaves no tokens for an answer. The prompt has at least `prompt_length` tokens."""

    prompt_length: int = field(kw_only=True)
    limit: int = field(kw_only=True)


_CODES: Mapping[str, str] = {
    "BudgetExceededError": "rate_limit_exceeded",
    "InvalidSamplingParamsError": "invalid_value",
    "NotFiniteError": "not_finite",
}
"""The `code` of an error answer, by the type of the engine's error."""
_STRUCTURE = re.compile(r"^sampling parameter structured_output=.{0,40}? is invalid: ")
"""Matches the start of an engine's error about structured output. The name of the request field replaces it."""


def renamed(error: ApiError, names: Mapping[str, str]) -> ApiError:
    """Return `error` with the invalid field's name on the current route.

    names: maps the field name in the error to the field name in the route.
    """
    base = re.match(r"[^.\[]*", error.param or "")
    if base is None or base[0] not in names:
        return error
    own = names[base[0]] + (error.param or "")[base.end() :]
    message = error.message.replace(f"for {error.param}:", f"for {own}:")
    return replace(error, param=own, message=message)


def invalid_value(param: str, problem: str) -> ApiError:
    """Return a 400 error for an invalid field value. problem: what is wrong and what is allowed, without a period."""
    return ApiError(400, f"Invalid value for {param}: {problem}.", param=param, code="invalid_value")


def try_again(status: int, message: str, *, code: str, seconds: float = 1) -> ApiError:
    """Return a 429 or 503 error for a request that can succeed later.

    seconds: how long the client should wait before it tries again.
    """
    return ApiError(status, message, code=code, retry_after_seconds=seconds)


def context_length_error(*, prompt_length: int, limit: int, param: str | None, is_bound: bool = False) -> ApiError:
    """Return a 400 error for a prompt that leaves no tokens for an answer.

    is_bound: whether `prompt_length` is only a lower bound, because the prompt was not tokenized.
    """
    length = f"at least {prompt_length}" if is_bound else str(prompt_length)
    message = (
        f"{CONTEXT_LENGTH_PHRASE} is {limit} tokens for prompt and answer. However, the prompt alone has {length} "
        "tokens: shorten the prompt."
    )
    return ContextLengthError(
        400, message, param=param, code="context_length_exceeded", prompt_length=prompt_length, limit=limit
    )


def from_validation(errors: Sequence[Mapping[str, Any]]) -> ApiError:
    """Return a 400 error for a request body that pydantic rejected. It names the first invalid field."""
    first = errors[0]
    if first["type"] == "json_invalid":
        return ApiError(400, f"The request body is not valid JSON: {first['msg']}.", code="invalid_json")
    place = _field_name(first["loc"])[:_PLACE_CHARACTERS]
    if first["type"] == "missing":
        return ApiError(400, f"Missing required parameter: {place}.", param=place, code="missing_required_parameter")
    message = first["msg"].removeprefix("Value error, ")
    seen = "" if first["type"] == "value_error" else f", not {shown(first.get('input'))}"
    named = place or "the request body"
    return ApiError(400, f"Invalid value for {named}: {message}{seen}.", param=place or None, code="invalid_value")


def from_reply_error(error: Mapping[str, Any] | None, *, field_names: Mapping[str, str]) -> ApiError:
    """Return the ApiError for a FAILED reply. Its HTTP status is the code in `error`, or 500 if there is no code.

    field_names: names of request fields, by sampling parameter.
    """
    error = error or {}
    code, kind = error.get("code"), str(error.get("type") or "")
    message = str(error.get("message") or "the engine failed to answer")
    status = code if isinstance(code, int) and 400 <= code < 600 else 500
    if kind.startswith("MaxSequenceLengthOverflow"):
        status = 400
        message = message if CONTEXT_LENGTH_PHRASE in message else f"{CONTEXT_LENGTH_PHRASE} is exceeded: {message}"
        kind = "context_length_exceeded"
    retry = error.get("retry_after_seconds")
    if retry is None and status in (429, 503):
        retry = 1.0
    kind = _CODES.get(kind, kind)
    field = error.get("field")
    param = field_names.get(field, field) if isinstance(field, str) else None
    if field == "structured_output":
        message = _STRUCTURE.sub(f"Invalid value for {param}: ", message)
    if status == 404:  # the adapter was removed after the server checked the request
        param, kind = "model", "model_not_found"
    is_final = status >= 500 and error.get("is_transient") is False
    return ApiError(status, message, param=param, code=kind or None, retry_after_seconds=retry, is_final=is_final)


def _field_name(place: Sequence[str | int]) -> str:
    """Return `messages[0].content` for `("messages", 0, "content")`, without pydantic's names of union members."""
    name = ""
    for part in place:
        if isinstance(part, int):
            name += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int", "float", "bool"):
            name += f".{part}" if name else part
    return name


def shown(value: Any) -> str:
    """Return the beginning of a value, escaped for an error message. The cost does not depend on the value's size."""
    text = _BRIEF.repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else text[: _SHOWN_CHARACTERS - 3] + "..."
