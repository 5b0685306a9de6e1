"""Checks an installation from inside the cluster, for `megatron-operator verify`, which `helm test` runs."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import aiohttp

from megatron_operator.cluster.api import KubeApi, KubeApiError
from megatron_operator.cluster.auth import LoginError, load_configuration, rejects_redirects
from megatron_operator.resource.names import API_VERSION, PLURAL
from megatron_operator.terminal import say

REQUEST_SECONDS = 30.0
RETRY_SECONDS = 1.0


class VerificationError(Exception):
    """A check still failed at the timeout. The message names the check, the last cause and the remedy."""


async def verify(
    *,
    kubeconfig: Path | None,
    context: str | None,
    operator_url: str | None,
    server_url: str | None,
    api_key: str | None,
    timeout_seconds: float,
) -> None:
    """Check the Kubernetes API, the operator at `operator_url` and the server at `server_url`.

    Components without a URL are not checked. Print one line for each successful check.

    Each check is repeated until it succeeds, or until `timeout_seconds` have passed since the start.

    Raises:
        VerificationError: a check has failed.
    """
    end = asyncio.get_running_loop().time() + timeout_seconds
    try:
        configuration = await load_configuration(kubeconfig=kubeconfig, context=context)
    except LoginError as error:
        raise VerificationError(str(error)) from error
    async with KubeApi(configuration) as api, _session() as http:
        await _until(end, "the API server serves the resource", "install the CRD", lambda: _served(api))
        if operator_url is not None:
            remedy = "read the log of the operator"
            await _until(end, "the operator is ready", remedy, lambda: _ready(http, operator_url))
        if server_url is not None:
            remedy = "read the status of the resource: kubectl megatron explain NAME"
            await _until(end, "the model answers", remedy, lambda: _answers(http, server_url, api_key))


def _session() -> aiohttp.ClientSession:
    """Return the session for requests to operator and server.

    The session follows no redirect, because requests can contain the API key.
    """
    timeout = aiohttp.ClientTimeout(total=REQUEST_SECONDS)
    return aiohttp.ClientSession(timeout=timeout, trust_env=True, trace_configs=[rejects_redirects()])


async def _until(end: float, what: str, remedy: str, check: Callable[[], Awaitable[str]]) -> None:
    loop = asyncio.get_running_loop()
    while True:
        try:
            say(f"{what}: {await check()}")
            return
        except (VerificationError, KubeApiError, aiohttp.ClientError, OSError, TimeoutError) as error:
            if loop.time() + RETRY_SECONDS > end:
                cause = str(error) or type(error).__name__
                raise VerificationError(f"check failed that {what}: {cause}; {remedy}") from error
        await asyncio.sleep(RETRY_SECONDS)


async def _served(api: KubeApi) -> str:
    """Check that the API server serves the custom resource. Return the text of the successful check.

    The check reads the discovery document, which every account may read, and which lists only established CRDs.
    """
    found = await api.request("GET", f"/apis/{API_VERSION}")
    names = {entry["name"] for entry in found["resources"]}
    if missing := {PLURAL, f"{PLURAL}/status", f"{PLURAL}/scale"} - names:
        raise VerificationError(f"{API_VERSION}: {', '.join(sorted(missing))} not served")
    return f"{API_VERSION} {PLURAL}"


async def _ready(http: aiohttp.ClientSession, url: str) -> str:
    async with http.get(f"{url.rstrip('/')}/readyz") as response:
        readiness = await _json(response)
        if response.status != 200 or readiness.get("ready") is not True:
            raise VerificationError(f"{url} is not ready: {', '.join(readiness.get('missing', ())) or response.status}")
    return url


async def _answers(http: aiohttp.ClientSession, url: str, api_key: str | None) -> str:
    """Check that a server answers, by requesting one token from its first model.

    Return the text of the successful check.
    """
    base, headers = f"{url.rstrip('/')}/v1", {"Authorization": f"Bearer {api_key}"} if api_key else {}
    async with http.get(f"{base}/models", headers=headers) as response:
        model = (await _json(response, expect=200))["data"][0]["id"]
    body = {"model": model, "prompt": "1 2 3", "max_tokens": 1}
    async with http.post(f"{base}/completions", headers=headers, json=body) as response:
        usage = (await _json(response, expect=200))["usage"]
    return f"{model} at {url}, {usage['completion_tokens']} token"


async def _json(response: aiohttp.ClientResponse, *, expect: int | None = None) -> dict[str, Any]:
    """Return the JSON object of a response.

    Raises VerificationError if the body is not a JSON object, or if the HTTP status is not `expect`.

    expect: expected HTTP status; None accepts every status.
    """
    text = await response.text()
    if expect is not None and response.status != expect:
        raise VerificationError(f"{response.url} answered {response.status}: {text[:300]}")
    try:
        found = await response.json(content_type=None)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise VerificationError(f"{response.url} answered {response.status} without a JSON object: {text[:300]}")
    return found
