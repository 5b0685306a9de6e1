"""`spec.engine.accelerator`: what pods request for MIG profiles, other accelerators and DRA claims."""

from __future__ import annotations

from typing import Any

import pytest
from in_memory_cluster import MINIMAL
from pydantic import ValidationError

from megatron_operator.decision.causes import SCHEDULING, find_cause
from megatron_operator.render.check import check_pod
from megatron_operator.render.context import RenderContext, UnsupportedByBackend
from megatron_operator.render.engine import engine_statefulset
from megatron_operator.resource.settings import Settings
from megatron_operator.resource.spec import parse_spec

MIG = "nvidia.com/mig-1g.10gb"
TEMPLATE = {"name": "gpu", "resourceClaimTemplateName": "one-gpu"}


def context(*, accelerator: dict[str, Any] | None, tensor: int = 1, **engine: Any) -> RenderContext:
    fields = {"gpusPerPod": tensor, **engine, **({} if accelerator is None else {"accelerator": accelerator})}
    spec = parse_spec({**MINIMAL, "parallelism": {"tensor": tensor}, "engine": fields})
    return RenderContext("demo", "default", "u", spec, Settings(runtime_image="runtime:1"))


def pod(ctx: RenderContext) -> dict[str, Any]:
    found: dict[str, Any] = engine_statefulset(ctx, 0, pods=1)["spec"]["template"]["spec"]
    return found


def engine(ctx: RenderContext) -> dict[str, Any]:
    return next(each for each in pod(ctx)["containers"] if each["name"] == "engine")


def test_the_default_resource_renders_the_pods_of_a_resource_without_the_field() -> None:
    named, absent = (context(accelerator=each, tensor=2) for each in ({"resource": "nvidia.com/gpu"}, None))
    assert engine_statefulset(named, 0, pods=1) == engine_statefulset(absent, 0, pods=1)


@pytest.mark.parametrize(
    ("accelerator", "backend", "device"),
    [
        ({"resource": MIG}, "Native", True),
        ({"resource": MIG}, "VLLM", True),
        ({"resource": "nvidia.com/gpu.shared"}, "Native", True),
        ({"resource": "amd.com/gpu"}, "VLLM", False),
        ({"resource": "gpu.intel.com/xe"}, "VLLM", False),
    ],
)
def test_a_pod_requests_the_named_resource_only(accelerator: dict[str, str], backend: str, device: bool) -> None:
    ctx = context(accelerator=accelerator, backend=backend)
    assert engine(ctx)["resources"]["limits"] == {accelerator["resource"]: 1}
    assert ("cuda" in engine(ctx)["args"]) is device
    assert pod(ctx)["topologySpreadConstraints"][0]["topologyKey"] == "kubernetes.io/hostname"
    (check,) = check_pod(ctx)["spec"]["containers"]
    assert set(check["resources"]["limits"]) == {"memory"}
    assert ("cuda" in check["args"]) is device


@pytest.mark.parametrize(("backend", "device"), [("Native", True), ("VLLM", False)])
def test_claims_replace_the_extended_resource(backend: str, device: bool) -> None:
    claims = [{**TEMPLATE, "request": "gpu"}, {"name": "network", "resourceClaimName": "fabric"}]
    ctx = context(accelerator={"claims": claims}, backend=backend)
    assert pod(ctx)["resourceClaims"] == [TEMPLATE, claims[1]]
    resources = engine(ctx)["resources"]
    assert resources["claims"] == [{"name": "gpu", "request": "gpu"}, {"name": "network"}]
    assert "limits" not in resources
    assert ("cuda" in engine(ctx)["args"]) is device
    check = check_pod(ctx)["spec"]
    assert "resourceClaims" not in check, "the engines have the devices"
    assert "claims" not in check["containers"][0]["resources"]


def test_claims_of_the_pod_template_are_added() -> None:
    own = {"name": "rdma", "resourceClaimName": "rdma"}
    containers = [{"name": "engine", "resources": {"claims": [{"name": "rdma"}], "limits": {"memory": "1Gi"}}}]
    ctx = context(
        accelerator={"claims": [TEMPLATE]}, podTemplate={"spec": {"resourceClaims": [own], "containers": containers}}
    )
    assert pod(ctx)["resourceClaims"] == [TEMPLATE, own]
    assert engine(ctx)["resources"]["claims"] == [{"name": "gpu"}, {"name": "rdma"}]


@pytest.mark.parametrize("resource", ["amd.com/gpu", "gpu.intel.com/xe", "habana.ai/gaudi"])
def test_native_engines_run_on_gpus_of_nvidia_only(resource: str) -> None:
    with pytest.raises(UnsupportedByBackend, match=rf"accelerator\.resource: is '{resource}'.*spec\.engine\.vllm\.im"):
        engine_statefulset(context(accelerator={"resource": resource}), 0, pods=1)


@pytest.mark.parametrize(
    ("accelerator", "fields", "words"),
    [
        ({"resource": MIG}, {"gpusPerPod": 0}, "gpusPerPod is 0"),
        ({"resource": MIG}, {"gpusPerPod": 2}, r"must be 1 for a MIG profile.*is 2"),
        ({}, {}, "exactly one of resource and claims"),
        ({"resource": MIG, "claims": [TEMPLATE]}, {}, "exactly one of resource and claims"),
        ({"resource": "gpu"}, {}, "must be an extended resource"),
        ({"resource": "kubernetes.io/gpu"}, {}, "must be an extended resource"),
        ({"claims": [{"name": "gpu"}]}, {}, "exactly one of resourceClaimTemplateName and resourceClaimName"),
        ({"claims": [{**TEMPLATE, "resourceClaimName": "x"}]}, {}, "exactly one of resourceClaimTemplateName"),
        ({"claims": [{**TEMPLATE, "name": "GPU"}]}, {}, "must be lowercase letters"),
        ({"claims": [TEMPLATE, TEMPLATE]}, {}, "'gpu' is listed twice"),
    ],
)
def test_a_wrong_accelerator_is_rejected_with_field_and_remedy(
    accelerator: dict[str, Any], fields: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValidationError, match=words):
        context(accelerator=accelerator, tensor=2 if fields.get("gpusPerPod") == 2 else 1, **fields)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("0/1 nodes are available: 1 Insufficient nvidia.com/mig-1g.10gb.", "spec.engine.accelerator.resource"),
        ("0/3 nodes are available: 3 Insufficient amd.com/gpu.", "whose device plugin offers it"),
        ("0/1 nodes are available: 1 cannot allocate all claims.", "free devices"),
        ('0/1 nodes are available: resourceclaim.resource.k8s.io "gpu" not found.', "create the ResourceClaim"),
    ],
)
def test_messages_of_the_scheduler_have_the_remedy(message: str, words: str) -> None:
    cause = find_cause(message, SCHEDULING)
    assert cause is not None
    assert words in cause.remedy
