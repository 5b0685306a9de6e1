"""The HTTP application: routes, authorization, errors, probes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

import megatron_runtime
from megatron_runtime.server.auth import ApiKeys
from megatron_runtime.server.backend import Backend
from megatron_runtime.server.chat import create_chat_completion
from megatron_runtime.server.completions import create_completion
from megatron_runtime.server.console import add_console
from megatron_runtime.server.errors import ApiError, shown
from megatron_runtime.server.metrics import ServerMetrics
from megatron_runtime.server.middleware import ObserveMiddleware
from megatron_runtime.server.origin import HostMiddleware
from megatron_runtime.server.profile import start_profile, stop_profile
from megatron_runtime.server.schema import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
)
from megatron_runtime.server.service import Service
from megatron_runtime.server.settings import ServerSettings
from megatron_runtime.server.sse import ClientDisconnectedError
from megatron_runtime.server.tokens import detokenize, tokenize
from megatron_runtime.server.tools import PARSERS, ToolParser, parser_of
from megatron_runtime.tokenization import Tokenizer

logger = logging.getLogger(__name__)

_CLIENT_CLOSED_REQUEST = 499
Handler = Callable[[Service, Request], Awaitable[Response]]


def create_app(settings: ServerSettings, *, backend: Backend, tokenizer: Tokenizer) -> FastAPI:
    """Return the application; its `state.service` is what probes and shutdown look at.

    Raises ValueError for a tool-call parser that is unknown and a file of API keys that holds none, OSError for one
    that cannot be read.
    """
    service = Service(
        settings=settings,
        backend=backend,
        tokenizer=tokenizer,
        metrics=ServerMetrics(model=settings.served_name, vllm=settings.vllm_metrics),
        api_keys=ApiKeys(file=settings.api_keys_file),
        tool_parser=_tool_parser(settings.tool_call_parser, tokenizer),
    )
    app = FastAPI(
        title="megatron", version=megatron_runtime.__version__, docs_url=None, redoc_url=None, openapi_url=None
    )
    app.state.service = service
    if settings.allowed_hosts:
        app.add_middleware(HostMiddleware, allowed=settings.allowed_hosts)
    app.add_middleware(ObserveMiddleware, service=service)
    add_console(app)
    _add_probes(app, service)
    _add_internals(app, service)
    _add_models(app, service)
    for path, handler, body in (
        ("completions", create_completion, CompletionRequest),
        ("chat/completions", create_chat_completion, ChatRequest),
        ("tokenize", tokenize, TokenizeRequest),
        ("detokenize", detokenize, DetokenizeRequest),
    ):
        _add_post_route(app, service, path=path, handler=handler, body=body)
    for path, handler in (("start_profile", start_profile), ("stop_profile", stop_profile)):
        _add_post_route(app, service, path=path, handler=handler, body=None)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnectedError, _on_disconnect)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_unexpected)
    return app


def _add_probes(app: FastAPI, service: Service) -> None:
    async def livez() -> Response:
        return JSONResponse({"alive": True})

    async def readyz() -> Response:
        missing = service.missing()
        return JSONResponse({"ready": not missing, "missing": missing}, status_code=503 if missing else 200)

    async def version() -> Response:
        return JSONResponse({"version": megatron_runtime.__version__})

    app.add_api_route("/version", version, methods=["GET"])
    app.add_api_route("/livez", livez, methods=["GET", "HEAD"])
    for path in ("/readyz", "/health", "/v1/health"):
        app.add_api_route(path, readyz, methods=["GET", "HEAD"], operation_id=path.strip("/").replace("/", "_"))


def _add_internals(app: FastAPI, service: Service) -> None:
    """Routes that describe the server and its load. They need a key where keys are set; metrics may have a port of
    their own.
    """

    async def openapi(request: Request) -> Response:
        service.identify(request)
        return JSONResponse(app.openapi())

    async def metrics(request: Request) -> Response:
        service.identify(request)
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    app.add_api_route("/openapi.json", openapi, methods=["GET"], include_in_schema=False)
    if service.settings.health_port is None:
        app.add_api_route("/metrics", metrics, methods=["GET"])


def _tool_parser(name: str, tokenizer: Tokenizer) -> type[ToolParser] | None:
    if name == "auto":
        return parser_of(None if tokenizer.chat_template is None else tokenizer.chat_template.source)
    if name != "none" and name not in PARSERS:
        raise ValueError(f"there is no tool-call parser {name!r}: use auto, none or one of {', '.join(PARSERS)}")
    return PARSERS.get(name)


def _add_models(app: FastAPI, service: Service) -> None:
    def card() -> dict[str, Any]:
        return {
            "id": service.settings.served_name,
            "object": "model",
            "created": service.created,
            "owned_by": "megatron",
            "max_model_len": service.sequence_limit,
        }

    async def list_models(request: Request) -> Response:
        service.identify(request)
        return JSONResponse({"object": "list", "data": [card()]})

    async def get_model(request: Request) -> Response:
        service.identify(request)
        service.check_model(request.path_params["name"])
        return JSONResponse(card())

    app.add_api_route("/v1/models", list_models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", get_model, methods=["GET"])


def _add_post_route(
    app: FastAPI, service: Service, *, path: str, handler: Handler, body: type[BaseModel] | None
) -> None:
    async def endpoint(request: Request) -> Response:
        service.identify(request)
        return await handler(service, request)

    schema: dict[str, Any] = {}
    if body is not None:
        content = {"application/json": {"schema": body.model_json_schema()}}
        schema = {"requestBody": {"content": content, "required": True}}
    for prefix in ("/v1/", "/"):
        app.add_api_route(
            prefix + path,
            endpoint,
            methods=["POST"],
            operation_id=handler.__name__ + ("" if prefix == "/v1/" else "_unversioned"),
            openapi_extra=schema,
            include_in_schema=prefix == "/v1/",
        )


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response()


async def _on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        return ApiError(404, f"There is no {shown(request.url.path)[1:-1]} here.", code="unknown_url").response()
    if error.status_code == 405:
        refused = ApiError(
            405, f"{request.method} is not allowed for {shown(request.url.path)[1:-1]}.", code="method_not_allowed"
        )
        response = refused.response()
        response.headers.update(error.headers or {})
        return response
    return ApiError(error.status_code, str(error.detail)).response()


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


async def _on_unexpected(request: Request, error: Exception) -> Response:
    return ApiError(500, "The server failed to answer this request.", code="internal_error").response()
