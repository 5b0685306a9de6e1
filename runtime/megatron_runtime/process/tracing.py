"""Creates OpenTelemetry traces. Each component through which a request passes creates one span, and exports it by OTLP
over HTTP.

Tracing is off unless OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set. All variables of the
SDK's specification apply: https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/. Attributes
have the same names as in vLLM. The extra `tracing` installs the required packages.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias
from urllib.parse import unquote

from megatron_runtime.process.secrets import HEADER, INTEGER, NUMBER, URL, Form, SecretError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OtelSpan

logger = logging.getLogger(__name__)

Attributes: TypeAlias = Mapping[str, str | bool | int | float | None]
"""Attributes of a span by name. Attributes with the value None are omitted."""

REQUEST_ID = "gen_ai.request.id"
REQUEST_N = "gen_ai.request.n"
MAX_TOKENS = "gen_ai.request.max_tokens"
TEMPERATURE = "gen_ai.request.temperature"
TOP_P = "gen_ai.request.top_p"
RESPONSE_MODEL = "gen_ai.response.model"
PROMPT_TOKENS = "gen_ai.usage.prompt_tokens"
COMPLETION_TOKENS = "gen_ai.usage.completion_tokens"
TIME_IN_QUEUE = "gen_ai.latency.time_in_queue"
TIME_TO_FIRST_TOKEN = "gen_ai.latency.time_to_first_token"
END_TO_END = "gen_ai.latency.e2e"
TIME_IN_PREFILL = "gen_ai.latency.time_in_model_prefill"
TIME_IN_DECODE = "gen_ai.latency.time_in_model_decode"
TIME_IN_INFERENCE = "gen_ai.latency.time_in_model_inference"

_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
_PROTOCOL = "http/protobuf"
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL_FORM = Form(re.escape(_PROTOCOL), f"{_PROTOCOL}, and the HTTP port of the collector")


def _pairs(value: str) -> Form:
    pair = rf"[A-Za-z0-9!#$%&'*+.^_`|~-]+ *= *{value}"
    return Form(rf"{pair}( *, *{pair})*", "NAME=VALUE,… with URL-encoded values")


_FORMS = {
    "_ENDPOINT": URL,
    "_HEADERS": _pairs(r"[!#-+\--:<-\[\]-~]*"),  # the bytes allowed in a W3C baggage value
    "_ATTRIBUTES": _pairs(r"[ -+\--~]*"),
    "_TIMEOUT": NUMBER,
    "_DELAY": INTEGER,
    "_SIZE": INTEGER,
    "_LIMIT": INTEGER,
}
"""Form of a variable's value, by suffix of the variable's name.

This module checks the values, because the SDK's warnings quote invalid values.
"""
_FLUSH_SECONDS = 2.0
"""Maximum seconds for exporting the last spans when a process exits."""


class Span:
    """A span that has started and has not ended.

    traceparent: W3C trace context of the span, for the next component through which the request passes.
    """

    def __init__(self, span: OtelSpan) -> None:
        self._span = span
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes({name: value for name, value in attributes.items() if value is not None})

    def end(self, *, at: float | None = None, error: str = "") -> None:
        """End the span.

        at:    time of the end as Unix time; None means now.
        error: reason why the request failed; empty if it did not fail.
        """
        from opentelemetry.trace import Status, StatusCode

        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(None if at is None else int(at * 1e9))


class Tracer:
    """Creates the spans of one process, and exports the spans in the background.

    name: `service.name` of the process, unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES sets another name.

    Raises:
        ImportError: the packages of the extra `tracing` are missing.
        SecretError: a variable has an unusable value, such as a protocol other than OTLP over HTTP.
    """

    def __init__(self, name: str) -> None:
        _check_variables(os.environ)
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import SERVICE_NAME, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        resource = Resource.create()
        if str(resource.attributes.get(SERVICE_NAME, "unknown_service")).startswith("unknown_service"):
            resource = resource.merge(Resource({SERVICE_NAME: name}))
        self._provider: TracerProvider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        self._tracer = self._provider.get_tracer("megatron")

    def begin(self, name: str, *, headers: Mapping[str, str], is_server: bool = False, at: float | None = None) -> Span:
        """Start and return a span.

        headers: headers with the parent's W3C trace context: `traceparent` and optionally `tracestate`. Without
                 `traceparent`, the span starts a new trace.
        is_server: whether the process that sent `headers` waits for an answer.
        at:        start as Unix time; None means now.
        """
        from opentelemetry.trace import SpanKind
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        parent = TraceContextTextMapPropagator().extract(headers)
        kind = SpanKind.SERVER if is_server else SpanKind.CONSUMER
        start = None if at is None else int(at * 1e9)
        return Span(self._tracer.start_span(name, context=parent, kind=kind, start_time=start))

    def record(
        self, name: str, *, traceparent: str, start: float, end: float, attributes: Attributes, error: str = ""
    ) -> None:
        """Export a span that has already ended. start, end: Unix times."""
        span = self.begin(name, headers={"traceparent": traceparent}, at=start)
        span.set(attributes)
        span.end(at=end, error=error)

    def close(self) -> None:
        """Export the last spans. If the collector does not answer, stop after two seconds."""
        flushing = threading.Thread(target=self._provider.shutdown, daemon=True)
        flushing.start()
        flushing.join(_FLUSH_SECONDS)


def _check_variables(environment: Mapping[str, str]) -> None:
    """Check the environment variables that OpenTelemetry's SDK reads. Raises SecretError if a value is unusable."""
    protocol = next((name for name in _PROTOCOLS if environment.get(name)), None)
    if protocol is not None:
        _PROTOCOL_FORM.check(protocol, environment[protocol])
    for name in sorted(environment):
        value = environment[name].strip()
        if not name.startswith("OTEL_") or "_METRICS_" in name or "_LOGS_" in name or not value:
            continue
        for end, form in _FORMS.items():
            if name.endswith(end):
                form.check(name, value)
        for pair in value.split(",") if name.endswith("_HEADERS") else ():
            HEADER.check(name, unquote(pair.partition("=")[2]).strip() or "-")


def tracer_from_environment(name: str) -> Tracer | None:
    """Return the tracer of this process, or None if the environment does not enable tracing.

    name: see Tracer.

    If the tracer cannot be created, this function logs the cause and returns None, so that the process serves without
    traces.
    """
    environment: dict[str, Any] = dict(os.environ)
    if (
        not any(environment.get(endpoint) for endpoint in _ENDPOINTS)
        or environment.get("OTEL_SDK_DISABLED", "").lower() == "true"
        or environment.get("OTEL_TRACES_EXPORTER", "otlp") != "otlp"
    ):
        return None
    try:
        return Tracer(name)
    except ImportError as error:
        logger.error("traces are off: %s; install megatron-inference[tracing]", error)
    except SecretError as error:
        logger.error("traces are off: %s", error)
    except ValueError:
        logger.error("traces are off: a variable OTEL_… does not have a valid value; correct or unset it")
    return None
