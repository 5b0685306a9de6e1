"""The operator's RBAC rules grant exactly the requests that it makes, by the API server's audit log."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from eventually import eventually
from soak import SOAK

from localcluster import LocalCluster
from megatron_operator.cluster.kinds import CHILD_KINDS, OPTIONAL_KINDS, ObjectKind, kind_of
from megatron_operator.install import HOME_RULES, NODE_RULES, RESOURCE_RULES, Rule

from .audit_log import AuditLog, Request
from .conftest import condition
from .lost_node import replaced, terminate_on

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

Permission = tuple[str, str, str]
ALL_RULES = [*RESOURCE_RULES, *HOME_RULES, *NODE_RULES]
INGRESS = kind_of("networking.k8s.io/v1", "Ingress")


def granted(rules: Sequence[Rule]) -> set[Permission]:
    """(API group, resource, verb), one for each that the rules grant."""
    return {
        (group, resource, verb)
        for rule in rules
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }


def used(requests: Sequence[Request], rules: set[Permission]) -> set[Permission]:
    """Return the permissions that the requests need. Server-side apply is a patch that also needs `create`."""
    asked = {request.permission for request in requests}
    created = {(group, name, "create") for group, name, verb in asked if verb == "patch" and "/" not in name}
    return (asked | created) & rules


async def live(resource: Any, api: Any) -> None:
    """Run all verbs, a rollout, a key rotation, a changed configuration, scaling, and pods that exceed a quota."""
    await resource.create(replicas=2)
    await resource.settled("Running")
    for state in ("Paused", "Suspended", "Running", "Stopped", "Running"):
        await resource.patch(desiredState=state)
        await resource.settled(state)
    await leave_configuration_of_an_earlier_operator(resource, api)
    first = (await resource.status())["revision"]
    await resource.patch(engine={"batching": {"maxRequests": 7}})
    await resource.until(lambda status: status["revision"] != first and status.get("updatedReplicas") == 2)
    await resource.patch(coordinator={"routing": {"policy": "RoundRobin"}}, server={"replicas": 2})
    await resource.patch(keys={"generation": 2})
    rotated = {"generation": 2, "stage": "Settled"}
    await resource.until(lambda status: status["keys"].items() >= rotated.items())
    await name_what_is_missing(resource)
    await change_standby(resource)
    await change_front_door(resource, api)
    await lose_node(resource, api)
    await forbid_pods(api, resource.namespace)
    await resource.patch(replicas=3)
    await resource.until(lambda status: "exceeded quota" in str(status))
    await resource.patch(replicas=1)
    await resource.until(lambda status: status.get("ready") == "1/1" and "plan" not in status)


async def name_what_is_missing(resource: Any) -> None:
    """Let pods refer to objects that do not exist, of each kind that the operator looks up."""
    template: dict[str, Any] = {
        "spec": {"volumes": [{"name": "extra", "persistentVolumeClaim": {"claimName": "none"}}]}
    }
    template["spec"]["runtimeClassName"] = "none"
    claims = [{"name": "a", "resourceClaimName": "none"}, {"name": "b", "resourceClaimTemplateName": "none"}]
    template["spec"]["resourceClaims"] = claims
    await resource.patch(server={"podTemplate": template}, coordinator={"priorityClassName": "none"})
    await resource.until(lambda status: "PriorityClass none does not exist" in str(status))
    await resource.patch(server={"podTemplate": None}, coordinator={"priorityClassName": None})
    await resource.until(lambda status: condition(status, "Progressing")["status"] == "False")


async def change_standby(resource: Any) -> None:
    """Add a standby coordinator, and remove it."""
    for replicas in (2, 1):
        await resource.patch(coordinator={"replicas": replicas})

        async def changed(present: bool = replicas == 2) -> bool:
            return (f"Deployment {resource.name}-standby" in await resource.children()) is present

        await eventually(changed, what=f"coordinator.replicas is {replicas}")
    await resource.settled("Running")


async def change_front_door(resource: Any, api: Any) -> None:
    """Add an Ingress, an HTTPRoute and an InferencePool, and remove them."""
    wanted = {
        "ingress": {"hosts": ["demo.example"]},
        "httpRoute": {"parentRefs": [{"name": "gateway"}]},
        "inferencePool": {"endpointPickerRef": {"name": "picker"}},
    }
    for fields in (wanted, dict.fromkeys(wanted)):
        await resource.patch(server=fields)

        async def changed(present: bool = fields is wanted) -> bool:
            kinds = (INGRESS, *OPTIONAL_KINDS)
            found = [await api.get(kind, resource.namespace, resource.name) for kind in kinds]
            return all((each is not None) is present for each in found)

        await eventually(changed, what=f"server is {fields}")
    await resource.settled("Running")


async def lose_node(resource: Any, api: Any) -> None:
    """Let a pod of an engine terminate on a node that does not exist any more."""
    await resource.patch(lifecycle={"lostNodeSeconds": 1})
    old = await terminate_on(api, resource.namespace, "demo-engine-0-0", node=f"lost-{resource.namespace}")
    await eventually(lambda: replaced(api, old), what="the pod is replaced")
    await resource.settled("Running")


async def forbid_pods(api: Any, namespace: str) -> None:
    quota = {"metadata": {"name": "none", "namespace": namespace}, "spec": {"hard": {"pods": "0"}}}
    await api.create(ObjectKind("ResourceQuota", "", "v1", "resourcequotas"), quota, manager="test")


async def leave_configuration_of_an_earlier_operator(resource: Any, api: Any) -> None:
    name, config = next(
        (name, obj) for name, obj in (await resource.children()).items() if name.startswith("ConfigMap")
    )
    kept = {key: config["metadata"][key] for key in ("namespace", "labels", "annotations", "ownerReferences")}
    old = {**config, "metadata": {**kept, "name": f"{resource.name}-config-0"}, "apiVersion": "v1", "kind": "ConfigMap"}
    await api.create(kind_of("v1", "ConfigMap"), old, manager="megatron-operator")

    async def cleared() -> bool:
        return [found for found in await resource.children() if found.startswith("ConfigMap")] == [name]

    await eventually(cleared, what="the configuration of an earlier operator is gone")


async def meet_what_others_have(make_resource: Callable[[str], Any], api: Any) -> None:
    """Create two resources whose children's names are in use: by objects that pods refer to, and by workloads."""
    taken, other = make_resource("taken"), make_resource("other")
    server = {"ingress": {"hosts": ["demo.example"]}}
    await taken.create(replicas=1, server=server)
    for kind_name in ("StatefulSet", "Ingress"):
        await eventually(lambda kind_name=kind_name: has(taken, kind_name), what=f"a {kind_name} named taken")
    children = await taken.children()
    await taken.delete()
    await taken.until_gone()
    kinds = {kind.kind: kind for kind in CHILD_KINDS}
    for title, child in children.items():
        kind, name = kinds.get(title.split()[0]), child["metadata"]["name"]
        if kind is None:
            continue
        spec = {key: value for key, value in child.get("spec", {}).items() if not key.startswith("clusterIP")}
        workload = kind.kind in ("Deployment", "StatefulSet")
        metadata = {"name": name.replace("taken", "other") if workload else name, "namespace": taken.namespace}
        body = {key: value for key, value in child.items() if key not in ("metadata", "spec", "status")}
        await api.create(kind, {**body, "metadata": metadata, **({"spec": spec} if spec else {})}, manager="other")
    for resource in (taken, other):
        await resource.create(replicas=1, server=server)
        await resource.until(lambda status: "is not owned by this resource" in str(status))


async def has(resource: Any, kind: str) -> bool:
    return any(title.startswith(kind) for title in await resource.children())


@pytest.fixture
def log(control_plane: LocalCluster, namespace: str) -> AuditLog:
    return AuditLog(control_plane.audit_log, user=f"system:serviceaccount:{namespace}:megatron-operator")


async def test_every_permission_of_the_role_is_needed_and_none_is_missing(
    resource: Any, make_resource: Any, make_operator: Any, gateway_api: None, node: Any, api: Any, log: AuditLog
) -> None:
    operator = make_operator("--resync-seconds", "3", "--allow-hostname", "*")
    await audit(operator, (resource, make_resource), api, log, rules=granted(ALL_RULES))


@pytest.mark.skipif(not SOAK, reason="repeats the test above with the ClusterRole: `make soak` runs it")
async def test_every_permission_of_the_cluster_role_is_needed_and_none_is_missing(
    resource: Any,
    make_resource: Any,
    make_operator: Any,
    cluster_wide: None,
    gateway_api: None,
    node: Any,
    api: Any,
    log: AuditLog,
) -> None:
    operator = make_operator("--resync-seconds", "3", "--allow-hostname", "*", everywhere=True)
    await audit(operator, (resource, make_resource), api, log, rules=granted(ALL_RULES))


async def audit(
    operator: Any, resources: tuple[Any, Callable[[str], Any]], api: Any, log: AuditLog, *, rules: set[Permission]
) -> None:
    """Compare every request of an operator with the permissions that its roles grant."""
    resource, make_resource = resources
    await operator.start()
    await live(resource, api)
    await meet_what_others_have(make_resource, api)
    await operator.passed(await operator.passes() + 3)
    assert operator.stop() == 0
    await operator.start()
    await resource.settled("Running")
    assert operator.stop() == 0

    requests = log.requests()
    denied = [str(request) for request in requests if request.denied or request.code == 403]
    idle = sorted(" ".join(permission) for permission in rules - used(requests, rules))
    print(f"\n{len(requests)} requests, {len(rules)} permissions granted, {len(idle)} never used: {idle}")
    assert denied == []
    assert idle == []
