"""The API server rejects invalid resources by the CRD, with the field and the remedy, and accepts the samples."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from bad_values import bad_values

from megatron_operator.cluster.api import KubeApi, KubeApiError
from megatron_operator.cluster.kinds import RESOURCE

pytestmark = pytest.mark.cluster

SAMPLES = {
    path.stem: list(yaml.safe_load_all(path.read_text()))
    for path in sorted((Path(__file__).parents[2] / "manifests" / "samples").glob("*.yaml"))
}
SOURCE = {"source": {"builtin": "smollm2-135m"}}
TWO = {"builtin": "smollm2-135m", "persistentVolumeClaim": {"claimName": "weights"}}

ON_HUB = {"name": "sql", "source": {"huggingFace": {"repo": "org/sql"}}}
ON_VOLUME = {"name": "sql", "source": {"path": "/adapters/sql"}}
MANY = [{**ON_HUB, "name": f"a{number}"} for number in range(65)]


@pytest.fixture
def namespace(crd: None) -> str:
    """All requests are dry runs."""
    return "default"


def manifest(spec: dict[str, Any], name: str = "demo") -> dict[str, Any]:
    body = {"apiVersion": "inference.megatron.dev/v1beta1", "kind": "MegatronInference", "metadata": {"name": name}}
    return {**body, "spec": spec}


async def apply(api: KubeApi, namespace: str, body: dict[str, Any]) -> dict[str, Any]:
    """Apply a resource on the server's side, without keeping it."""
    placed = {**body, "metadata": {**body["metadata"], "namespace": namespace}}
    return await api.apply(RESOURCE, placed, manager="test", force=False, dry_run=True)


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            manifest({"model": {"source": {}}}),
            ["spec.model.source", "no source is set", "set exactly one of", "builtin"],
        ),
        (manifest({"model": {"source": TWO}}), ["spec.model.source", "several sources are set", "set exactly one of"]),
        (
            manifest({"model": SOURCE, "parallelism": {"tensor": 3}, "engine": {"gpusPerPod": 2}}),
            ["spec.parallelism", "must be divisible by spec.engine.gpusPerPod", "make one a multiple"],
        ),
        (
            manifest({"model": SOURCE, "engine": {"accelerator": {"resource": "amd.com/gpu"}}}),
            ["spec.engine.accelerator", "spec.engine.gpusPerPod is 0", "set it to the number of devices per pod"],
        ),
        (
            manifest(
                {
                    "model": SOURCE,
                    "parallelism": {"tensor": 2},
                    "engine": {"gpusPerPod": 2, "accelerator": {"resource": "nvidia.com/mig-1g.10gb"}},
                }
            ),
            ["spec.engine.gpusPerPod", "must be 1 for a MIG profile", "raise spec.replicas"],
        ),
        (
            manifest({"model": SOURCE, "engine": {"gpusPerPod": 1, "accelerator": {}}}),
            ["spec.engine.accelerator", "set exactly one of resource and claims"],
        ),
        (
            manifest({"model": SOURCE, "engine": {"gpusPerPod": 1, "accelerator": {"claims": [{"name": "gpu"}]}}}),
            ["spec.engine.accelerator.claims", "resourceClaimTemplateName and resourceClaimName"],
        ),
        (
            manifest({"model": SOURCE, "weights": {"revision": "7"}}),
            ["spec.weights.revision", "no other revisions", "remove spec.weights"],
        ),
        (
            manifest({"model": {"source": {"objectStore": {"url": "ftp://models/x"}}}}),
            ["spec.model.source.objectStore.url", "is ftp://models/x", "must be s3://BUCKET/PREFIX"],
        ),
        (
            manifest({"model": {"source": {"objectStore": {"url": "s3://models/{revision}"}}}}),
            ["spec.model.source.objectStore.url", "spec.weights.revision must be set"],
        ),
        (
            manifest({"model": {**SOURCE, "cache": {"persistentVolumeClaim": "models"}}}),
            ["spec.model.cache", "only downloaded models are cached"],
        ),
        (
            manifest({"model": {"source": {"huggingFace": {"repo": "org/sql"}}, "cache": {}}}),
            ["spec.model.cache", "set exactly one of persistentVolumeClaim and hostPath"],
        ),
        (
            manifest({"model": SOURCE, "rollout": {"maxUnavailable": 0}}),
            ["spec.rollout.maxUnavailable", "raise one of them"],
        ),
        (
            manifest({"model": SOURCE, "engine": {"batching": {"maxTokens": 8, "maxRequests": 9}}}),
            ["spec.engine.batching.maxTokens", "set it to at least"],
        ),
        (
            manifest({"model": SOURCE, "engine": {"roles": {"prefill": {"replicas": 1, "perDecode": 0.5}}}}),
            ["spec.engine.roles.prefill.perDecode", "not allowed together with", "remove one of the two"],
        ),
        (manifest({"model": SOURCE, "engine": {"roles": {}}}), ["spec.engine.roles.prefill", "Required"]),
        (
            manifest({"model": SOURCE, "engine": {"roles": {"prefill": {}}, "backend": "VLLM"}}),
            ["spec.engine.vllm.allowNixlBetweenPods", "without authentication", "set it to true"],
        ),
        (
            manifest({"model": SOURCE, "engine": {"roles": {"prefill": {}}, "batching": {"prefixCaching": False}}}),
            ["spec.engine.batching.prefixCaching", "set it to true"],
        ),
        (
            manifest(
                {
                    "model": SOURCE,
                    "engine": {
                        "roles": {"prefill": {}},
                        "backend": "VLLM",
                        "gpusPerPod": 1,
                        "vllm": {"allowNixlBetweenPods": True},
                    },
                    "parallelism": {"tensor": 2},
                }
            ),
            ["spec.engine.roles", "fits in one pod", "raise spec.engine.gpusPerPod"],
        ),
        (
            manifest(
                {
                    "model": SOURCE,
                    "engine": {
                        "roles": {"prefill": {}, "decode": {"batching": {"maxTokens": 4}}},
                        "batching": {"maxRequests": 8},
                    },
                }
            ),
            ["spec.engine.roles.decode.batching", "raise maxTokens"],
        ),
        (
            manifest({"model": SOURCE, "engine": {"vllm": {"args": {"quantization": "fp8"}}}}),
            ["spec.engine.vllm", "set spec.engine.backend to VLLM"],
        ),
        (
            manifest({"model": SOURCE, "engine": {"backend": "VLLM", "image": "vllm:1"}}),
            ["spec.engine.image", "set spec.engine.vllm.image instead"],
        ),
        (
            manifest(
                {"model": SOURCE, "engine": {"backend": "VLLM", "vllm": {"args": {str(i): i for i in range(65)}}}}
            ),
            ["spec.engine.vllm.args", "at most 64"],
        ),
        (
            manifest({"model": {**SOURCE, "dtype": "Int8"}, "engine": {"backend": "VLLM"}}),
            ["spec.model.dtype", "spec.engine.vllm.args.quantization"],
        ),
        (
            manifest({"model": SOURCE, "engine": {"backend": "VLLM"}, "parallelism": {"tensor": 2}}),
            ["spec.engine.vllm.allowPickleBetweenPods", "can run code there", "set it to true"],
        ),
        (
            manifest({"model": {"source": {"persistentVolumeClaim": {"claimName": "c", "path": "models"}}}}),
            ["spec.model.source.persistentVolumeClaim.path: is models; must be an absolute path", "begin it with /"],
        ),
        (
            manifest({"model": SOURCE, "engine": {"batching": {"kvCacheMemory": "2 GB"}}}),
            ["spec.engine.batching.kvCacheMemory: is 2 GB; must be a positive Kubernetes quantity", "such as 2Gi"],
        ),
        (
            manifest({"model": {**SOURCE, "adapters": [{"name": "sql", "source": {}}]}}),
            ["spec.model.adapters", "exactly one of huggingFace and path"],
        ),
        (manifest({"model": {**SOURCE, "adapters": [ON_VOLUME]}}), ["spec.model.adapters", "use source.huggingFace"]),
        (
            manifest({"model": {**SOURCE, "name": "sql", "adapters": [ON_HUB]}}),
            ["spec.model.adapters", "the name of the model", "another one"],
        ),
        (
            manifest({"model": {**SOURCE, "adapters": [ON_HUB]}}, name="sql"),
            ["spec.model.adapters", "the same name as the resource", "rename it"],
        ),
        (manifest({"model": {**SOURCE, "adapters": [ON_HUB, ON_HUB]}}), ["spec.model.adapters", "duplicate"]),
        (manifest({"model": {**SOURCE, "adapters": MANY}}), ["spec.model.adapters", "at most 64 items"]),
        (manifest({"model": SOURCE}, name="a" * 41), ["metadata.name", "at most 40 characters"]),
        (manifest({"model": SOURCE}, name="demo-server"), ["metadata.name", "choose another name"]),
        (manifest({"model": SOURCE, "replicas": -1}), ["spec.replicas", "greater than or equal to 0"]),
        (manifest({"model": SOURCE, "desiredState": "Asleep"}), ["spec.desiredState", "Paused"]),
        (manifest({"model": SOURCE, "replica": 2}), ["spec.replica", "not declared in schema"]),
    ],
)
async def test_an_invalid_resource_is_rejected_with_field_and_remedy(
    api: KubeApi, namespace: str, body: dict[str, Any], words: list[str]
) -> None:
    with pytest.raises(KubeApiError) as rejected:
        await apply(api, namespace, body)
    for word in words:
        assert word in rejected.value.message


@pytest.mark.parametrize("name", SAMPLES)
async def test_samples_are_accepted(api: KubeApi, namespace: str, name: str) -> None:
    for document in SAMPLES[name]:
        await apply(api, namespace, document)


@pytest.mark.parametrize(
    "engine",
    [
        {"backend": "VLLM"},
        {"backend": "VLLM", "gpusPerPod": 2, "vllm": {"args": {"quantization": "fp8", "hf_overrides": {"a": [1]}}}},
        {"backend": "VLLM", "vllm": {"allowPickleBetweenPods": True}},
        {"backend": "VLLM", "ranksPerPod": 2, "vllm": {"allowNixlBetweenPods": True}, "roles": {"prefill": {}}},
    ],
    ids=["one pod", "two ranks in a pod", "two pods", "two ranks in a pod with roles"],
)
async def test_vllm_engines_are_accepted_with_every_argument_kept(
    api: KubeApi, namespace: str, engine: dict[str, Any]
) -> None:
    ranks = 1 if engine == {"backend": "VLLM"} else 2
    body = manifest({"model": SOURCE, "engine": engine, "parallelism": {"tensor": ranks}})
    taken = await apply(api, namespace, body)
    assert taken["spec"]["engine"].get("vllm", {}).get("args") == engine.get("vllm", {}).get("args")


def test_there_are_samples() -> None:
    assert SAMPLES


async def test_every_bad_value_of_the_schema_is_rejected_with_its_field(api: KubeApi, namespace: str) -> None:
    path = f"{RESOURCE.path(namespace)}?dryRun=All&fieldValidation=Strict"
    taken: list[str] = []
    unnamed: list[str] = []
    for bad in bad_values():
        try:
            await api.request("POST", path, body=manifest(bad.spec()))
            taken.append(bad.field)
        except KubeApiError as error:
            if error.code not in (400, 422) or bad.path[-1] not in error.message:
                unnamed.append(f"{bad.field}: {error.message}")
    assert (taken, unnamed) == ([], [])
