"""Every write to the API server, behind one gate: only the leader writes, only to what it owns, only to what it saw."""

from __future__ import annotations

from collections.abc import Callable

from megatron_operator.cluster.api import ApiError, KubeApi, Object
from megatron_operator.cluster.kinds import POD, RESOURCE, Kind, kind_of
from megatron_operator.cluster.projection import SeenChild, SeenResource, project_child, project_resource
from megatron_operator.plan.world import ChildRef, Manifest
from megatron_operator.render.context import FIELD_MANAGER

NO_VERSION = "1"
"""The store's revision before its first write: no object has it, and what does not exist may be made with it."""


class NotOwnedError(ApiError):
    """An object of that name exists and belongs to somebody else. It is left alone."""

    def __init__(self, ref: ChildRef, *, namespace: str) -> None:
        super().__init__(
            409,
            "NotOwned",
            f"{ref} in namespace {namespace} exists and is not owned by this resource; "
            "delete it, or give the resource another name",
        )


class Writer:
    """The operator's writes.

    guard: raises when this process does not lead (any more); called right before every request.
    count: told the verb and kind of every request that reached the server.
    """

    def __init__(self, api: KubeApi, *, guard: Callable[[], None], count: Callable[[str, str], None]) -> None:
        self._api = api
        self._guard = guard
        self._count = count

    async def apply_child(self, manifest: Manifest, *, owner_uid: str, known: SeenChild | None) -> SeenChild:
        """Server-side apply, forced only onto the very object `known`, which the resource must own. An object that is
        not known is made only if there is none of its name.

        Raises:
            NotOwnedError: somebody else's object bears the name.
            ApiError: the server refused.
        """
        kind = kind_of(manifest["apiVersion"], manifest["kind"])
        if known is None:
            try:
                return await self._apply(kind, _onto_nothing(manifest), force=False)
            except ApiError as error:
                if not error.conflict:
                    raise
                metadata = manifest["metadata"]
                existing = await self._api.get(kind, metadata["namespace"], metadata["name"])
                if existing is None:
                    raise
                known = project_child(existing)
        if known.owner_uid != owner_uid:
            raise NotOwnedError(known.ref, namespace=manifest["metadata"]["namespace"])
        return await self._apply(kind, _onto(manifest, known), force=True)

    async def _apply(self, kind: Kind, body: Manifest, *, force: bool) -> SeenChild:
        self._guard()
        answer = await self._api.apply(kind, body, manager=FIELD_MANAGER, force=force)
        self._count("apply", kind.kind)
        return project_child(answer)

    async def vet_child(self, manifest: Manifest, *, known: SeenChild) -> None:
        """The same in a dry run, onto a child that is there.

        Raises:
            ApiError: the server would refuse it.
        """
        kind = kind_of(manifest["apiVersion"], manifest["kind"])
        self._guard()
        await self._api.apply(kind, _onto(manifest, known), manager=FIELD_MANAGER, force=True, dry_run=True)

    async def apply_status(self, resource: SeenResource, status: Manifest) -> SeenResource:
        """The whole `.status`, only onto the version that the decision was made from.

        Raises:
            ApiError: conflict when the resource has changed since or is another; 404 when it is gone.
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
        self._guard()
        answer = await self._api.apply(RESOURCE, body, manager=FIELD_MANAGER, force=True, subresource="status")
        self._count("apply", f"{RESOURCE.kind}/status")
        return project_resource(answer)

    async def create(self, manifest: Manifest) -> Object:
        """Raises ApiError; conflict when it exists."""
        kind = kind_of(manifest["apiVersion"], manifest["kind"])
        self._guard()
        answer = await self._api.create(kind, manifest, manager=FIELD_MANAGER)
        self._count("create", kind.kind)
        return answer

    async def patch(self, kind: Kind, name: str, *, namespace: str, body: Object) -> Object:
        """Merge patch; `metadata.uid` and `metadata.resourceVersion` in the body are preconditions. Raises ApiError."""
        self._guard()
        answer = await self._api.merge_patch(kind, namespace, name, body, manager=FIELD_MANAGER)
        self._count("patch", kind.kind)
        return answer

    async def delete_child(self, ref: ChildRef, *, namespace: str, uid: str) -> None:
        """Raises ApiError: 404 when it is gone, conflict when the name means another object now."""
        kind = kind_of(ref.api_version, ref.kind)
        self._guard()
        await self._api.delete(kind, namespace, ref.name, uid=uid)
        self._count("delete", kind.kind)

    async def delete_pod(self, name: str, *, namespace: str, uid: str) -> None:
        """Raises ApiError as `delete_child`."""
        self._guard()
        await self._api.delete(POD, namespace, name, uid=uid)
        self._count("delete", POD.kind)


def _onto(manifest: Manifest, known: SeenChild) -> Manifest:
    """The manifest for that very object and no other of its name."""
    return {**manifest, "metadata": {**manifest["metadata"], "uid": known.uid}}


def _onto_nothing(manifest: Manifest) -> Manifest:
    """The manifest for an object that is not there: whatever is there is of another version, and the server says so."""
    return {**manifest, "metadata": {**manifest["metadata"], "resourceVersion": NO_VERSION}}
