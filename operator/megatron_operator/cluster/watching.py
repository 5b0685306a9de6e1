"""Lists and watches one collection forever, for the operator's stores and for the dashboard."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import aiohttp

from megatron_operator.cluster.api import JSON, METADATA_LIST, METADATA_OBJECT, KubeApi, KubeApiError, Object, rejection
from megatron_operator.cluster.nesting import decode

WATCH_SECONDS = 50.0
"""Duration of a watch before it is renewed at the same resource version."""
SILENCE_SECONDS = 5.0
"""Time beyond the duration of a watch after which a watch without a received byte is dead."""
RETRY_SECONDS = (0.5, 1.0, 2.0, 5.0, 15.0)
_GONE = 410


@dataclass(frozen=True, slots=True)
class CollectionChange:
    """A change of a watched collection, or of the state of its watch.

    kind:    "set": `objects` has all objects of the collection; "put" or "delete": `objects` has the changed or deleted
             object; "open": the server has accepted a watch; "error": the request failed with `error`.
    objects: empty if `kind` is "open" or "error".
    """

    kind: Literal["set", "put", "delete", "open", "error"]
    objects: list[Any]
    error: KubeApiError | None = None


@contextlib.asynccontextmanager
async def stream(
    api: KubeApi, path: str, *, query: Mapping[str, Any], silence_seconds: float, accept: str = JSON
) -> AsyncIterator[aiohttp.ClientResponse]:
    """Send a GET request for a stream, such as a watch or a log. Yield the response before its body is read.

    silence_seconds: time without a received byte after which the connection counts as broken.

    Raises KubeApiError.
    """
    limits = aiohttp.ClientTimeout(total=None, sock_connect=api.timeout, sock_read=silence_seconds)
    try:
        response = await api.open("GET", path, None, query, JSON, limits, accept=accept)
        async with response:
            if response.status != 200:
                raise rejection(response.status, await response.read(), response.headers)
            yield response
    except (aiohttp.ClientError, OSError, ValueError) as error:
        # The timeouts of aiohttp are OSErrors, too.
        raise KubeApiError(0, "Unreachable", f"GET {path}: {error or type(error).__name__}") from error


async def watch(
    api: KubeApi,
    path: str,
    query: Mapping[str, Any],
    *,
    project: Callable[[Object], Any] = lambda obj: obj,
    metadata_only: bool = False,
    listing: contextlib.AbstractAsyncContextManager[Any] | None = None,
    watch_seconds: float = WATCH_SECONDS,
    retry_seconds: Sequence[float] = RETRY_SECONDS,
) -> AsyncIterator[CollectionChange]:
    """Yield all objects of a collection, then each change, forever.

    If a watch ends or loses its connection, the next watch continues at the last version that was received. If the
    server rejects this version, the collection is listed again. After a failure, the generator waits with a backoff.

    project:       applied to each object while its page is read, so that a listing needs only the memory of one page.
    metadata_only: the server sends only the metadata of the objects.
    listing:       context manager that is entered during each listing, to limit concurrent listings.
    """
    failures, version = 0, ""
    while True:
        try:
            if not version:
                objects: list[Any] = []
                listed = ""
                async with listing or contextlib.nullcontext():
                    async for page in api.pages(path, query, accept=METADATA_LIST if metadata_only else JSON):
                        listed = page["metadata"]["resourceVersion"]
                        objects += [project(item) for item in page.get("items") or ()]
                version = listed
                yield CollectionChange("set", objects)
            begun = version
            options = {"watch": "true", "allowWatchBookmarks": "true", "timeoutSeconds": round(watch_seconds)}
            async with stream(
                api,
                path,
                query={**query, **options, "resourceVersion": version},
                silence_seconds=watch_seconds + SILENCE_SECONDS,
                accept=METADATA_OBJECT if metadata_only else JSON,
            ) as answer:
                failures = 0
                yield CollectionChange("open", [])
                async for event in _events(answer):
                    item = event.get("object") or {}
                    if event.get("type") == "ERROR":
                        code = item.get("code") or 0
                        raise KubeApiError(code, item.get("reason", ""), item.get("message", ""))
                    version = item["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        kind: Literal["put", "delete"] = "delete" if event["type"] == "DELETED" else "put"
                        yield CollectionChange(kind, [project(item)])
            if version == begun:
                # An API server that closes watches immediately must not receive requests in a busy loop.
                await asyncio.sleep(retry_seconds[0])
        except KubeApiError as error:
            if error.code:
                version = ""
            if error.code == _GONE and not failures:
                failures = 1
                continue
            yield CollectionChange("error", [], error)
            pause = retry_seconds[min(failures, len(retry_seconds) - 1)]
            await asyncio.sleep(max(pause, error.retry_after))
            failures += 1


async def _events(answer: aiohttp.ClientResponse) -> AsyncIterator[Object]:
    rest = b""
    async for chunk in answer.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.strip():
                yield decode(line)
