"""Traces by OpenTelemetry: one span of each component that a request passes, exported by OTLP over HTTP.

Tracing is off unless OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_TRACES_ENDPOINT is set. All variables of the
SDK's specification apply: https://opentelemetry.io/docs/specs/otel/configuration/sdk-environment-variables/. Attributes
have the names that vLLM gives them. The packages are those of the extra `tracing`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span as OtelSpan

logger = logging.getLogger(__name__)

Attributes: TypeAlias = Mapping[str, str | bool | int | float | None]
"""Attributes of a span by name. Those that are None are left out."""

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
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"
_FLUSH_SECONDS = 2.0
"""At the end of a process, the time for the last spans to reach the collector."""


class Span:
    """A span that has begun. traceparent: its W3C trace context, for the components that the request passes next."""

    def __init__(self, span: OtelSpan) -> None:
        self._span = span
        context = span.get_span_context()
        self.traceparent = f"00-{context.trace_id:032x}-{context.span_id:016x}-{int(context.trace_flags):02x}"

    def rename(self, name: str) -> None:
        self._span.update_name(name)

    def set(self, attributes: Attributes) -> None:
        self._span.set_attributes({name: value for name, value in attributes.items() if value is not None})

    def end(self, *, at: float | None = None, error: str = "") -> None:
        """End the span. at: seconds since 1970; None: now. error: why the request failed; empty if it did not."""
        from opentelemetry.trace import Status, StatusCode

        if error:
            self._span.set_status(Status(StatusCode.ERROR, error))
        self._span.end(None if at is None else int(at * 1e9))


class Tracer:
    """Makes the spans of one process and exports them in the background.

    name: `service.name` of the process, unless OTEL_SERVICE_NAME or OTEL_RESOURCE_ATTRIBUTES has another.
    Raises ImportError if the packages of the extra `tracing` are missing, ValueError for another protocol than OTLP
    over HTTP.
    """

    def __init__(self, name: str) -> None:
        protocol = next((os.environ[each] for each in _PROTOCOLS if os.environ.get(each)), _PROTOCOL)
        if protocol != _PROTOCOL:
            raise ValueError(
                f"{_PROTOCOLS[1]}={protocol} is not supported: use {_PROTOCOL} and the collector's HTTP port"
            )
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
        """Begin a span.

        headers:   with the W3C trace context of the parent as `traceparent`, and maybe `tracestate`; without one, a new
                   trace begins.
        is_server: whether it answers a request of another process synchronously.
        at:        seconds since 1970; None: now.
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
        """Export a span that has ended. start, end: seconds since 1970."""
        span = self.begin(name, headers={"traceparent": traceparent}, at=start)
        span.set(attributes)
        span.end(at=end, error=error)

    def close(self) -> None:
        """Export the last spans, for up to two seconds. A collector that does not answer delays nothing else."""
        flushing = threading.Thread(target=self._provider.shutdown, daemon=True)
        flushing.start()
        flushing.join(_FLUSH_SECONDS)


def tracer_from_environment(name: str) -> Tracer | None:
    """Return the tracer of this process; None if the environment does not ask for one, or it cannot be had.

    name: as of Tracer. A process whose environment asks for traces that it cannot make logs why, and serves without.
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
    except ValueError as error:
        logger.error("traces are off: %s", error)
    return None
