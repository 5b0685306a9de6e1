"""API requests of the command line tools: read a resource, patch its desired state, wait."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from megatron_operator.model.resource import GROUP, PLURAL, VERSION
from megatron_operator.operator_leases import operator_leases, operator_problem
from megatron_operator.render.context import LABEL_INSTANCE

WATCH_SECONDS = 30


class ClusterError(Exception):
    """The API server is unreachable or rejected a request. The message has the object and the cause."""


class NoSuchResourceError(ClusterError):
    """There is no resource of that name."""


def current_context(context: str | None) -> tuple[str, str]:
    """Return name and namespace of a context of the kubeconfig; None means the current one.

    Raises:
        ClusterError: there is no such context, or no kubeconfig.
    """
    from kubernetes import config

    try:
        known, active = config.list_kube_config_contexts()
    except config.ConfigException as error:
        raise ClusterError(f"no usable kubeconfig: {error}; set KUBECONFIG") from error
    found = active if context is None else next((each for each in known if each["name"] == context), None)
    if found is None:
        names = ", ".join(each["name"] for each in known)
        raise ClusterError(f"--context: the kubeconfig has no context {context!r}; use one of {names}")
    return found["name"], (found.get("context") or {}).get("namespace") or "default"


class ResourceClient:
    """Access to the resources of one namespace with the user's kubeconfig."""

    def __init__(self, *, namespace: str | None = None, context: str | None = None) -> None:
        from kubernetes import client, config

        try:
            config.load_kube_config(context=context)
        except config.ConfigException as error:
            raise ClusterError(f"no usable kubeconfig: {error}; set KUBECONFIG") from error
        self.namespace: str = namespace or current_context(context)[1]
        self._api = client.CustomObjectsApi()
        self._core = client.CoreV1Api()
        self._leases = client.CoordinationV1Api()
        self._api_exception = client.ApiException

    def _call(self, verb: str, name: str, *args: Any) -> dict[str, Any]:
        from urllib3.exceptions import HTTPError

        method = getattr(self._api, f"{verb}_namespaced_custom_object")
        try:
            found: dict[str, Any] = method(GROUP, VERSION, self.namespace, PLURAL, name, *args)
        except self._api_exception as error:
            where = f"{PLURAL}.{GROUP} {self.namespace}/{name}"
            if error.status == 404:
                raise NoSuchResourceError(f"{where}: no such resource") from error
            raise ClusterError(f"{where}: {error.status} {error.reason}: {error.body}") from error
        except HTTPError as error:
            raise ClusterError(f"the API server does not answer: {error}") from error
        return found

    def pods(self, name: str) -> list[dict[str, Any]]:
        """Return all pods of a resource."""
        from urllib3.exceptions import HTTPError

        try:
            found = self._core.list_namespaced_pod(self.namespace, label_selector=f"{LABEL_INSTANCE}={name}")
        except self._api_exception as error:
            raise ClusterError(f"pods of {self.namespace}/{name}: {error.status} {error.reason}") from error
        except HTTPError as error:
            raise ClusterError(f"the API server does not answer: {error}") from error
        items: list[dict[str, Any]] = self._core.api_client.sanitize_for_serialization(found)["items"]
        return items

    def operator_problem(self) -> str | None:
        """Return what is wrong with the operators of this namespace: none runs, or several do. None if one runs."""
        from urllib3.exceptions import HTTPError

        try:
            found, _, headers = self._leases.list_lease_for_all_namespaces_with_http_info()
        except self._api_exception as error:
            if error.status in (401, 403):
                return operator_problem(None, self.namespace, datetime.now(UTC))
            raise ClusterError(f"leases.coordination.k8s.io: {error.status} {error.reason}") from error
        except HTTPError as error:
            raise ClusterError(f"the API server does not answer: {error}") from error
        leases = operator_leases(self._leases.api_client.sanitize_for_serialization(found)["items"])
        # The user's clock may differ from that of the operators.
        said = headers.get("Date")
        return operator_problem(leases, self.namespace, parsedate_to_datetime(said) if said else datetime.now(UTC))

    def get(self, name: str) -> dict[str, Any]:
        return self._call("get", name)

    def find(self, name: str) -> dict[str, Any] | None:
        """Return the resource, or None if it does not exist."""
        try:
            return self._call("get", name)
        except NoSuchResourceError:
            return None

    def patch_spec(self, name: str, **fields: Any) -> dict[str, Any]:
        """Merge-patch fields of the spec."""
        return self._call("patch", name, {"spec": fields})

    def annotate(self, name: str, annotations: dict[str, str]) -> dict[str, Any]:
        """Merge-patch annotations."""
        return self._call("patch", name, {"metadata": {"annotations": annotations}})

    def wait_state(self, name: str, state: str, *, timeout_seconds: float) -> dict[str, Any]:
        """Wait until the operator has observed the current spec and reports `state` as settled. Return the resource.

        Raises:
            ClusterError: timeout; the message says what the resource waits for.
        """
        from kubernetes import watch

        resource = self.get(name)
        deadline = time.monotonic() + timeout_seconds
        while not _is(resource, state):
            left = deadline - time.monotonic()
            if left <= 0:
                waiting = (resource.get("status") or {}).get("plan", {}).get("waitingOn", "the operator")
                raise ClusterError(f"{name}: not {state} after {timeout_seconds:g} s: waiting for {waiting}")
            stream = watch.Watch().stream(
                self._api.list_namespaced_custom_object,
                GROUP,
                VERSION,
                self.namespace,
                PLURAL,
                field_selector=f"metadata.name={name}",
                resource_version=resource["metadata"]["resourceVersion"],
                timeout_seconds=max(1, int(min(left, WATCH_SECONDS))),
            )
            for event in stream:
                if event["type"] == "DELETED":
                    raise ClusterError(f"{name}: was deleted")
                resource = event["object"]
                if _is(resource, state):
                    break
        return resource


def _is(resource: dict[str, Any], state: str) -> bool:
    status = resource.get("status") or {}
    settled = any(
        entry["type"] == "LifecycleSettled" and entry["status"] == "True" for entry in status.get("conditions") or ()
    )
    seen = status.get("observedGeneration") == resource["metadata"]["generation"]
    return seen and settled and status.get("state") == state
