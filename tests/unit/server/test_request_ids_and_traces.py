"""One request through a server, a coordinator and an engine: its id in all of their logs, their spans in one trace."""

from __future__ import annotations

import http.server
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import echo_engine
import httpx
import pytest
from eventually import LONG_SECONDS, eventually
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from megatron_runtime.cli.processes import free_ports

TRACE, CALLER = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
HEADERS = {"traceparent": f"00-{TRACE}-{CALLER}-01", "x-request-id": "order-17"}


class Collector:
    """Receives OTLP over HTTP. spans: `(service, span, attributes)` of all spans received."""

    def __init__(self) -> None:
        self.spans: list[tuple[str, Any, dict[str, Any]]] = []
        collector = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                if self.path == "/v1/traces":
                    collector._take(ExportTraceServiceRequest.FromString(body))
                self.send_response(200)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                pass

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _take(self, request: ExportTraceServiceRequest) -> None:
        for resource in request.resource_spans:
            service = _values(resource.resource.attributes)["service.name"]
            for scope in resource.scope_spans:
                self.spans += [(service, span, _values(span.attributes)) for span in scope.spans]

    def named(self, service: str) -> list[tuple[Any, dict[str, Any]]]:
        return [(span, attributes) for name, span, attributes in self.spans if name == service]

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def _values(attributes: Any) -> dict[str, Any]:
    return {item.key: getattr(item.value, item.value.WhichOneof("value")) for item in attributes}


@dataclass
class Components:
    """The processes of one resource with one echo engine, and their logs."""

    directory: Path
    environment: dict[str, str]
    url: str = ""
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    async def start(self) -> None:
        client, engine, admin, http_port = free_ports(4)
        ports = ("--client-port", str(client), "--engine-port", str(engine), "--admin-port", str(admin))
        megatron = ("-m", "megatron_runtime.cli")
        to_server = ("--coordinator", f"127.0.0.1:{client}", "--host", "127.0.0.1", "--port", str(http_port))
        self._run("coordinator", *megatron, "coordinator", "--listen", "127.0.0.1", *ports)
        self._run("engine", echo_engine.PROGRAM, "--coordinator", f"127.0.0.1:{engine}", "--name", "engine-0")
        self._run("server", *megatron, "server", *to_server)
        self.url = f"http://127.0.0.1:{http_port}"
        async with httpx.AsyncClient(trust_env=False, timeout=LONG_SECONDS) as probe:

            async def is_ready() -> bool:
                try:
                    return (await probe.get(f"{self.url}/readyz")).status_code == 200
                except httpx.TransportError:
                    return False

            await eventually(is_ready, what="the server is ready")

    def _run(self, component: str, *command: str) -> None:
        common = ("--health-port", "off", "--log-level", "debug", "--log-format", "json")
        with (self.directory / component).open("wb") as log:
            self.processes[component] = subprocess.Popen(
                [sys.executable, *command, *common],
                stderr=log,
                env={**os.environ, **self.environment},
            )

    def log(self, command: str) -> list[dict[str, Any]]:
        lines = (self.directory / command).read_text().splitlines()
        return [json.loads(line) for line in lines if line.startswith("{")]

    def close(self) -> None:
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in self.processes.values():
            process.wait(LONG_SECONDS)


@pytest.fixture
def collector() -> Iterator[Collector]:
    found = Collector()
    yield found
    found.close()


@pytest.fixture
def components(tmp_path: Path, collector: Collector) -> Iterator[Components]:
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, "OTEL_BSP_SCHEDULE_DELAY": "50"}
    found = Components(tmp_path, environment)
    yield found
    found.close()


@pytest.mark.slow
async def test_all_components_name_a_request_and_make_one_trace(components: Components, collector: Collector) -> None:
    await components.start()
    body = {"model": "smollm2-135m", "prompt": "Hi", "max_tokens": 5, "temperature": 0.5}
    async with httpx.AsyncClient(base_url=components.url, timeout=LONG_SECONDS, trust_env=False) as client:
        reply = await client.post("/v1/completions", json=body, headers=HEADERS)
        assert reply.status_code == 200, reply.text
        assert reply.headers["x-request-id"] == "order-17"
        other = await client.post("/v1/completions", json={**body, "stream": True})
        assert other.text.endswith("data: [DONE]\n\n")
    made = other.headers["x-request-id"]
    assert made.startswith("req_")

    services = ("megatron-server", "megatron-coordinator", "megatron-engine")

    async def has_arrived() -> bool:
        return all(len(collector.named(service)) == 2 for service in services)

    await eventually(has_arrived, what="two spans of each component")
    (server, server_values), (stream, _) = sorted(
        collector.named("megatron-server"), key=lambda found: found[1]["gen_ai.request.id"]
    )
    assert (server.name, server.parent_span_id.hex()) == ("POST /v1/completions", CALLER)
    assert server_values["gen_ai.response.model"] == "smollm2-135m"
    assert (server_values["http.route"], server_values["http.response.status_code"]) == ("/v1/completions", 200)
    spans = {"megatron-server": (server, server_values)}
    for service in services[1:]:
        found = {span.parent_span_id: (span, values) for span, values in collector.named(service)}
        assert found.keys() == {server.span_id, stream.span_id}, "each is a child of its request's span"
        spans[service] = found[server.span_id]
    for span, values in spans.values():
        assert span.trace_id.hex() == TRACE
        assert values["gen_ai.request.id"] == "order-17"
        assert server.start_time_unix_nano <= span.end_time_unix_nano
        assert span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.status.code != 2, span.status
    coordinator, engine = spans["megatron-coordinator"], spans["megatron-engine"]
    assert coordinator[0].name == "coordinate"
    assert (coordinator[1]["megatron.engine"], coordinator[1]["megatron.dispatches"]) == ("engine-0", 1)
    assert 0 <= coordinator[1]["gen_ai.latency.time_in_queue"] <= coordinator[1]["gen_ai.latency.e2e"]
    assert engine[0].name == "llm_request"
    assert engine[1]["gen_ai.request.max_tokens"] == 5
    assert engine[1]["gen_ai.request.temperature"] == 0.5
    usage = reply.json()["usage"]
    for _, values in (spans["megatron-server"], engine):
        assert values["gen_ai.usage.prompt_tokens"] == usage["prompt_tokens"]
        assert values["gen_ai.usage.completion_tokens"] == usage["completion_tokens"]
    assert stream.trace_id.hex() != TRACE, "without a caller's trace, a request begins one"

    for command in ("server", "coordinator", "engine"):
        ids = {line.get("request_id") for line in components.log(command)}
        assert {"order-17", made} <= ids, f"{command} logs no line about the request"
