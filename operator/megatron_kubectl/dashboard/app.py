"""The web application of the dashboard: a page on loopback and the few requests that it may send.

The page's files contain nothing secret. Every request under /api needs the token of this process, which the URL carries
in its fragment, so that no server, log or Referer header receives it. A page of another site can neither send the token
nor reach the application by another host name (Host) or origin (Origin).
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import re
import secrets
import socket
import webbrowser
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import resources
from typing import Any, TypeVar

import uvicorn
import yaml
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from megatron_kubectl.dashboard.watching import Observers, ResourceObserver
from megatron_kubectl.resource_view import summary
from megatron_kubectl.samples import INTERVAL_SECONDS
from megatron_operator.cluster.api import KubeApi, KubeApiError, Object
from megatron_operator.cluster.auth import load_configuration
from megatron_operator.cluster.kinds import POD, RESOURCE
from megatron_operator.cluster.watching import stream, watch
from megatron_operator.manifest_file import ResourceFileError, resource_of
from megatron_operator.render.compare import RenderError, preview
from megatron_operator.resource.names import ANNOTATION_RESTARTED
from megatron_operator.resource.settings import DEFAULT_RUNTIME_IMAGE, Settings
from megatron_operator.resource.states import DesiredState
from megatron_operator.resource.text import printable, stamp
from megatron_runtime.process.http_framing import HttpProtocol
from megatron_runtime.protocol import strict_json as json

HOST = "127.0.0.1"
MANAGER = "kubectl-megatron"
MAX_BODY_BYTES = 1 << 20
LOG_LINES = 500
"""Lines of a log before those that are followed."""
LOG_SILENCE_SECONDS = 3600.0
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self'; base-uri 'none'; "
    "form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; trusted-types 'none'"
)
_DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_HEADERS = {
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}


_Part = TypeVar("_Part", str, bytes)


class RejectedError(Exception):
    """A request that is answered with a status code and a message for the user."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class DashboardSettings:
    """port: where it listens. namespace: shown first; empty means all. context: of the kubeconfig, as shown."""

    port: int
    namespace: str
    context: str
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    sample_seconds: float = INTERVAL_SECONDS

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}/#token={self.token}"


class Guard:
    """Checks Host, Origin and token of each request, and adds the security headers to each answer."""

    def __init__(self, app: ASGIApp, *, settings: DashboardSettings) -> None:
        self._app = app
        self._hosts = frozenset(f"{name}:{settings.port}" for name in (HOST, "localhost"))
        self._authorization = f"Bearer {settings.token}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                added = [(name.lower().encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *added]}
            await send(message)

        error = self._rejection(scope["path"], Headers(scope=scope))
        app = self._app if error is None else _failure(error)
        await app(scope, receive, with_headers)

    def _rejection(self, path: str, headers: Headers) -> RejectedError | None:
        host = headers.get("host", "")
        if host not in self._hosts:
            return RejectedError(403, f"Host {host!r} is not this dashboard: open the URL that the command printed")
        origin = headers.get("origin")
        if origin is not None and origin not in {f"http://{each}" for each in self._hosts}:
            return RejectedError(403, f"Origin {origin!r} may not use this dashboard")
        if not path.startswith("/api/"):
            return None
        given = headers.get("authorization", "").encode()
        if not hmac.compare_digest(given, self._authorization):
            return RejectedError(401, "the token is missing or wrong: open the URL that the command printed")
        return None


def _json(value: Any, status_code: int = 200) -> Response:
    return Response(json.dumps(value), status_code=status_code, media_type="application/json")


def _failure(error: RejectedError | KubeApiError) -> Response:
    """Return the answer of an error. The API server's codes are passed on; without its answer the code is 502."""
    return _json({"error": str(error)}, status_code=error.code or 502)


class Dashboard:
    """The handlers of the requests of the page."""

    def __init__(self, api: KubeApi, settings: DashboardSettings) -> None:
        self._api = api
        self._settings = settings
        self._observers = Observers(api, interval=settings.sample_seconds)
        self._closing = asyncio.Event()

    def close(self) -> None:
        """End the open streams, for which a shutdown would wait."""
        self._closing.set()

    def application(self) -> Starlette:
        """Return the application."""
        one = "/api/resources/{namespace}/{name}"
        files = resources.files(__package__).joinpath("static")
        app = Starlette(
            routes=[
                Route("/api/session", self.session),
                Route("/api/resources", self.list_resources),
                Route(one, self.observe),
                Route(f"{one}/logs", self.logs),
                Route(f"{one}/desired-state", self.set_state, methods=["POST"]),
                Route(f"{one}/scale", self.scale, methods=["POST"]),
                Route(f"{one}/restart", self.restart, methods=["POST"]),
                Route(f"{one}/plan", self.plan, methods=["POST"]),
                Mount("/", StaticFiles(directory=str(files), html=True)),
            ],
            exception_handlers={RejectedError: _on_error, KubeApiError: _on_error},
            lifespan=self._life,
        )
        app.add_middleware(Guard, settings=self._settings)
        return app

    @contextlib.asynccontextmanager
    async def _life(self, app: Starlette) -> AsyncIterator[None]:
        yield
        await self._observers.close()

    async def session(self, request: Request) -> Response:
        return _json({"namespace": self._settings.namespace, "context": self._settings.context})

    async def list_resources(self, request: Request) -> Response:
        """Stream the resources of a namespace, or of all: first all of them, then each change."""
        given = request.query_params.get("namespace", "")
        namespace = _dns_name("namespace", given) if given else None

        async def frames() -> AsyncGenerator[Object]:
            async for change in watch(self._api, RESOURCE.path(namespace), {}):
                if change.error is not None:
                    yield {"kind": "error", "error": str(change.error)}
                else:
                    yield {"kind": change.kind, "resources": [summary(each) for each in change.objects]}

        return self._stream(frames())

    async def observe(self, request: Request) -> Response:
        """Stream everything about one resource."""
        return self._stream(self._observer(request).frames())

    async def logs(self, request: Request) -> Response:
        """Stream the log of a container of one of the resource's pods, as text."""
        observer = self._observer(request)
        pod, container = request.query_params.get("pod", ""), request.query_params.get("container") or None
        if not observer.has_pod(pod):
            raise RejectedError(404, f"pod {pod!r} does not belong to {observer.namespace}/{observer.name}")
        path = POD.path(observer.namespace, pod, subresource="log")
        query = {"container": container, "follow": "true", "tailLines": LOG_LINES}
        stack = contextlib.AsyncExitStack()
        answer = await stack.enter_async_context(
            stream(self._api, path, query=query, silence_seconds=LOG_SILENCE_SECONDS)
        )

        async def text() -> AsyncGenerator[bytes]:
            try:
                async with stack:
                    async for chunk in answer.content.iter_any():
                        yield chunk
            except KubeApiError as error:
                yield f"\nThe log broke off: {printable(str(error))}\n".encode()

        return StreamingResponse(self._until_closing(text()), media_type="text/plain; charset=utf-8")

    async def set_state(self, request: Request) -> Response:
        """Patch spec.desiredState."""
        state = (await _body(request)).get("state")
        if state not in list(DesiredState):
            raise RejectedError(400, f"state: is {state!r}; use one of {', '.join(DesiredState)}")
        return await self._patch(request, {"spec": {"desiredState": state}})

    async def scale(self, request: Request) -> Response:
        """Patch spec.replicas. The scale subresource would not answer with the generation."""
        replicas = (await _body(request)).get("replicas")
        if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 0:
            raise RejectedError(400, f"replicas: is {replicas!r}; use a number of engines, 0 or more")
        return await self._patch(request, {"spec": {"replicas": replicas}})

    async def restart(self, request: Request) -> Response:
        """Begin new restart budgets, as `kubectl megatron restart`."""
        annotations = {ANNOTATION_RESTARTED: stamp(datetime.now(UTC))}
        return await self._patch(request, {"metadata": {"annotations": annotations}})

    async def plan(self, request: Request) -> Response:
        """Preview what another spec would change, as `megatron-operator plan`."""
        text = (await _body(request)).get("spec")
        try:
            spec = yaml.safe_load(text) if isinstance(text, str) else None
        except yaml.YAMLError as error:
            raise RejectedError(400, f"spec: is not YAML: {error}") from error
        if not isinstance(spec, dict):
            raise RejectedError(400, "spec: is not a mapping; give the fields of the spec in YAML")
        namespace, name = _names(request)
        present = await self._api.request("GET", RESOURCE.path(namespace, name))
        try:
            old = resource_of(present, origin=f"{namespace}/{name} in the cluster")
            new = resource_of({**present, "spec": spec}, origin="the edited spec")
            # The operator applies its pod policy, whose flags are not known here.
            settings = Settings(runtime_image=DEFAULT_RUNTIME_IMAGE, pod_policy=None)
            found = preview(old.present_context(settings), new.present_context(settings))
        except (ResourceFileError, RenderError) as error:
            raise RejectedError(422, str(error)) from error
        changes = [{"verb": "set", "child": field, "field": "", "restarts": False} for field in found.fields]
        changes += [
            {"verb": each.verb, "child": each.child, "field": each.field, "restarts": each.restarts}
            for each in found.changes
        ]
        engines = [each.child.split()[-1] for each in found.changes if each.restarts and "StatefulSet" in each.child]
        return _json({"changes": changes, "steps": list(found.steps), "restarts": engines})

    def _stream(self, frames: AsyncGenerator[Object]) -> StreamingResponse:
        """Return an answer of one JSON object per line, until the dashboard closes."""

        async def lines() -> AsyncGenerator[str]:
            async with contextlib.aclosing(frames):
                async for frame in frames:
                    yield json.dumps(frame) + "\n"

        return StreamingResponse(self._until_closing(lines()), media_type="application/x-ndjson")

    async def _until_closing(self, parts: AsyncGenerator[_Part]) -> AsyncGenerator[_Part]:
        closing = asyncio.ensure_future(self._closing.wait())
        coming: asyncio.Future[_Part] | None = None
        try:
            while True:
                coming = asyncio.ensure_future(anext(parts))
                await asyncio.wait({coming, closing}, return_when=asyncio.FIRST_COMPLETED)
                if not coming.done():
                    return
                try:
                    yield coming.result()
                except StopAsyncIteration:
                    return
        finally:
            closing.cancel()
            if coming is not None:
                coming.cancel()
                await asyncio.gather(coming, return_exceptions=True)
            await parts.aclose()

    def _observer(self, request: Request) -> ResourceObserver:
        return self._observers.get(*_names(request))

    async def _patch(self, request: Request, body: Object) -> Response:
        """Merge-patch the resource; answer with its new generation."""
        path = RESOURCE.path(*_names(request))
        query, merge = {"fieldManager": MANAGER}, "application/merge-patch+json"
        found = await self._api.request("PATCH", path, body=body, query=query, content_type=merge)
        return _json({"generation": found["metadata"].get("generation")})


async def _on_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RejectedError | KubeApiError)
    return _failure(error)


def _names(request: Request) -> tuple[str, str]:
    """Return namespace and name of the resource of a request. Raises RejectedError."""
    found = request.path_params
    return _dns_name("namespace", found["namespace"]), _dns_name("name", found["name"])


def _dns_name(field_name: str, value: str) -> str:
    """Return a name that is safe in the path of a request to the API server."""
    if not _DNS_NAME.fullmatch(value):
        raise RejectedError(400, f"{field_name}: {value!r} is not the name of an object of Kubernetes")
    return value


async def _body(request: Request) -> Mapping[str, Any]:
    """Return the JSON object of a request. Raises RejectedError."""
    text = b""
    async for chunk in request.stream():
        text += chunk
        if len(text) > MAX_BODY_BYTES:
            raise RejectedError(413, f"the body is longer than {MAX_BODY_BYTES} bytes")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise RejectedError(400, f"the body is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise RejectedError(400, "the body is not a JSON object")
    return found


class DashboardServer(uvicorn.Server):
    """Serves a dashboard on a bound socket until SIGINT or SIGTERM."""

    def __init__(self, dashboard: Dashboard) -> None:
        app = dashboard.application()
        config = uvicorn.Config(
            app, http=HttpProtocol, ws="none", log_level="warning", timeout_graceful_shutdown=1, access_log=False
        )
        super().__init__(config)
        self._dashboard = dashboard

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._dashboard.close()
        await super().shutdown(sockets)


async def serve(
    *, namespace: str, context: str | None, shown_context: str, port: int, opens_browser: bool, say: Any
) -> None:
    """Serve the dashboard until SIGINT or SIGTERM.

    Args:
        namespace:     shown first; empty means all.
        context:       of the kubeconfig; None means the current one.
        shown_context: its name, for the page.
        port:          on loopback; 0 means any free one.
        say:           function that prints a line.

    Raises:
        LoginError: no usable kubeconfig.
        OSError:    the port is taken.
    """
    with socket.create_server((HOST, port)) as listener:
        settings = DashboardSettings(listener.getsockname()[1], namespace, shown_context)
        configuration = await load_configuration(kubeconfig=None, context=context, service_account=False)
        async with KubeApi(configuration) as api:
            server = DashboardServer(Dashboard(api, settings))
            say(f"dashboard of {shown_context}: {settings.url}")
            if opens_browser:
                webbrowser.open(settings.url)
            await server.serve(sockets=[listener])
