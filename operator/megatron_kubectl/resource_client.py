"""The API requests of the command line. They read resources, patch desired states and wait for changes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from types import TracebackType
from typing import Any, Self

from megatron_kubectl.proxy import MERGE_PATCH, ClusterError, ContextQuery, KubectlProxy, rejection
from megatron_kubectl.resource_view import is_settled
from megatron_operator.cluster.kinds import LEASE, POD, RESOURCE
from megatron_operator.operator_leases import operator_leases, operator_problem
from megatron_operator.resource.names import CRD_NAME, LABEL_INSTANCE
from megatron_runtime.protocol import strict_json as json

WATCH_SECONDS = 30
LIST_CHUNK = 500
MANAGER = "kubectl-megatron"

Object = dict[str, Any]


def current_context(context: str | None) -> tuple[str, str]:
    """Return the name and the namespace of a context of the kubeconfig.

    context: None means the current context.

    Raises ClusterError if the context or the kubeconfig does not exist.
    """
    return ContextQuery(context).result()


class ResourceClient:
    """Access to the MegatronInference resources of one namespace with the user's kubeconfig, until close() is called.

    Raises:
        ClusterError: kubectl is missing, or there is no usable kubeconfig.
    """

    def __init__(self, *, namespace: str | None = None, context: str | None = None) -> None:
        # Start this program at the same time as the proxy.
        query = ContextQuery(context) if namespace is None else None
        try:
            self.api = KubectlProxy(context=context)
        except ClusterError:
            if query is not None:
                query.result()  # raise the error of the query, which is more exact
            raise
        try:
            self.namespace: str = query.result()[1] if query is not None else str(namespace)
        except ClusterError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self.api.close()

    def _call(self, method: str, name: str, body: Object | None = None) -> Object:
        about = f"{CRD_NAME} {self.namespace}/{name}"
        query = None if body is None else {"fieldManager": MANAGER}
        path = RESOURCE.path(self.namespace, name)
        try:
            return self.api.request(method, path, query=query, body=body, content_type=MERGE_PATCH, about=about)
        except ClusterError as error:
            if error.code == 404:
                raise ClusterError(f"{about}: no such resource", code=404) from error
            raise

    def list_all(self, path: str, *, about: str, **query: Any) -> list[Object]:
        """Return all objects of the collection at `path`. about: name of the collection for messages."""
        items: list[Object] = []
        token: str | None = None
        while True:
            page = self.api.request("GET", path, query={**query, "limit": LIST_CHUNK, "continue": token}, about=about)
            items += page.get("items") or []
            token = (page.get("metadata") or {}).get("continue")
            if not token:
                return items

    def resources(self, *, all_namespaces: bool) -> list[Object]:
        """Return the MegatronInference resources of the client's namespace, or of all namespaces."""
        namespace = None if all_namespaces else self.namespace
        about = f"{CRD_NAME} in {'all namespaces' if all_namespaces else f'namespace {namespace}'}"
        return self.list_all(RESOURCE.path(namespace), about=about)

    def pods(self, name: str) -> list[Object]:
        """Return all pods of a resource."""
        about = f"pods of {self.namespace}/{name}"
        return self.list_all(POD.path(self.namespace), about=about, labelSelector=f"{LABEL_INSTANCE}={name}")

    def operator_problem(self) -> str | None:
        """Return the problem if no operator serves this namespace, or if several operators do.

        Returns None if exactly one operator serves it.
        """
        # Use the time in the API server's answer, because the user's clock may differ from the operators' clocks.
        with self.api.open("GET", LEASE.path(None), seconds=30) as answer:
            text = answer.read()
        if answer.status in (401, 403):
            return operator_problem(None, self.namespace, datetime.now(UTC))
        if answer.status != 200:
            raise rejection(answer.status, text, about="leases.coordination.k8s.io")
        date = answer.headers.get("Date")
        now = parsedate_to_datetime(date) if date else datetime.now(UTC)
        return operator_problem(operator_leases(json.loads(text)["items"]), self.namespace, now)

    def get(self, name: str) -> Object:
        return self._call("GET", name)

    def patch_spec(self, name: str, **fields: Any) -> Object:
        """Merge-patch fields of the spec, and return the changed resource."""
        return self._call("PATCH", name, {"spec": fields})

    def annotate(self, name: str, annotations: dict[str, str]) -> Object:
        """Merge-patch annotations, and return the changed resource."""
        return self._call("PATCH", name, {"metadata": {"annotations": annotations}})

    def watch(self, path: str, *, version: str, seconds: float, **query: Any) -> Iterator[Object]:
        """Yield the watch events of a collection after the resource version `version`, for at most `seconds`."""
        options = {"watch": "true", "resourceVersion": version, "timeoutSeconds": max(1, int(seconds))}
        with self.api.open("GET", path, query={**query, **options}, seconds=seconds + 30) as answer:
            if answer.status != 200:
                raise rejection(answer.status, answer.read(), about=path)
            for line in answer:
                if line.strip():
                    yield json.loads(line)

    def versions(self, name: str, *, timeout_seconds: float) -> Iterator[Object]:
        """Yield the resource, then each of its new versions, until the timeout.

        Raises:
            ClusterError: the resource is deleted, or a request fails.
        """
        deadline = time.monotonic() + timeout_seconds
        resource = self.get(name)
        yield resource
        path, own = RESOURCE.path(self.namespace), f"metadata.name={name}"
        while (left := deadline - time.monotonic()) > 0:
            version = resource["metadata"]["resourceVersion"]
            begun = time.monotonic()
            seconds = min(left, WATCH_SECONDS)
            for event in self.watch(path, version=version, seconds=seconds, fieldSelector=own):
                if event["type"] == "DELETED":
                    raise ClusterError(f"{name}: was deleted")
                if event["type"] == "ERROR":
                    # The version is too old for the API server, so start again with the current version.
                    resource = self.get(name)
                    yield resource
                    break
                resource = event["object"]
                yield resource
                if time.monotonic() > deadline:
                    return
            if time.monotonic() - begun < 0.1:
                time.sleep(0.5)  # avoid a busy loop if the API server ends watches at once

    def wait(self, name: str, done: Callable[[Object], bool], *, goal: str, timeout_seconds: float) -> Object:
        """Wait until `done` returns true for the resource, and return the resource.

        goal: description of the goal that can follow "not" in a message.

        Raises:
            ClusterError: the timeout has expired; the message names what the resource waits for.
        """
        resource: Object = {}
        for resource in self.versions(name, timeout_seconds=timeout_seconds):
            if done(resource):
                return resource
        waiting = ((resource.get("status") or {}).get("plan") or {}).get("waitingOn", "the operator")
        raise ClusterError(f"{name}: not {goal} after {timeout_seconds:g} s: waiting for {waiting}")

    def wait_state(self, name: str, state: str, *, timeout_seconds: float) -> Object:
        """Wait until the resource has settled in `state`, and return the resource.

        The resource has settled when the operator has processed its current spec and reports that every rank confirmed
        `state`.
        """

        def reached(resource: Mapping[str, Any]) -> bool:
            return is_settled(resource) and resource["spec"].get("desiredState", "Running") == state

        return self.wait(name, reached, goal=state, timeout_seconds=timeout_seconds)
