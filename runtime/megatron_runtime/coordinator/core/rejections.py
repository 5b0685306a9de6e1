"""Pure functions that return the error, with code and message, for a request that the coordinator rejects."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from megatron_runtime.coordinator.core.records import Engine, Entry
from megatron_runtime.protocol.adapters import AdapterList
from megatron_runtime.protocol.headers import ErrorCode
from megatron_runtime.protocol.media import MEDIA_NEED
from megatron_runtime.protocol.messages import PARAMETERS, unpack
from megatron_runtime.requests.capabilities import GENERATION, described, is_parameter
from megatron_runtime.requests.sampling_params import SamplingParams

RETRY_AFTER_SECONDS = 1.0


class Rejection(NamedTuple):
    """The error that ends a request. field: the invalid sampling parameter, if there is one."""

    code: ErrorCode
    message: str
    retry_after: float | None = None
    field: str | None = None


def unavailable(state: str) -> Rejection:
    """Return the error of a request that arrives while the engines are paused, suspended or stopped by a verb."""
    return Rejection(ErrorCode.UNAVAILABLE, f"the engines are {state}: try again later", RETRY_AFTER_SECONDS)


def full(reason: str) -> Rejection:
    """Return the error of a request that exceeds the memory of the journal or the length of the queue."""
    return Rejection(ErrorCode.QUEUE_FULL, f"{reason}: try again", RETRY_AFTER_SECONDS)


def unpinnable(entry: Entry, engine: Engine | None, may_dispatch: bool) -> Rejection | None:
    """Return the error if the engine that a request names cannot answer the request.

    Return None if the engine can answer, even if it is draining or at capacity.

    engine:       the registered engine of this name; None if no engine of this name is registered.
    may_dispatch: whether the coordinator may dispatch requests now; if not, the engine cannot answer.
    """
    if engine is None or not engine.serving or engine.reserved or not may_dispatch:
        return engine_missing(entry, engine)
    if engine.runs(entry):
        return None
    if not engine.has_model(entry.model):
        return other_model(entry, [engine])
    return unsupported(entry, [engine]) or engine_missing(entry, engine)


def engine_missing(entry: Entry, engine: Engine | None) -> Rejection:
    """Return the error for a request that names an engine which cannot answer it.

    engine: the registered engine with this name; None if there is none.
    """
    why = "does not serve"
    if engine is not None and engine.reserved:
        why = "is reserved for a suspect request"
    elif engine is not None and engine.serving and entry.meta.adapter and entry.meta.adapter not in engine.adapters:
        why = f"has not loaded the adapter {entry.meta.adapter!r}"
    return Rejection(ErrorCode.ENGINES_MISSING, f"engine {entry.meta.engine!r} {why}; only it may answer")


def unanswerable(entry: Entry, serving: Sequence[Engine]) -> Rejection | None:
    """Return why no serving engine can answer a request, or None if the request can wait for an engine."""
    name = entry.meta.adapter
    engines = [engine for engine in serving if engine.has_model(entry.model)]
    if not engines:
        return other_model(entry, serving)
    if name and all(name in engine.adapter_errors for engine in engines):
        cause = f"{engines[0].name}: {engines[0].adapter_errors[name]}"
        message = f"no engine could load the adapter {name!r}: {cause}"
        return Rejection(ErrorCode.UNAVAILABLE, message, RETRY_AFTER_SECONDS)
    return unsupported(entry, engines)


def unsupported(entry: Entry, serving: Sequence[Engine]) -> Rejection | None:
    """Return the error if every serving engine lacks a feature that a request needs, otherwise None.

    Also returns None for a request that an engine has already accepted. This request waits until a suitable engine
    registers.
    """
    needs, name = entry.meta.needs, entry.meta.adapter
    if entry.dispatches or entry.generated:
        return None
    engines = [engine for engine in serving if engine.has_model(entry.model) and name not in engine.adapter_errors]
    if not engines or not all(engine.lacking(needs) for engine in engines):
        return None
    missing = engines[0].lacking(needs)
    if missing == MEDIA_NEED:
        message = "the request has images, audio or video, which no engine that may answer takes: leave them out, or "
        message += "serve a model that takes them with the backend vllm"
        return Rejection(ErrorCode.INVALID_REQUEST, message)
    if missing == GENERATION:
        tasks = ", ".join(sorted({engine.task for engine in engines}))
        message = f"the model generates no tokens, its task is {tasks}: send the request to a model that does"
        return Rejection(ErrorCode.INVALID_REQUEST, message, field="pooling")
    if is_parameter(missing):
        message = f"sampling parameter {missing} is of a later release than every engine that may answer: "
        message += "use its default, or upgrade the engines"
        return Rejection(ErrorCode.INVALID_REQUEST, message, field=missing)
    parameter, feature = described(missing, _params_of(entry))
    backends = ", ".join(sorted({repr(engine.backend) for engine in engines}))
    which = f"which no engine that may answer supports (backend {backends})"
    message = f"sampling parameter {parameter} needs {feature}, {which}: use its default, or add another backend"
    return Rejection(ErrorCode.INVALID_REQUEST, message, field=parameter or None)


def _params_of(entry: Entry) -> SamplingParams | None:
    """Return the sampling parameters of a request, or None if they are malformed.

    Only engines reject malformed parameters.
    """
    try:
        return SamplingParams.deserialize(unpack(entry.params, PARAMETERS))
    except (ValueError, TypeError, AttributeError):
        return None


def adapter_changed(entry: Entry, adapters: AdapterList) -> Rejection | None:
    """Return the error of a request whose adapter was removed, or was replaced after its first tokens.

    Returns None if the request can continue. Also returns None before the coordinator has a list of adapters, because
    after a restart it gets the list from engines or the operator.
    """
    name = entry.meta.adapter
    if not name or not adapters.generation:
        return None
    wanted = adapters.find(name)
    if wanted is None:
        known = ", ".join(adapter.name for adapter in adapters.adapters) or "none"
        return Rejection(ErrorCode.ADAPTER_NOT_FOUND, f"the engines have no adapter {name!r}: they have {known}")
    if entry.generated and entry.adapter not in (None, wanted):
        message = f"the source of the adapter {name!r} changed after the request was begun: submit it again"
        return Rejection(ErrorCode.MODEL_CHANGED, message)
    return None


def other_model(entry: Entry, engines: Sequence[Engine]) -> Rejection:
    """Return the error of a request whose model is not the model of any engine in `engines`."""
    models = ", ".join(sorted({engine.model for engine in engines}))
    what = "it was begun by" if entry.generated else "it was made for"
    message = f"the request's model changed: {what} {entry.model}, the engines run {models}"
    return Rejection(ErrorCode.MODEL_CHANGED, f"{message}: submit it again")


def awaited_engine(entry: Entry) -> str:
    """Return a description of the engine for which a request waits, for the error message at its deadline."""
    features = [described(name)[1] for name in entry.meta.needs.split()]
    return f"an engine that supports {', '.join(features)}" if features else "an engine"
