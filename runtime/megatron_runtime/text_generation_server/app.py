"""The HTTP application: routes, authorization, errors, probes."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from importlib import resources
from typing import Any

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

import megatron_runtime
from megatron_runtime.text_generation_server.backend import Backend
from megatron_runtime.text_generation_server.chat import create_chat_completion
from megatron_runtime.text_generation_server.completions import create_completion
from megatron_runtime.text_generation_server.errors import ApiError
from megatron_runtime.text_generation_server.metrics import ServerMetrics
from megatron_runtime.text_generation_server.middleware import ObserveMiddleware
from megatron_runtime.text_generation_server.schema import ChatRequest, CompletionRequest
from megatron_runtime.text_generation_server.service import Service
from megatron_runtime.text_generation_server.settings import ServerSettings
from megatron_runtime.text_generation_server.sse import ClientDisconnectedError
from megatron_runtime.tokenization import Tokenizer

logger = logging.getLogger(__name__)

_CLIENT_CLOSED_REQUEST = 499
_CONSOLE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; frame-ancestors 'none'"
}

Handler = Callable[[Service, Request], Awaitable[Response]]


def create_app(settings: ServerSettings, *, backend: Backend, tokenizer: Tokenizer) -> FastAPI:
    """Return the application; its `state.service` is what probes and shutdown look at."""
    service = Service(
        settings=settings,
        backend=backend,
        tokenizer=tokenizer,
        metrics=ServerMetrics(model=settings.served_name, vllm=settings.vllm_metrics),
    )
    app = FastAPI(title="megatron", version=megatron_runtime.__version__, docs_url=None, redoc_url=None)
    app.state.service = service
    app.add_middleware(ObserveMiddleware, service=service)
    _add_console(app)
    _add_probes(app, service)
    _add_models(app, service)
    _add_generation(app, service, path="completions", handler=create_completion, body=CompletionRequest)
    _add_generation(app, service, path="chat/completions", handler=create_chat_completion, body=ChatRequest)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_error)
    app.add_exception_handler(ClientDisconnectedError, _on_disconnect)
    app.add_exception_handler(ClientDisconnect, _on_disconnect)
    app.add_exception_handler(Exception, _on_unexpected)
    return app


def _add_console(app: FastAPI) -> None:
    page = resources.files(__package__).joinpath("console.html").read_bytes()

    async def console() -> Response:
        return Response(page, media_type="text/html", headers=_CONSOLE_HEADERS)

    app.add_api_route("/", console, methods=["GET"], include_in_schema=False)


def _add_probes(app: FastAPI, service: Service) -> None:
    async def livez() -> Response:
        return JSONResponse({"alive": True})

    async def readyz() -> Response:
        missing = service.missing()
        return JSONResponse({"ready": not missing, "missing": missing}, status_code=503 if missing else 200)

    async def metrics() -> Response:
        return Response(generate_latest(service.metrics.registry), media_type=CONTENT_TYPE_LATEST)

    app.add_api_route("/livez", livez, methods=["GET", "HEAD"])
    app.add_api_route("/readyz", readyz, methods=["GET", "HEAD"])
    app.add_api_route("/health", readyz, methods=["GET", "HEAD"], operation_id="health")
    app.add_api_route("/metrics", metrics, methods=["GET"])


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
        service.authorize(request)
        return JSONResponse({"object": "list", "data": [card()]})

    async def get_model(request: Request) -> Response:
        service.authorize(request)
        service.check_model(request.path_params["name"])
        return JSONResponse(card())

    app.add_api_route("/v1/models", list_models, methods=["GET"])
    app.add_api_route("/v1/models/{name:path}", get_model, methods=["GET"])


def _add_generation(app: FastAPI, service: Service, *, path: str, handler: Handler, body: type[BaseModel]) -> None:
    async def endpoint(request: Request) -> Response:
        service.authorize(request)
        return await handler(service, request)

    schema = {"requestBody": {"content": {"application/json": {"schema": body.model_json_schema()}}, "required": True}}
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
        return ApiError(404, f"There is no {request.url.path} here.", code="unknown_url").response()
    if error.status_code == 405:
        refused = ApiError(405, f"{request.method} is not allowed for {request.url.path}.", code="method_not_allowed")
        response = refused.response()
        response.headers.update(error.headers or {})
        return response
    return ApiError(error.status_code, str(error.detail)).response()


async def _on_disconnect(request: Request, error: Exception) -> Response:
    return Response(status_code=_CLIENT_CLOSED_REQUEST)


async def _on_unexpected(request: Request, error: Exception) -> Response:
    return ApiError(500, "The server failed to answer this request.", code="internal_error").response()
