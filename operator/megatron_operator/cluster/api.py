"""Client of the API server. Objects are plain data.

Every request has a deadline. Errors are raised as `KubeApiError` with the server's status code, reason and message.
This module does not decide whether a write is allowed. The module `writer` checks leadership and ownership.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Mapping
from typing import Any, Self
from urllib.parse import urlencode

import aiohttp
from kubernetes.aio.client import ApiClient, ApiException, Configuration

from megatron_operator.cluster.auth import rejects_redirects
from megatron_operator.cluster.kinds import ObjectKind
from megatron_operator.cluster.nesting import decode
from megatron_operator.decision.causes import FAILED_WEBHOOK, MALFORMED_OBJECT
from megatron_runtime.protocol import strict_json as json

Object = dict[str, Any]

REQUEST_TIMEOUT_SECONDS = 10.0
"""Timeout of every request. The margin of the Lease depends on it."""
REQUESTS_AT_ONCE = 16
"""Limit of concurrent requests, not counting watches. A start has hundreds of requests, and each TLS connection takes
0.4 MiB.
"""
MAX_RETRY_AFTER_SECONDS = 60.0
PAGE_OBJECTS = 100
"""Number of objects in one page of a list. A page of StatefulSets takes about 10 MiB while it is decoded."""
JSON = "application/json"
METADATA_LIST = f"{JSON};as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"
METADATA_OBJECT = f"{JSON};as=PartialObjectMetadata;g=meta.k8s.io;v=v1"
"""Value of Accept for lists and watches of which only the metadata is read."""
NAMESPACE_TERMINATING = "NamespaceTerminating"


class KubeApiError(Exception):
    """The API server rejected a request or is unreachable. `code` is the HTTP status, or 0 if there was no response.

    retry_after: seconds of the Retry-After header, or 0 without the header.
    """

    def __init__(self, code: int, reason: str, message: str, *, retry_after: float = 0.0) -> None:
        super().__init__(f"{code} {reason}: {message}" if code else f"{reason}: {message}")
        self.code = code
        self.reason = reason
        self.message = message
        self.retry_after = retry_after

    @property
    def not_found(self) -> bool:
        return self.code == 404

    @property
    def conflict(self) -> bool:
        """Whether the object has changed since it was read, was replaced by another object, or already exists."""
        return self.code == 409

    @property
    def permanent(self) -> bool:
        """Whether the same request will fail until the object or the cluster's configuration changes."""
        if self.code == 500:
            return MALFORMED_OBJECT in self.message or FAILED_WEBHOOK in self.message
        return self.code in (400, 403, 404, 405, 409, 413, 415, 422) and not self.namespace_ends

    @property
    def namespace_ends(self) -> bool:
        """Whether the request failed because the namespace is being deleted."""
        return self.reason == NAMESPACE_TERMINATING


class KubeApi:
    """The API verbs that the operator uses. The client does not follow redirects.

    Request and response bodies are plain data. The serialisation of the official client is not used, because it takes
    longer than the request.
    """

    def __init__(self, configuration: Configuration, *, timeout: float = REQUEST_TIMEOUT_SECONDS) -> None:
        own = copy.copy(configuration)
        own.connection_pool_maxsize = 0  # no limit, because watches keep their connections
        own.trace_configs = [*(own.trace_configs or ()), rejects_redirects()]
        self._client = ApiClient(own)
        self.timeout = timeout
        self._slots = asyncio.Semaphore(REQUESTS_AT_ONCE)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._client.close()

    async def get(self, kind: ObjectKind, namespace: str | None, name: str) -> Object | None:
        """Return the object, or None if it does not exist."""
        try:
            return await self.request("GET", kind.path(namespace, name))
        except KubeApiError as error:
            if error.not_found:
                return None
            raise

    async def serves(self, api_version: str) -> bool:
        """Return whether the cluster serves an API version, such as `apps/v1`."""
        try:
            await self.request("GET", f"/apis/{api_version}")
        except KubeApiError as error:
            if error.not_found:
                return False
            raise
        return True

    async def list(
        self, kind: ObjectKind, namespace: str | None, *, selector: str | None = None, fields: str | None = None
    ) -> list[Object]:
        """Return all objects of a kind. The objects are read page by page.

        selector: label selector.
        fields:   field selector.
        """
        items: list[Object] = []
        async for page in self.pages(kind.path(namespace), {"labelSelector": selector, "fieldSelector": fields}):
            items += page.get("items", [])
        return items

    async def pages(self, path: str, query: Mapping[str, Any], *, accept: str = JSON) -> AsyncIterator[Object]:
        """Yield the pages of a collection. Each page is a Kubernetes List with up to PAGE_OBJECTS objects.

        All pages have the same resource version.
        """
        token: str | None = None
        while True:
            page = await self.request(
                "GET", path, query={**query, "limit": PAGE_OBJECTS, "continue": token}, accept=accept
            )
            yield page
            token = page.get("metadata", {}).get("continue")
            if not token:
                return

    async def create(self, kind: ObjectKind, body: Object, *, manager: str) -> Object:
        path = kind.path(body["metadata"]["namespace"])
        return await self.request("POST", path, body=body, query={"fieldManager": manager})

    async def replace(self, kind: ObjectKind, body: Object, *, manager: str) -> Object:
        """Replace the object by a PUT request, and return the new version.

        If `body` has `metadata.resourceVersion`, the API server replaces only this version of the object.
        """
        metadata = body["metadata"]
        path = kind.path(metadata["namespace"], metadata["name"])
        return await self.request("PUT", path, body=body, query={"fieldManager": manager})

    async def apply(
        self,
        kind: ObjectKind,
        body: Object,
        *,
        manager: str,
        force: bool,
        subresource: str | None = None,
        dry_run: bool = False,
    ) -> Object:
        """Apply the object server-side, and return the new version.

        If `body` has `metadata.uid` or `metadata.resourceVersion`, these values are preconditions.
        """
        metadata = body["metadata"]
        return await self.request(
            "PATCH",
            kind.path(metadata["namespace"], metadata["name"], subresource=subresource),
            body=body,
            query={
                "fieldManager": manager,
                "force": "true" if force else "false",
                "dryRun": "All" if dry_run else None,
            },
            content_type="application/apply-patch+yaml",
        )

    async def merge_patch(self, kind: ObjectKind, namespace: str, name: str, body: Object, *, manager: str) -> Object:
        return await self.request(
            "PATCH",
            kind.path(namespace, name),
            body=body,
            query={"fieldManager": manager},
            content_type="application/merge-patch+json",
        )

    async def delete(
        self, kind: ObjectKind, namespace: str, name: str, *, uid: str, grace_seconds: int | None = None
    ) -> None:
        """Delete the object with this UID, with background propagation.

        grace_seconds: overrides a pod's own grace period. With 0 the API server does not wait for the pod's kubelet.

        Raises:
            KubeApiError: 404 if the object does not exist, 409 if another object now has the name.
        """
        body = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "preconditions": {"uid": uid},
            "propagationPolicy": "Background",
            **({} if grace_seconds is None else {"gracePeriodSeconds": grace_seconds}),
        }
        await self.request("DELETE", kind.path(namespace, name), body=body)

    async def request(
        self,
        method: str,
        path: str,
        *,
        body: Object | None = None,
        query: Mapping[str, Any] | None = None,
        content_type: str = JSON,
        accept: str = JSON,
        expect_continue: bool = False,
    ) -> Object:
        """Send one request, and return the JSON object in the response.

        expect_continue: send the body only after the server has answered `100 Continue`. A server that hangs until the
            timeout never receives the body, so it cannot execute the request later.

        Raises KubeApiError for every failure, including a timeout.
        """
        try:
            async with self._slots, asyncio.timeout(self.timeout):
                response = await self.open(
                    method, path, body, query or {}, content_type, accept=accept, expect_continue=expect_continue
                )
                text = await response.read()
        except ApiException as error:
            raise KubeApiError(error.status or 0, "Error", str(error.reason)) from error
        except TimeoutError:
            raise KubeApiError(0, "Timeout", f"{method} {path}: no answer within {self.timeout:g} s") from None
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise KubeApiError(0, "Unreachable", f"{method} {path}: {error or type(error).__name__}") from error
        if not 200 <= response.status <= 299:
            raise rejection(response.status, text, response.headers)
        try:
            answer: Object = decode(text)
            return answer
        except ValueError as error:
            raise KubeApiError(0, "Unreachable", f"{method} {path}: the answer is not JSON: {error}") from error

    async def open(
        self,
        method: str,
        path: str,
        body: Object | None,
        query: Mapping[str, Any],
        content_type: str,
        limits: aiohttp.ClientTimeout | None = None,
        *,
        accept: str = JSON,
        expect_continue: bool = False,
    ) -> aiohttp.ClientResponse:
        """Send one request, and return the response before its body is read."""
        headers = {**self._client.default_headers, "Accept": accept, "Content-Type": content_type}
        if expect_continue:
            headers["Expect"] = "100-continue"
        await self._client.update_params_for_auth(headers, [], ["BearerToken"], path, method, body)
        given = {key: value for key, value in query.items() if value is not None}
        url = f"{self._client.configuration.host}{path}" + (f"?{urlencode(given)}" if given else "")
        answer = await self._client.call_api(
            method, url, header_params=headers, body=json.finite(body), _request_timeout=limits
        )
        response: aiohttp.ClientResponse = answer.response
        return response


def rejection(code: int, text: bytes, headers: Mapping[str, str]) -> KubeApiError:
    """Return the error for a response with an error status.

    The message is from the Status object in the response. If a proxy answered, the message is the proxy's text.
    """
    seconds = headers.get("Retry-After", "")
    retry_after = min(float(seconds), MAX_RETRY_AFTER_SECONDS) if seconds.isdigit() else 0.0
    try:
        status = json.loads(text)
        causes = {cause.get("reason") for cause in (status.get("details") or {}).get("causes") or ()}
        reason = NAMESPACE_TERMINATING if NAMESPACE_TERMINATING in causes else status.get("reason", "")
        return KubeApiError(code, reason, status.get("message", ""), retry_after=retry_after)
    except (ValueError, AttributeError):
        return KubeApiError(code, "Error", text[:500].decode(errors="replace"), retry_after=retry_after)
