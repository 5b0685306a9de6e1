"""Rewrites stored resources in the storage version of the API: `kubectl megatron migrate`.

The API server keeps an object in the version in which it was last written, and notes every version that it ever wrote
in `status.storedVersions` of the CRD. A version can only be removed from the CRD when it is no longer noted there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron_operator.model.crd import CRD_NAME
from megatron_operator.model.resource import GROUP, PLURAL, VERSION
from megatron_operator.resource_client import ClusterError

_CRD = ("apiextensions.k8s.io", "v1", "customresourcedefinitions", CRD_NAME)
_CHUNK = 500


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
    from kubernetes import client, config
    from urllib3.exceptions import HTTPError

    try:
        config.load_kube_config(context=context)
    except config.ConfigException as error:
        raise ClusterError(f"no usable kubeconfig: {error}; set KUBECONFIG") from error
    try:
        return _migrate(client.CustomObjectsApi())
    except client.ApiException as error:
        if error.status == 409:
            raise ClusterError(f"{CRD_NAME}: the CRD has changed meanwhile; run the command again") from error
        raise ClusterError(f"{CRD_NAME}: {error.status} {error.reason}: {error.body}") from error
    except HTTPError as error:
        raise ClusterError(f"the API server does not answer: {error}") from error


def _migrate(api: Any) -> Migration:
    crd = api.get_cluster_custom_object(*_CRD)
    storage = next(entry["name"] for entry in crd["spec"]["versions"] if entry["storage"])
    if storage != VERSION:
        raise ClusterError(f"{CRD_NAME}: the API server stores {storage}, not {VERSION}; upgrade the CRD first")
    migration = Migration(before=tuple(crd["status"]["storedVersions"]), rewritten=0)
    if not migration.needed:
        return migration
    rewritten = _rewrite_all(api)
    # The version of the CRD is a precondition: a CRD that stores another version since then is a conflict.
    pruned = {
        "metadata": {"resourceVersion": crd["metadata"]["resourceVersion"]},
        "status": {"storedVersions": [VERSION]},
    }
    api.patch_cluster_custom_object_status(*_CRD, pruned)
    return Migration(before=migration.before, rewritten=rewritten)


def _rewrite_all(api: Any) -> int:
    from kubernetes import client

    rewritten, token = 0, None
    while True:
        page = api.list_cluster_custom_object(GROUP, VERSION, PLURAL, limit=_CHUNK, _continue=token)
        for item in page["items"]:
            metadata = item["metadata"]
            try:
                # An empty patch: the API server writes the object because its stored form differs.
                api.patch_namespaced_custom_object(GROUP, VERSION, metadata["namespace"], PLURAL, metadata["name"], {})
                rewritten += 1
            except client.ApiException as error:
                if error.status != 404:  # deleted meanwhile
                    where = f"{PLURAL}.{GROUP} {metadata['namespace']}/{metadata['name']}"
                    raise ClusterError(f"{where}: {error.status} {error.reason}: {error.body}") from error
        token = page["metadata"].get("continue")
        if not token:
            return rewritten
