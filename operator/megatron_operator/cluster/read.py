"""Reads a custom resource and the objects that explain its status, for command-line programs.

In a pod, a program reads with the pod's service account, otherwise with the user's kubeconfig.
"""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

from kubernetes.aio.config import list_kube_config_contexts

from megatron_operator.cluster.api import KubeApi, KubeApiError, Object
from megatron_operator.cluster.auth import SERVICE_ACCOUNT, in_cluster, load_configuration
from megatron_operator.cluster.kinds import LEASE, POD, RESOURCE
from megatron_operator.explain import causes
from megatron_operator.operator_leases import operator_leases, operator_problem
from megatron_operator.resource.names import CRD_NAME, LABEL_INSTANCE


def _default_namespace(context: str | None) -> str:
    """Return the namespace of the service account if this process runs in a pod, otherwise the namespace of a context.

    context: context of the kubeconfig; None means the current context.
    """
    if in_cluster():
        return Path(SERVICE_ACCOUNT, "namespace").read_text().strip()
    contexts, current = list_kube_config_contexts()
    entry = current if context is None else next(each for each in contexts if each["name"] == context)
    return entry["context"].get("namespace") or "default"


async def find_resource(name: str, *, namespace: str | None, context: str | None) -> Object | None:
    """Return a custom resource. Returns None if it does not exist.

    namespace: None means the namespace of the context.
    context:   None means the current context of the kubeconfig.

    Raises:
        LoginError, KubeApiError
    """
    async with KubeApi(await load_configuration(kubeconfig=None, context=context)) as api:
        return await api.get(RESOURCE, namespace or _default_namespace(context), name)


async def explain_resource(name: str, *, namespace: str | None, context: str | None) -> list[str]:
    """Return what a custom resource waits for, one cause per line (see `explain.causes`).

    namespace: None means the namespace of the context.

    Raises:
        LookupError: there is no such resource.
        LoginError, KubeApiError
    """
    async with KubeApi(await load_configuration(kubeconfig=None, context=context)) as api:
        where = namespace or _default_namespace(context)
        resource = await api.get(RESOURCE, where, name)
        if resource is None:
            raise LookupError(f"{CRD_NAME} {where}/{name}: no such resource")
        pods = await api.list(POD, where, selector=f"{LABEL_INSTANCE}={name}")
        return causes(resource, pods, await problem_of_operators(api, where))


async def problem_of_operators(api: KubeApi, namespace: str) -> str | None:
    """Return the problem if no operator runs for a namespace, or if several do. Returns None if exactly one runs.

    If the user may not list Leases, the result reports this.

    Raises:
        KubeApiError: the Leases could not be read for another reason.
    """
    try:
        leases = operator_leases(await api.list(LEASE, None))
    except KubeApiError as error:
        if error.code not in (401, 403):
            raise
        leases = None
    return operator_problem(leases, namespace, datetime.now(UTC))
