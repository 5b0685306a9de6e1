"""Pods where the cluster assigns user and group IDs, as the constraint restricted-v2 of OpenShift does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from in_memory_cluster import MINIMAL

from megatron_operator.render.check import check_pod
from megatron_operator.render.children import all_children
from megatron_operator.render.context import RenderContext
from megatron_operator.render.prefetch import prefetch_job
from megatron_operator.resource.settings import Settings
from megatron_operator.resource.spec import parse_spec

IDS = {"runAsUser", "runAsGroup", "fsGroup"}
SPEC: dict[str, Any] = {
    **MINIMAL,
    "model": {"source": {"huggingFace": {"repo": "org/model", "revision": "a" * 40}}},
    "parallelism": {"tensor": 2},
    "coordinator": {"replicas": 2},
    "server": {"tls": {"secretName": "certificate"}, "apiKeysSecretRef": {"name": "keys", "key": "keys"}},
}


def context(*, openshift: bool | None) -> RenderContext:
    settings = replace(Settings(runtime_image="runtime:1"), openshift=openshift)
    return RenderContext("demo", "default", "u", parse_spec(SPEC), settings)


def pods(ctx: RenderContext) -> Iterator[tuple[str, dict[str, Any]]]:
    for manifest in (*all_children(ctx), check_pod(ctx), prefetch_job(ctx, "models")):
        kind, name = manifest["kind"], manifest["metadata"]["name"]
        if kind in ("Deployment", "StatefulSet", "Job"):
            yield f"{kind} {name}", manifest["spec"]["template"]["spec"]
        elif kind == "Pod":
            yield f"{kind} {name}", manifest["spec"]


def test_no_pod_has_a_fixed_id() -> None:
    found = dict(pods(context(openshift=True)))
    assert len(found) == 6
    for name, pod in found.items():
        assert not IDS & set(pod["securityContext"]), name
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        for container in (*pod.get("initContainers", ()), *pod["containers"]):
            assert not IDS & set(container["securityContext"]), f"{name}: {container['name']}"


@pytest.mark.parametrize("openshift", [None, False])
def test_elsewhere_every_pod_has_the_ids_of_the_images(openshift: bool | None) -> None:
    for name, pod in pods(context(openshift=openshift)):
        assert {pod["securityContext"][each] for each in IDS} == {65532}, name


@pytest.mark.parametrize(("openshift", "mode"), [(True, 0o444), (False, 0o440)])
def test_secrets_are_readable_without_the_group_of_the_files(openshift: bool, mode: int) -> None:
    modes = {
        volume["name"]: volume["secret"]["defaultMode"]
        for _, pod in pods(context(openshift=openshift))
        for volume in pod["volumes"]
        if "secret" in volume
    }
    assert modes == dict.fromkeys(("keys", "tls", "api-keys"), mode)
