"""Rewrites stored resources in the storage version of the API: `kubectl megatron migrate`.

The API server keeps an object in the version in which it was last written, and notes every version that it ever wrote
in `status.storedVersions` of the CRD. A version can only be removed from the CRD when it is no longer noted there.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_operator.cluster.kinds import RESOURCE
from megatron_operator.kubectl_proxy import MERGE_PATCH, ClusterError
from megatron_operator.model.names import CRD_NAME, VERSION
from megatron_operator.resource_client import ResourceClient

_CRD = f"/apis/apiextensions.k8s.io/v1/customresourcedefinitions/{CRD_NAME}"


@dataclass(frozen=True, slots=True)
class Migration:
    """What a migration has done.

    before: stored versions before it. rewritten: number of resources that it wrote; 0 if there was nothing to do.
    """

    before: tuple[str, ...]
    rewritten: int

    @property
    def needed(self) -> bool:
        return self.before != (VERSION,)


def migrate(*, context: str | None = None) -> Migration:
    """Rewrite all resources of the cluster, then remove the older versions from the CRD's stored versions.

    It may be repeated, also after a failure. Resources do not change: neither their generation nor their pods.

    Raises:
        ClusterError: the CRD is absent, has another storage version or changed meanwhile, or a request was rejected.
    """
    with ResourceClient(namespace="default", context=context) as client:
        crd = client.api.request("GET", _CRD, about=CRD_NAME)
        storage = next(entry["name"] for entry in crd["spec"]["versions"] if entry["storage"])
        if storage != VERSION:
            raise ClusterError(f"{CRD_NAME}: the API server stores {storage}, not {VERSION}; upgrade the CRD first")
        migration = Migration(before=tuple(crd["status"]["storedVersions"]), rewritten=0)
        if not migration.needed:
            return migration
        rewritten = _rewrite_all(client)
        # The version of the CRD is a precondition: a CRD that stores another version since then is a conflict.
        pruned = {
            "metadata": {"resourceVersion": crd["metadata"]["resourceVersion"]},
            "status": {"storedVersions": [VERSION]},
        }
        try:
            client.api.request("PATCH", f"{_CRD}/status", body=pruned, content_type=MERGE_PATCH, about=CRD_NAME)
        except ClusterError as error:
            if error.code == 409:
                raise ClusterError(f"{CRD_NAME}: the CRD has changed meanwhile; run the command again") from error
            raise
        return Migration(before=migration.before, rewritten=rewritten)


def _rewrite_all(client: ResourceClient) -> int:
    rewritten = 0
    for item in client.resources(all_namespaces=True):
        metadata = item["metadata"]
        where = f"{CRD_NAME} {metadata['namespace']}/{metadata['name']}"
        try:
            # An empty patch: the API server writes the object because its stored form differs.
            path = RESOURCE.path(metadata["namespace"], metadata["name"])
            client.api.request("PATCH", path, body={}, content_type=MERGE_PATCH, about=where)
            rewritten += 1
        except ClusterError as error:
            if error.code != 404:  # deleted meanwhile
                raise
    return rewritten
