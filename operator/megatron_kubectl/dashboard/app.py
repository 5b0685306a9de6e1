"""The web application of the dashboard, which serves a page on loopback and answers the page's requests.

The page's files contain nothing secret. All other data travels over one WebSocket per page, because browsers do not
count WebSockets against their limit of connections per server. The first message of a page contains the token of this
process. The URL has the token in its fragment, which browsers send to no server and in no Referer header. A page of
another site does not know the token. The application also rejects requests with other host names (Host) and origins
(Origin).
"""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import hmac
import logging
import re
import secrets
import socket
import time
import webbrowser
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from typing import Any

import aiohttp
import uvicorn
import yaml
from kubernetes.aio.client import Configuration
from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse
from starlette.routing import Mount, WebSocketRoute
from starlette.staticfiles import StaticFiles
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from megatron_kubectl.dashboard.watching import Observers, ResourceObserver
from megatron_kubectl.proxy import ClusterError, KubectlProxy
from megatron_kubectl.resource_view import summary
from megatron_kubectl.samples import INTERVAL_SECONDS
from megatron_operator.cluster.api import KubeApi, KubeApiError, Object
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
MAX_MESSAGE_BYTES = 1 << 20
LOG_LINES = 500
"""Number of existing lines of a log that the page shows before new lines."""
LOG_SILENCE_SECONDS = 3600.0
LOGIN_SECONDS = 30.0
"""Seconds within which a page must send the token."""
GO_SECONDS = 5.0
"""Seconds within which a page must confirm a verb."""
BEAT_SECONDS = 5.0
"""Interval of empty messages, in seconds. A page that receives none concludes that this process has stopped."""
BAD_TOKEN, BAD_MESSAGE = 4401, 4400
"""Close codes of a WebSocket for a wrong token and for a malformed message."""
_DNS_NAME = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*")
_HEADERS = {
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}

_HOSTS = (HOST, "localhost")

Request = Mapping[str, Any]
logger = logging.getLogger(__name__)


def policy(port: int) -> str:
    """Return the Content-Security-Policy of the page.

    The policy names the WebSocket's address, because not every browser includes it in 'self'.
    """
    sockets = " ".join(f"ws://{name}:{port}" for name in _HOSTS)
    return (
        f"default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self' {sockets}; img-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'; "
        "trusted-types 'none'"
    )


class RejectedError(Exception):
    """The error for a request that the dashboard rejects. The page shows the message to the user."""


@dataclass(frozen=True, slots=True)
class DashboardSettings:
    """Settings of the dashboard.

    port:         port on which the dashboard listens.
    namespace:    namespace that is shown first; empty means all namespaces.
    context:      name of the kubeconfig context, for display.
    verb_seconds: maximum time, in seconds, that the API server may take to answer a verb.
    """

    port: int
    namespace: str
    context: str
    token: str = field(default_factory=lambda: secrets.token_urlsafe(32))
    sample_seconds: float = INTERVAL_SECONDS
    verb_seconds: float = 10.0

    @property
    def url(self) -> str:
        return self.url_with(self.token)

    def url_with(self, token: str) -> str:
        return f"http://{HOST}:{self.port}/#token={token}"


class Guard:
    """Middleware that checks Host and Origin of each request, and adds the security headers to each response."""

    def __init__(self, app: ASGIApp, *, settings: DashboardSettings) -> None:
        self._app = app
        self._hosts = frozenset(f"{name}:{settings.port}" for name in _HOSTS)
        headers = {**_HEADERS, "Content-Security-Policy": policy(settings.port)}
        self._headers = [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], *self._headers]}
            await send(message)

        error = None if scope["type"] == "lifespan" else self._error(Headers(scope=scope))
        app = self._app if error is None else PlainTextResponse(error, status_code=403)
        await app(scope, receive, with_headers)

    def _error(self, headers: Headers) -> str | None:
        host, origin = headers.get("host", ""), headers.get("origin")
        if host not in self._hosts:
            return f"Host {host!r} is not this dashboard: open the URL that the command printed"
        if origin is not None and origin not in {f"http://{each}" for each in self._hosts}:
            return f"Origin {origin!r} may not use this dashboard"
        return None


class Dashboard:
    """The handlers of the requests that pages can send.

    A handler in `reads` is an asynchronous generator, which yields the values to send to the page.
    """

    def __init__(self, api: KubeApi, settings: DashboardSettings) -> None:
        self._api = api
        self.settings = settings
        self.single_use_token = secrets.token_urlsafe(32)
        """Token for the browser that the command opens. Other users of the machine can see the browser's arguments."""
        self._observers = Observers(api, interval=settings.sample_seconds)
        self.reads: dict[str, Callable[[Request], AsyncGenerator[Any]]] = {
            "list": self.list_resources,
            "observe": self.observe,
            "log": self.log,
            "plan": self.plan,
        }
        self.verbs: dict[str, Callable[[Request], Object]] = {
            "set-state": set_state,
            "scale": scale,
            "restart": restart,
        }

    def session(self, token: Any) -> Object | None:
        """Return the first message to a page, or None if the page's token is wrong."""
        settings = self.settings
        given = token.encode() if isinstance(token, str) else b""
        if hmac.compare_digest(given, self.single_use_token.encode()):
            self.single_use_token = secrets.token_urlsafe(32)
        elif not hmac.compare_digest(given, settings.token.encode()):
            return None
        shown = {"namespace": settings.namespace, "context": settings.context, "seconds": settings.verb_seconds}
        return {**shown, "token": settings.token}

    def application(self) -> Starlette:
        """Return the ASGI application of the dashboard."""
        files = resources.files(__package__).joinpath("static")
        app = Starlette(
            routes=[
                WebSocketRoute("/api/socket", lambda websocket: PageConnection(self, websocket).serve()),
                Mount("/", StaticFiles(directory=str(files), html=True)),
            ],
            lifespan=self._life,
        )
        app.add_middleware(Guard, settings=self.settings)
        return app

    @contextlib.asynccontextmanager
    async def _life(self, app: Starlette) -> AsyncIterator[None]:
        yield
        await self._observers.close()

    async def list_resources(self, request: Request) -> AsyncGenerator[Object]:
        """Yield the list of resources of a namespace, or of all namespaces, and then each change of the list."""
        namespace = _dns_name(request, "namespace") if request.get("namespace") else None
        async for change in watch(self._api, RESOURCE.path(namespace), {}):
            if change.error is not None:
                yield {"kind": "error", "error": str(change.error)}
            else:
                yield {"kind": change.kind, "resources": [summary(each) for each in change.objects]}

    async def observe(self, request: Request) -> AsyncGenerator[Object]:
        """Yield the state, events, pods and metrics of one resource, and then each change of them."""
        async with contextlib.aclosing(self._observer(request).frames()) as frames:
            async for frame in frames:
                yield frame

    async def log(self, request: Request) -> AsyncGenerator[str]:
        """Yield the log of a container of one of the resource's pods, in chunks of text."""
        observer = self._observer(request)
        pod, container = request.get("pod"), request.get("container")
        if not isinstance(pod, str) or not observer.has_pod(pod):
            raise RejectedError(f"pod {pod!r} does not belong to {observer.namespace}/{observer.name}")
        path = POD.path(observer.namespace, pod, subresource="log")
        query = {"container": container, "follow": "true", "tailLines": LOG_LINES}
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        begun = False
        try:
            async with stream(self._api, path, query=query, silence_seconds=LOG_SILENCE_SECONDS) as answer:
                begun = True
                async for chunk in answer.content.iter_any():
                    yield decoder.decode(chunk)
        except KubeApiError as error:
            if not begun:
                raise
            yield f"\nThe log ended unexpectedly: {printable(str(error))}\n"

    async def plan(self, request: Request) -> AsyncGenerator[Object]:
        """Yield the changes that the edited spec in the request would cause, as `megatron-operator plan` shows them."""
        text = request.get("spec")
        try:
            spec = yaml.safe_load(text) if isinstance(text, str) else None
        except yaml.YAMLError as error:
            raise RejectedError(f"spec: is not YAML: {error}") from error
        if not isinstance(spec, dict):
            raise RejectedError("spec: is not a mapping; give the fields of the spec in YAML")
        namespace, name = _names(request)
        present = await self._api.request("GET", RESOURCE.path(namespace, name))
        try:
            old = resource_of(present, origin=f"{namespace}/{name} in the cluster")
            new = resource_of({**present, "spec": spec}, origin="the edited spec")
            # The plan lacks the operator's pod policy, whose flags are not known here.
            settings = Settings(runtime_image=DEFAULT_RUNTIME_IMAGE, pod_policy=None)
            planned = preview(old.present_context(settings), new.present_context(settings))
        except (ResourceFileError, RenderError) as error:
            raise RejectedError(str(error)) from error
        changes = [{"verb": "set", "child": field, "field": "", "restarts": False} for field in planned.fields]
        changes += [
            {"verb": each.verb, "child": each.child, "field": each.field, "restarts": each.restarts}
            for each in planned.changes
        ]
        engines = [each.child.split()[-1] for each in planned.changes if each.restarts and "StatefulSet" in each.child]
        yield {"changes": changes, "steps": list(planned.steps), "restarts": engines}

    def _observer(self, request: Request) -> ResourceObserver:
        return self._observers.get(*_names(request))

    async def patch(self, request: Request, body: Object) -> Object:
        """Merge-patch the resource with `body`, and return an object with the resource's new generation.

        A request that times out is cancelled.
        """
        path, seconds = RESOURCE.path(*_names(request)), self.settings.verb_seconds
        query, merge = {"fieldManager": MANAGER}, "application/merge-patch+json"
        try:
            async with asyncio.timeout(seconds):
                for tries in (1, 2):
                    try:
                        resource = await self._api.request(
                            "PATCH", path, body=body, query=query, content_type=merge, expect_continue=True
                        )
                        return {"generation": resource["metadata"].get("generation")}
                    except KubeApiError as error:
                        if error.code != 401 or tries == 2:  # after a 401, kubectl obtains new credentials
                            raise
        except TimeoutError:
            pass
        raise RejectedError(
            f"the API server did not answer within {seconds:g} s, and the request was cancelled; the state shows "
            "whether it was executed before"
        )


def set_state(request: Request) -> Object:
    """Return the patch that sets spec.desiredState."""
    state = request.get("state")
    if state not in list(DesiredState):
        raise RejectedError(f"state: is {state!r}; use one of {', '.join(DesiredState)}")
    return {"spec": {"desiredState": state}}


def scale(request: Request) -> Object:
    """Return the patch that sets spec.replicas.

    The scale subresource is not used, because its response does not have the resource's generation.
    """
    replicas = request.get("replicas")
    if not isinstance(replicas, int) or isinstance(replicas, bool) or replicas < 0:
        raise RejectedError(f"replicas: is {replicas!r}; use a number of engines, 0 or more")
    return {"spec": {"replicas": replicas}}


def restart(request: Request) -> Object:
    """Return the patch that resets the restart budgets, like `kubectl megatron restart`."""
    return {"metadata": {"annotations": {ANNOTATION_RESTARTED: stamp(datetime.now(UTC))}}}


class PageConnection:
    """The connection of one page, which sends requests as JSON over one WebSocket.

    The page first sends its token, as `{"token": ...}`, and then requests: `{"id": NUMBER, "do": NAME, ...}`. Each
    answer contains the number of its request. This process answers a request with any number of `value` messages, and
    then with `done` or `error`. The page cancels a request with `{"id": NUMBER, "end": true}`.

    A verb is executed only if the page confirms it. This process sends `ask`, and a page that still waits for the
    answer sends `{"id": NUMBER, "go": true}`. A verb that was delayed in a buffer is therefore not executed later.
    """

    def __init__(self, dashboard: Dashboard, websocket: WebSocket) -> None:
        self._dashboard = dashboard
        self._websocket = websocket
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._asked: dict[int, asyncio.Future[None]] = {}

    async def serve(self) -> None:
        """Answer requests until the page closes the connection."""
        await self._websocket.accept()
        beat = asyncio.create_task(self._beat())
        code, reason = BAD_TOKEN, "the token is missing or wrong: open the URL that the command printed"
        try:
            async with asyncio.timeout(LOGIN_SECONDS):
                session = self._dashboard.session((await self._receive()).get("token"))
            if session is not None:
                await self._send({"session": session})
                while True:
                    self._take(await self._receive())
        except ValueError as error:
            code, reason = BAD_MESSAGE, str(error)[:100]
        except TimeoutError:
            pass
        except WebSocketDisconnect:
            code = 0
        finally:
            tasks = [beat, *self._tasks.values()]
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        if code:
            with contextlib.suppress(WebSocketDisconnect):
                await self._websocket.close(code, reason)

    async def _receive(self) -> Object:
        """Return the next message from the page.

        Raises:
            ValueError: the message is not a JSON object.
            WebSocketDisconnect: the page has closed the connection.
        """
        message = await self._websocket.receive()
        if message["type"] == "websocket.disconnect":
            raise WebSocketDisconnect(message["code"])
        received = json.loads(message.get("text") or "")
        if not isinstance(received, dict):
            raise ValueError("the message is not a JSON object")
        return received

    async def _send(self, message: Object) -> None:
        await self._websocket.send_text(json.dumps(message))

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            await self._send({})

    def _take(self, message: Request) -> None:
        """Start, continue or cancel the request that a message names. Raises ValueError for a malformed message."""
        number = message.get("id")
        if not isinstance(number, int):
            raise ValueError("id: is missing or not a number")
        if "go" in message or "end" in message:
            if "end" in message and number in self._tasks:
                self._tasks[number].cancel()
            elif (asked := self._asked.pop(number, None)) is not None:
                asked.set_result(None)
        elif number in self._tasks:
            raise ValueError(f"id: {number} is in use")
        else:
            task = self._tasks[number] = asyncio.create_task(self._answer(number, message))
            task.add_done_callback(lambda _: self._tasks.pop(number, None))

    async def _answer(self, number: int, request: Request) -> None:
        end: Object = {"id": number, "done": True}
        try:
            async with contextlib.aclosing(self._values(number, request)) as values:
                async for value in values:
                    await self._send({"id": number, "value": value})
        except (RejectedError, KubeApiError) as error:
            end = {"id": number, "error": str(error)}
        except WebSocketDisconnect:
            return
        except Exception as error:
            logger.exception("the request %s failed", request.get("do"))
            end = {"id": number, "error": f"the dashboard failed: {error!r}"}
        with contextlib.suppress(WebSocketDisconnect):
            await self._send(end)

    def _values(self, number: int, request: Request) -> AsyncGenerator[Any]:
        name = request.get("do")
        if name in self._dashboard.reads:
            return self._dashboard.reads[name](request)
        if name in self._dashboard.verbs:
            return self._execute(number, request, self._dashboard.verbs[name](request))
        raise RejectedError(
            f"do: is {name!r}; use one of {', '.join((*self._dashboard.reads, *self._dashboard.verbs))}"
        )

    async def _execute(self, number: int, request: Request, body: Object) -> AsyncGenerator[Object]:
        """Ask the page to confirm a verb, then change the resource, and yield its new generation."""
        _names(request)
        begun = time.monotonic()
        asked = self._asked[number] = asyncio.get_running_loop().create_future()
        await self._send({"id": number, "ask": True})
        await asyncio.wait({asked}, timeout=GO_SECONDS)
        # Check the time again, because this process may have been suspended meanwhile.
        if self._asked.pop(number, None) is not None or time.monotonic() - begun > GO_SECONDS:
            raise RejectedError(f"not executed: the page did not repeat the request within {GO_SECONDS:g} s")
        yield await self._dashboard.patch(request, body)


def _names(request: Request) -> tuple[str, str]:
    """Return the namespace and the name of the resource that a request names.

    Raises RejectedError if either is not a valid DNS name.
    """
    return _dns_name(request, "namespace"), _dns_name(request, "name")


def _dns_name(request: Request, field_name: str) -> str:
    """Return the DNS name in the field `field_name` of a request. A DNS name is safe in the path of an API request.

    Raises:
        RejectedError: the field has no valid DNS name.
    """
    value = request.get(field_name)
    if not isinstance(value, str) or not _DNS_NAME.fullmatch(value):
        raise RejectedError(f"{field_name}: {value!r} is not the name of an object of Kubernetes")
    return value


class PageProtocol(HttpProtocol):
    """An HTTP connection that can become a WebSocket."""

    def _should_upgrade(self) -> bool:
        return self._get_upgrade() == b"websocket"


class DashboardServer(uvicorn.Server):
    """A server of the dashboard, which serves on a bound socket until SIGINT or SIGTERM."""

    def __init__(self, dashboard: Dashboard) -> None:
        super().__init__(
            uvicorn.Config(
                dashboard.application(),
                http=PageProtocol,
                ws="wsproto",
                ws_max_size=MAX_MESSAGE_BYTES,
                ws_per_message_deflate=False,
                log_level="warning",
                timeout_graceful_shutdown=1,
                access_log=False,
            )
        )


def behind(proxy_socket: Path) -> Configuration:
    """Return the configuration of an API client that connects through `kubectl proxy`.

    Call this function while an event loop runs.

    proxy_socket: Unix socket of the proxy.
    """
    configuration = Configuration()
    configuration.host = "http://localhost"
    connector = aiohttp.UnixConnector(str(proxy_socket), limit=0)
    configuration.client_session_kwargs = {"connector": connector, "trust_env": False}
    return configuration


async def serve(
    *, namespace: str, context: str | None, shown_context: str, port: int, opens_browser: bool, say: Any
) -> None:
    """Serve the dashboard until SIGINT or SIGTERM.

    Args:
        namespace:     namespace that is shown first; empty means all namespaces.
        context:       context of the kubeconfig; None means the current context.
        shown_context: name of the context, for display on the page.
        port:          port on loopback; 0 means any free port.
        say:           function that prints a line.

    Raises:
        ClusterError: there is no usable kubeconfig, or kubectl has exited.
        OSError: the port is in use.
    """
    with socket.create_server((HOST, port)) as listener, KubectlProxy(context=context) as proxy:
        settings = DashboardSettings(listener.getsockname()[1], namespace, shown_context)
        configuration = behind(proxy.socket)
        async with configuration.client_session_kwargs["connector"], KubeApi(configuration) as api:
            dashboard, loop, ended = Dashboard(api, settings), asyncio.get_running_loop(), asyncio.Event()
            server = DashboardServer(dashboard)

            def end() -> None:
                loop.remove_reader(proxy.output)
                ended.set()
                server.should_exit = True

            loop.add_reader(proxy.output, end)
            say(f"dashboard of {shown_context}: {settings.url}")
            if opens_browser:
                webbrowser.open(settings.url_with(dashboard.single_use_token))
            await server.serve(sockets=[listener])
            if ended.is_set():
                raise ClusterError(f"kubectl proxy has ended: {proxy.errors()}; start the dashboard again")
