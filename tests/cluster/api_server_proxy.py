"""A proxy between an operator and its API server that injects the faults of networks and servers.

It speaks plain HTTP to the operator, so only the operator's kubeconfig differs; credentials are passed on. Watches are
relayed as they arrive. A `Fault` applies to the requests that it matches, a number of times or until `heal()`. Open
watches are silenced or expired by methods of their own.
"""

from __future__ import annotations

import asyncio
import base64
import json
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import yaml
from aiohttp import web

HOP_HEADERS = frozenset(
    {"connection", "host", "keep-alive", "transfer-encoding", "content-length", "content-encoding", "accept-encoding"}
)


@dataclass(frozen=True)
class ApiRequest:
    """One request of the operator."""

    method: str
    path: str
    watch: bool

    @property
    def writes(self) -> bool:
        return self.method != "GET"

    @property
    def leads(self) -> bool:
        """True for requests for the Lease: an operator that cannot renew its Lease exits."""
        return "/leases" in self.path


@dataclass
class Fault:
    """A fault, injected into the requests that `matches` selects.

    times:  the number of requests it applies to; None means all.
    answer: status code, reason and headers that replace the API server's answer; None cuts the connection.
    after:  the API server executes the request first, and its answer is lost.
    """

    matches: Callable[[ApiRequest], bool]
    answer: tuple[int, str, dict[str, str]] | None = None
    times: int | None = None
    after: bool = False
    hit: list[ApiRequest] = field(default_factory=list)

    def takes(self, asked: ApiRequest) -> bool:
        if (self.times is not None and len(self.hit) >= self.times) or not self.matches(asked):
            return False
        self.hit.append(asked)
        return True


@dataclass(eq=False)
class _Watch:
    """One open watch. `silent`: the proxy forwards no more events and keeps the connection open."""

    response: web.StreamResponse
    silent: bool = False
    expired: asyncio.Event = field(default_factory=asyncio.Event)


class ApiProxy:
    """One listening port in front of the API server of a kubeconfig."""

    def __init__(self, kubeconfig: Path) -> None:
        self._config = yaml.safe_load(kubeconfig.read_text())
        cluster = self._config["clusters"][0]["cluster"]
        self._server = cluster["server"]
        authority = base64.b64decode(cluster["certificate-authority-data"]).decode()
        self._trust = ssl.create_default_context(cadata=authority)
        self._faults: list[Fault] = []
        self._watches: set[_Watch] = set()
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None
        self.seen: list[ApiRequest] = []
        self.tell: Callable[[ApiRequest, bytes], None] = lambda asked, body: None
        """Called with each request and its body before the proxy forwards it."""
        self.url = ""

    async def start(self) -> None:
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(ssl=self._trust, limit=0), timeout=aiohttp.ClientTimeout(total=None)
        )
        app = web.Application(client_max_size=1 << 24)
        app.router.add_route("*", "/{path:.*}", self._pass)
        # Handlers are cancelled when their client disconnects: a watch must not outlive a killed operator.
        self._runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=0.5)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    def kubeconfig(self, path: Path) -> Path:
        """Write the same kubeconfig with the proxy as its server."""
        config = json.loads(json.dumps(self._config))
        config["clusters"][0]["cluster"] = {"server": self.url}
        path.write_text(yaml.safe_dump(config))
        return path

    # --- faults ---

    def inject(self, fault: Fault) -> Fault:
        self._faults.append(fault)
        return fault

    def heal(self) -> None:
        """Remove all faults. Silenced watches stay silent."""
        self._faults.clear()

    @property
    def watches(self) -> int:
        """Number of open watches. Between two watches of a kind there is none for a moment."""
        return len(self._watches)

    def silence_watches(self) -> None:
        """Stop forwarding events on the open watches, as when a firewall drops a connection's state."""
        for watch in self._watches:
            watch.silent = True

    def expire_watches(self) -> None:
        """Close the open watches with the error 410 Expired."""
        for watch in self._watches:
            watch.expired.set()

    # --- relaying ---

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        asked = ApiRequest(request.method, request.path, request.query.get("watch") == "true")
        self.seen.append(asked)
        body = await request.read()
        self.tell(asked, body)
        fault = next((fault for fault in self._faults if fault.takes(asked)), None)
        if fault is not None and not fault.after:
            return self._fail(request, fault)
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP_HEADERS}
        assert self._session is not None
        try:
            async with self._session.request(
                request.method, f"{self._server}{request.raw_path}", data=body or None, headers=headers
            ) as answer:
                if fault is not None:
                    await answer.read()
                    return self._fail(request, fault)
                if asked.watch and answer.status == 200:
                    return await self._relay(request, answer)
                content = await answer.read()
                kept = {name: value for name, value in answer.headers.items() if name.lower() not in HOP_HEADERS}
                return web.Response(status=answer.status, body=content, headers=kept)
        except aiohttp.ClientError:
            return self._cut(request)

    async def _relay(self, request: web.Request, answer: aiohttp.ClientResponse) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": answer.headers.get("Content-Type", "application/json")})
        await response.prepare(request)
        watch = _Watch(response)
        self._watches.add(watch)
        expired = asyncio.create_task(watch.expired.wait())
        coming: asyncio.Future[bytes] = asyncio.Future()
        try:
            while True:
                coming = asyncio.ensure_future(answer.content.readany())
                await asyncio.wait({coming, expired}, return_when=asyncio.FIRST_COMPLETED)
                if expired.done():
                    end = {"type": "ERROR", "object": _status(410, "Expired")}
                    await response.write(json.dumps(end).encode() + b"\n")
                    return response
                if watch.silent:
                    # Open until the operator closes the connection, which cancels this handler.
                    await asyncio.Event().wait()
                if not (chunk := coming.result()):
                    return response
                await response.write(chunk)
        finally:
            self._watches.discard(watch)
            for waiting in (expired, coming):
                waiting.cancel()
            await asyncio.gather(expired, coming, return_exceptions=True)

    def _fail(self, request: web.Request, fault: Fault) -> web.StreamResponse:
        if fault.answer is None:
            return self._cut(request)
        code, reason, headers = fault.answer
        return web.json_response(_status(code, reason), status=code, headers=headers)

    @staticmethod
    def _cut(request: web.Request) -> web.StreamResponse:
        if request.transport is not None:
            request.transport.abort()
        return web.Response(status=500)


def _status(code: int, reason: str) -> dict[str, Any]:
    """Return the Status object of a failed request."""
    return {
        "kind": "Status",
        "apiVersion": "v1",
        "metadata": {},
        "status": "Failure",
        "message": f"{reason} by the proxy",
        "reason": reason,
        "code": code,
    }
