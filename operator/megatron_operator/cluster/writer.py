"""All writes to the API server. Only the leader writes, only to objects that its resources own, and only on known
versions.

Events of the custom resource have no owner, and are written without a known version. If an Event has the same text as
an earlier Event, only the count of the earlier Event increases.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from datetime import UTC, datetime

from megatron_operator.cluster.api import KubeApi, KubeApiError, Object
from megatron_operator.cluster.kinds import EVENT, POD, RESOURCE, ObjectKind, kind_of
from megatron_operator.cluster.projection import SeenChild, SeenResource, project_child, project_resource
from megatron_operator.decision.actions import EmitEvent
from megatron_operator.decision.world import ChildRef, Manifest
from megatron_operator.resource.names import FIELD_MANAGER
from megatron_operator.resource.text import printable

REPLICAS_MANAGER = f"{FIELD_MANAGER}-replicas"
"""Field manager that keeps the number of replicas of a Deployment when this operator ceases to own it."""
NO_VERSION = "1"
"""A resource version that no object has. A write with it succeeds only if the object does not exist."""


class NotOwnedError(KubeApiError):
    """An object with this name exists and has another owner. The operator has not changed the object."""

    def __init__(self, ref: ChildRef, *, namespace: str) -> None:
        super().__init__(
            409,
            "NotOwned",
            f"{ref} in namespace {namespace} exists and is not owned by this resource; "
            "delete it, or give the resource another name",
        )


class Writer:
    """The operator's writes to the API server.

    guard: called before every request. Returns the timeout of the request in seconds, so that the request does not take
        effect when another process leads. None means the default of the API client. Raises if this process is not
        the leader.
    count: called with the verb and kind of every request that reached the server.
    """

    def __init__(self, api: KubeApi, *, guard: Callable[[], float | None], count: Callable[[str, str], None]) -> None:
        self._api = api
        self._guard = guard
        self._count = count

    @asynccontextmanager
    async def _leading(self, verb: str | None, kind: str) -> AsyncIterator[None]:
        """Cancel the request in the `async with` block when another process may lead. Count the request if it succeeds.

        verb: API verb of the request; None for a dry run, which is not counted.
        """
        try:
            async with asyncio.timeout(self._guard()):
                yield
        except TimeoutError:
            raise KubeApiError(0, "Timeout", f"write of a {kind}: no answer before the Lease may expire") from None
        if verb is not None:
            self._count(verb, kind)

    async def apply_child(self, manifest: Manifest, *, owner_uid: str, known: SeenChild | None) -> SeenChild:
        """Apply a child server-side, and return its new version.

        The apply creates the child, or changes an object that the resource owns or may adopt.

        known: last known version of the child; None if the child is not known.

        Raises:
            NotOwnedError: an object with another owner has the name.
            KubeApiError: the server rejected the request.
        """
        kind = kind_of(manifest["apiVersion"], manifest["kind"])
        if known is None:
            try:
                return await self._apply(kind, _onto_nothing(manifest), force=False)
            except KubeApiError as error:
                if not error.conflict:
                    raise
                metadata = manifest["metadata"]
                existing = await self._api.get(kind, metadata["namespace"], metadata["name"])
                if existing is None:
                    raise
                known = project_child(existing)
        if not known.may_be_of(owner_uid):
            raise NotOwnedError(known.ref, namespace=manifest["metadata"]["namespace"])
        if known.owns_replicas and "replicas" not in manifest.get("spec", {}):
            await self._hand_over_replicas(kind, manifest, known)
        return await self._apply(kind, _onto(manifest, known), force=True)

    async def _hand_over_replicas(self, kind: ObjectKind, manifest: Manifest, known: SeenChild) -> None:
        """Make another field manager own the current number of replicas.

        The operator no longer applies this number. Without another owner, the API server would reset it to 1.
        """
        metadata = {name: manifest["metadata"][name] for name in ("name", "namespace")}
        metadata["resourceVersion"] = str(known.version)
        body = {
            "apiVersion": manifest["apiVersion"],
            "kind": manifest["kind"],
            "metadata": metadata,
            "spec": {"replicas": known.view.replicas},
        }
        await self._apply(kind, _onto(body, known), force=True, manager=REPLICAS_MANAGER)

    async def _apply(self, kind: ObjectKind, body: Manifest, *, force: bool, manager: str = FIELD_MANAGER) -> SeenChild:
        async with self._leading("apply", kind.kind):
            answer = await self._api.apply(kind, body, manager=manager, force=force)
        return project_child(answer)

    async def vet_child(self, manifest: Manifest, *, known: SeenChild) -> None:
        """Apply a manifest to an existing child in a dry run.

        Raises:
            KubeApiError: the server would reject the apply.
        """
        kind = kind_of(manifest["apiVersion"], manifest["kind"])
        async with self._leading(None, kind.kind):
            await self._api.apply(kind, _onto(manifest, known), manager=FIELD_MANAGER, force=True, dry_run=True)

    async def apply_status(self, resource: SeenResource, status: Manifest) -> SeenResource:
        """Replace `.status`, and return the new version of the resource. The version of `resource` is a precondition.

        Raises:
            KubeApiError: conflict if the resource has changed or was replaced; 404 if it does not exist.
        """
        body = {
            "apiVersion": RESOURCE.api_version,
            "kind": RESOURCE.kind,
            "metadata": {
                "name": resource.name,
                "namespace": resource.namespace,
                "uid": resource.uid,
                "resourceVersion": str(resource.version),
            },
            "status": status,
        }
        async with self._leading("apply", f"{RESOURCE.kind}/status"):
            answer = await self._api.apply(RESOURCE, body, manager=FIELD_MANAGER, force=True, subresource="status")
        return project_resource(answer)

    async def create(self, manifest: Manifest) -> Object:
        """Create an object, and return it.

        Raises:
            KubeApiError: the server rejected the request, with a conflict if the object exists.
        """
        kind = kind_of(manifest["apiVersion"], manifest["kind"])
        async with self._leading("create", kind.kind):
            return await self._api.create(kind, manifest, manager=FIELD_MANAGER)

    async def patch(self, kind: ObjectKind, name: str, *, namespace: str, body: Object) -> Object:
        """Merge-patch an object, and return its new version.

        If `body` has `metadata.uid` or `metadata.resourceVersion`, these values are preconditions.

        Raises:
            KubeApiError: the API server rejects the patch.
        """
        async with self._leading("patch", kind.kind):
            return await self._api.merge_patch(kind, namespace, name, body, manager=FIELD_MANAGER)

    async def delete_child(self, ref: ChildRef, *, namespace: str, uid: str) -> None:
        """Delete a child.

        Raises:
            KubeApiError: 404 if the child does not exist, conflict if another object has its name.
        """
        kind = kind_of(ref.api_version, ref.kind)
        async with self._leading("delete", kind.kind):
            await self._api.delete(kind, namespace, ref.name, uid=uid)

    async def delete_pod(self, name: str, *, namespace: str, uid: str, force: bool = False) -> None:
        """Delete a pod.

        force: delete the pod without waiting for its kubelet.

        Raises:
            KubeApiError: 404 if the pod does not exist, conflict if another object has its name.
        """
        async with self._leading("delete", POD.kind):
            await self._api.delete(POD, namespace, name, uid=uid, grace_seconds=0 if force else None)


def _onto(manifest: Manifest, known: SeenChild) -> Manifest:
    """Return the manifest with the UID and resource version of `known` as preconditions."""
    return {**manifest, "metadata": {**manifest["metadata"], "uid": known.uid}}


def _onto_nothing(manifest: Manifest) -> Manifest:
    """Return the manifest with the precondition that no object has its name.

    If such an object exists, the server reports a conflict.
    """
    return {**manifest, "metadata": {**manifest["metadata"], "resourceVersion": NO_VERSION}}


logger = logging.getLogger(__name__)

MAX_NOTE = 1000
"""Maximum length of a note in bytes. The API server rejects longer notes."""


class Recorder:
    """A writer of Events.

    If a write fails, the failure is logged and not retried, because decisions do not read Events.
    """

    def __init__(self, api: KubeApi, *, instance: str) -> None:
        self._api = api
        self._instance = instance[:128]

    async def emit(self, event: EmitEvent, *, name: str, namespace: str, uid: str) -> None:
        body = self._body(event, name=name, namespace=namespace, uid=uid)
        try:
            await self._api.create(EVENT, body, manager=FIELD_MANAGER)
        except KubeApiError as error:
            if error.code == 409 and error.reason == "AlreadyExists":
                await self._count_again(body)
            elif not error.namespace_ends:
                logger.warning("event not written", extra={"reason": event.reason, "error": str(error)})

    async def _count_again(self, body: Object) -> None:
        namespace, name = body["metadata"]["namespace"], body["metadata"]["name"]
        try:
            stored = await self._api.get(EVENT, namespace, name)
            if stored is not None:
                count = int((stored.get("series") or {}).get("count") or 1) + 1
                series = {"series": {"count": count, "lastObservedTime": body["eventTime"]}}
                await self._api.merge_patch(EVENT, namespace, name, series, manager=FIELD_MANAGER)
        except KubeApiError as error:
            logger.warning("event not counted", extra={"reason": body["reason"], "error": str(error)})

    def _body(self, event: EmitEvent, *, name: str, namespace: str, uid: str) -> Object:
        message = printable(event.message)
        words = "\0".join((uid, event.type, event.reason, message))
        digest = hashlib.blake2b(words.encode(), digest_size=8).hexdigest()
        return {
            "apiVersion": EVENT.api_version,
            "kind": EVENT.kind,
            "metadata": {"name": f"{name}.{digest}", "namespace": namespace},
            "eventTime": datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
            "reportingController": FIELD_MANAGER,
            "reportingInstance": self._instance,
            "action": event.reason,
            "reason": event.reason,
            "type": event.type,
            "note": message.encode()[:MAX_NOTE].decode(errors="ignore"),
            "regarding": {
                "apiVersion": RESOURCE.api_version,
                "kind": RESOURCE.kind,
                "name": name,
                "namespace": namespace,
                "uid": uid,
            },
        }
