"""The fields of request bodies: served fields, known fields that are not offered, and unknown fields.

The class of a body declares the type, limits and meaning of its served fields. The field for a sampling parameter is
derived from `SamplingParams`. A route's `FieldPolicy` lists the other fields that OpenAI, Anthropic and vLLM define.
The server ignores any other field in a body, and reports its name in a header of the answer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, Field, StrictBool, StrictInt, create_model

from megatron_runtime.requests.rules import FLAG
from megatron_runtime.requests.sampling_params import PARAMETERS, HttpField
from megatron_runtime.server.errors import invalid_value

MAX_REPORTED_FIELDS = 20
MAX_REPORTED_CHARACTERS = 64

_Model = TypeVar("_Model", bound=BaseModel)

HTTP_FIELDS: Mapping[str, HttpField] = {
    name: parameter.http for name, parameter in PARAMETERS.items() if parameter.http is not None
}
"""The HTTP fields that set sampling parameters, by the name of the parameter."""
PARAMETER_OF: Mapping[str, str] = {field.name: name for name, field in HTTP_FIELDS.items()}
"""The sampling parameter that an HTTP field sets, by the name of the field."""


@dataclass(frozen=True, slots=True)
class NotOffered:
    """A known field that no engine supports and that would change the answer.

    neutral: values other than null that are accepted because they have no effect.
    remedy:  the server's alternative to the field, or the reason why the field is not offered.
    """

    neutral: tuple[Any, ...] = ()
    remedy: str = ""

    def check(self, name: str, value: Any) -> None:
        """Raise ValueError unless `value` is null or one of the neutral values.

        name: name of the field, for the error.
        """
        # In Python, True equals 1.
        if value is None or any(value == item and (value is True) == (item is True) for item in self.neutral):
            return
        use = " or use " + " or ".join(map(_json, self.neutral)) if self.neutral else ""
        more = f". {self.remedy}" if self.remedy else ""
        raise ValueError(f"{name} is not offered by this server: leave it out{use}{more}")

    @property
    def text(self) -> str:
        """The description of the field in the HTTP reference."""
        accepted = " and ".join(f"`{_json(item)}`" for item in self.neutral)
        verb = "are" if len(self.neutral) > 1 else "is"
        return " ".join(
            part
            for part in (
                "Not offered.",
                f"{accepted} {verb} accepted." if accepted else "",
                f"{self.remedy}." if self.remedy else "",
            )
            if part
        )


def _json(value: Any) -> str:
    words = {None: "null", True: "true", False: "false"}
    return words[value] if value is None or isinstance(value, bool) else repr(value).replace("'", '"')


@dataclass(frozen=True, slots=True)
class FieldPolicy:
    """The fields that clients of other servers may send to a route, but that the class of the body does not declare.

    without_effect: fields that are accepted with any value, because they do not change the answer.
    not_offered:    fields that are rejected if their value would have an effect.
    """

    without_effect: frozenset[str] = frozenset()
    not_offered: Mapping[str, NotOffered] | None = None

    def unknown(self, fields: Mapping[str, Any]) -> list[str]:
        """Return the names of unknown fields.

        Raises ApiError 400 for a field that is not offered and would have an effect.

        fields: fields of a body that its class does not declare.
        """
        unknown = []
        for name, value in fields.items():
            rule = (self.not_offered or {}).get(name)
            if rule is not None:
                try:
                    rule.check(name, value)
                except ValueError as error:
                    raise invalid_value(name, str(error)) from error
            elif name not in self.without_effect:
                unknown.append(name)
        return unknown


def reported(names: Iterable[str]) -> str:
    """Return the names as a response header's value: at most 20 names, each cut to 64 printable ASCII characters."""
    shown = dict.fromkeys(
        "".join(char if "!" <= char <= "~" and char != "," else "?" for char in name[:MAX_REPORTED_CHARACTERS])
        or "?"  # an empty name would leave a space at the end of the header
        for name in names
    )
    return ", ".join(list(shown)[:MAX_REPORTED_FIELDS])


def converted(name: str, value: Any) -> Any:
    """Convert the value of an HTTP field to a value of the sampling parameter `name`."""
    convert = HTTP_FIELDS[name].value
    return value if convert is None else convert(value)


def within(name: str, *, minimum: float | None = None, maximum: float | None = None) -> Any:
    """Return a pydantic Field with the bounds of the sampling parameter `name`.

    Use it for a field of a request body that sets this parameter.

    minimum, maximum: bounds on one route, if they differ from the bounds of the HTTP field.
    """
    bounds, http = PARAMETERS[name].rule.bounds, PARAMETERS[name].http
    assert bounds is not None, f"{name} is a number"
    lowest = next(
        item for item in (minimum, None if http is None else http.minimum, bounds.minimum) if item is not None
    )
    highest = next(
        item for item in (maximum, None if http is None else http.maximum, bounds.maximum) if item is not None
    )
    limits: dict[str, Any] = {"ge": lowest}
    if highest != math.inf:
        limits["le"] = highest
    if not bounds.is_whole:
        limits["allow_inf_nan"] = False
    return Field(**limits)


def meaning(name: str) -> str:
    """Return the meaning of the HTTP field for the sampling parameter `name`."""
    parameter = PARAMETER_OF[name]
    return HTTP_FIELDS[parameter].text or PARAMETERS[parameter].text


def served(text: str, **options: Any) -> Any:
    """Return the declaration of a served field with the default null. text: description in the HTTP reference."""
    return Field(default=None, description=text, **options)


def sampled(name: str) -> Any:
    """Return the declaration of a sampling parameter's HTTP field, whose default null means the parameter's default."""
    return served(meaning(name))


def with_sampling_fields(*, without: Iterable[str]) -> Callable[[type[_Model]], type[_Model]]:
    """Return a decorator that adds the HTTP fields of sampling parameters to the class of a body.

    A field whose value is neither a number nor a flag must be declared in the class itself.

    without: HTTP fields to leave out.
    """

    def extended(model: type[_Model]) -> type[_Model]:
        fields: dict[str, Any] = {}
        for parameter, http in HTTP_FIELDS.items():
            if http.name in model.model_fields or http.name in without:
                continue
            rule = PARAMETERS[parameter].rule
            kind: Any = StrictBool
            if rule is not FLAG:
                assert rule.bounds is not None, f"{http.name} is neither a number nor a flag: declare it in the class"
                kind = Annotated[StrictInt if rule.bounds.is_whole else float, within(parameter)]
            fields[http.name] = (kind | None, sampled(http.name))
        return create_model(
            model.__name__, __base__=model, __module__=model.__module__, __doc__=model.__doc__, **fields
        )

    return extended


_OFF = NotOffered((False,))
_EMPTY_MAP = NotOffered(({},))
_NO_SAMPLERS_OF_CLIENTS = NotOffered(([], {}), "The server runs no code from clients")
_NO_TEMPLATES_OF_CLIENTS = NotOffered(
    ("",), "The model's own template is used: set its variables in chat_template_kwargs"
)

_ANNOTATIONS = frozenset(
    {
        *("metadata", "prompt_cache_options", "prompt_cache_retention", "safety_identifier"),
        *("service_tier", "store", "user"),
    }
)
"""OpenAI's fields that describe a request and do not change the answer."""
_VLLM_WITHOUT_EFFECT = frozenset({"mm_payload", "request_id", "return_mm_kwargs", "return_token_offsets", "session_id"})
"""vLLM's fields that have an effect only on other routes or in vLLM's log."""
_VLLM_NOT_OFFERED: Mapping[str, NotOffered] = {
    "ec_transfer_params": _EMPTY_MAP,
    "kv_transfer_params": _EMPTY_MAP,
    "media_io_kwargs": _EMPTY_MAP,
    "mm_processor_kwargs": _EMPTY_MAP,
    "vllm_xargs": _NO_SAMPLERS_OF_CLIENTS,
    "watermarking": _OFF,
}
"""vLLM's fields that no route of this server offers."""
_VLLM_GENERATION: Mapping[str, NotOffered] = {
    **_VLLM_NOT_OFFERED,
    "best_of": NotOffered((1,)),
    "guided_whitespace_pattern": NotOffered(),
    "length_penalty": NotOffered((1,)),
    "logits_processors": _NO_SAMPLERS_OF_CLIENTS,
    "logprob_token_ids": NotOffered(([],)),
    "repetition_detection": _EMPTY_MAP,
    "routed_experts_prompt_start": NotOffered((0,)),
    "structural_tag": NotOffered(),
    "use_beam_search": _OFF,
}
"""vLLM's fields that completions and chat completions do not offer, including fields of earlier vLLM releases."""
_GENERATION_WITHOUT_EFFECT = frozenset(
    {
        *_ANNOTATIONS,
        *_VLLM_WITHOUT_EFFECT,
        *("guided_decoding_backend", "skip_prompt_log_probs", "spaces_between_special_tokens"),
    }
)
"""Fields that have no effect on generation.

skip_prompt_log_probs is a field of Megatron-Core. This server returns prompt log-probabilities only on request.
"""
_TEMPLATES: Mapping[str, NotOffered] = {
    "chat_template": _NO_TEMPLATES_OF_CLIENTS,
    "documents": NotOffered(([],)),
}

COMPLETION_POLICY = FieldPolicy(
    _GENERATION_WITHOUT_EFFECT,
    {
        **_VLLM_GENERATION,
        "prompt_embeds": NotOffered(([],)),
        "suffix": NotOffered(("",)),
        "thinking_token_budget": NotOffered((-1,), "Chat completions have it"),
    },
)
CHAT_POLICY = FieldPolicy(
    _GENERATION_WITHOUT_EFFECT | {"verbosity"},
    {
        **_VLLM_GENERATION,
        **_TEMPLATES,
        "audio": NotOffered(),
        "echo": _OFF,
        "function_call": NotOffered(("none", "auto"), "Use tool_choice"),
        "functions": NotOffered(([],), "Use tools"),
        "modalities": NotOffered((["text"], [])),
        "moderation": NotOffered(),
        "prediction": NotOffered(),
        "return_prompt_text": _OFF,
        "web_search_options": NotOffered(),
    },
)
RESPONSES_POLICY = FieldPolicy(
    _ANNOTATIONS - {"metadata"} | _VLLM_WITHOUT_EFFECT | {"client_metadata", "include", "stream_options", "truncation"},
    {
        **_VLLM_NOT_OFFERED,
        "background": _OFF,
        "context_management": NotOffered(([],)),
        "conversation": NotOffered(),
        "enable_response_messages": _OFF,
        "max_tool_calls": NotOffered(),
        "moderation": NotOffered(),
        "previous_input_messages": NotOffered(([],)),
        "previous_response_id": NotOffered((), "The server keeps no answers: send the items again"),
        "prompt": NotOffered(),
        "top_logprobs": NotOffered((0,)),
    },
)
_COUNT_WITHOUT_EFFECT = frozenset(
    {"cache_control", "context_management", "mm_payload", "return_mm_kwargs", "user_profile_id", "workspace_id"}
)
COUNT_TOKENS_POLICY = FieldPolicy(_COUNT_WITHOUT_EFFECT, {"speed": NotOffered(("standard",))})
MESSAGES_POLICY = FieldPolicy(
    _COUNT_WITHOUT_EFFECT | {"diagnostics", "inference_geo", "metadata", "service_tier"},
    {
        "container": NotOffered(),
        "ec_transfer_params": _EMPTY_MAP,
        "kv_transfer_params": _EMPTY_MAP,
        "mcp_servers": NotOffered(([],)),
        "speed": NotOffered(("standard",)),
        "thread": NotOffered((), "The server keeps no answers: send all messages"),
        "vllm_xargs": _NO_SAMPLERS_OF_CLIENTS,
        "watermarking": _OFF,
    },
)
_POOLING_WITHOUT_EFFECT = frozenset({"request_id", "user"})
_OF_TEXTS = {
    "messages": NotOffered((), "Send the text as input"),
    "mm_processor_kwargs": _EMPTY_MAP,
    "padding": NotOffered(("do_not_pad",)),
}
_OF_ARRAYS = {"embed_dtype": NotOffered(("float32",)), "endianness": NotOffered(("native", "little"))}
CLASSIFY_POLICY = FieldPolicy(_POOLING_WITHOUT_EFFECT, _OF_TEXTS)
EMBEDDINGS_POLICY = FieldPolicy(_POOLING_WITHOUT_EFFECT, {**_OF_TEXTS, **_OF_ARRAYS})
POOLING_POLICY = FieldPolicy(
    _POOLING_WITHOUT_EFFECT,
    {
        **_OF_TEXTS,
        **_OF_ARRAYS,
        "data": NotOffered((), "Send the text as input"),
        "dimensions": NotOffered((), "Use POST /v1/embeddings"),
    },
)
SCORING_POLICY = FieldPolicy(
    _POOLING_WITHOUT_EFFECT,
    {
        "chat_template_kwargs": NotOffered(({},), "The engine uses no chat template for pairs"),
        "instruction": NotOffered(("",), "Put it into the query"),
        "mm_processor_kwargs": _EMPTY_MAP,
        "padding": NotOffered(("do_not_pad",)),
    },
)
TOKENIZE_POLICY = FieldPolicy(
    frozenset(),
    {
        "chat_template": _NO_TEMPLATES_OF_CLIENTS,
        "media_io_kwargs": _EMPTY_MAP,
        "mm_processor_kwargs": _EMPTY_MAP,
    },
)
