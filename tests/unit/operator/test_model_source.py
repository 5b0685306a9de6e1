"""Models in object stores, and the cache that engines of a resource fill."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from in_memory_cluster import Cluster
from pydantic import ValidationError

from megatron_operator.decision.decide import decide
from megatron_operator.decision.diagnosis import diagnose, references
from megatron_operator.decision.reduce import reduce_pod
from megatron_operator.decision.world import DOWNLOAD_SECONDS, Download
from megatron_operator.render.check import check_pod
from megatron_operator.render.context import NotAllowed, RenderContext
from megatron_operator.render.engine import engine_revision, engine_statefulset
from megatron_operator.render.model_source import model_argument, model_hash
from megatron_operator.render.server import server_deployment
from megatron_operator.resource.conditions import Reason
from megatron_operator.resource.pod_policy import PodPolicy
from megatron_operator.resource.settings import Settings
from megatron_operator.resource.spec import parse_spec
from megatron_operator.resource.status import MegatronInferenceStatus

S3 = {"objectStore": {"url": "s3://models/llama/{revision}/", "credentialsSecretRef": {"name": "bucket"}}}
HUB = {"huggingFace": {"repo": "org/name", "revision": "c" * 40}}
CLAIM = {"persistentVolumeClaim": "models"}
NODE = {"hostPath": "/var/cache/models"}


def context(
    source: dict[str, Any], *, cache: Any = None, policy: PodPolicy | None = None, **fields: Any
) -> RenderContext:
    model = {"source": source} | ({"cache": cache} if cache else {})
    settings = Settings(runtime_image="registry.example/runtime:1", pod_policy=policy or PodPolicy())
    return RenderContext("demo", "default", "uid", parse_spec({"model": model, **fields}), settings)


def engine(ctx: RenderContext) -> dict[str, Any]:
    found: dict[str, Any] = engine_statefulset(ctx, 0, pods=1)["spec"]["template"]["spec"]
    return found


def test_credentials_are_variables_of_engines_and_servers() -> None:
    ctx = context(S3, weights={"revision": "v1"})
    assert model_argument(ctx) == "s3://models/llama/v1"
    server = server_deployment(ctx)["spec"]["template"]["spec"]
    for pod in (engine(ctx), server):
        (container,) = pod["containers"]
        args = container["args"]
        assert args[args.index("--model") + 1] == "s3://models/llama/v1"
        secrets = {
            entry["name"]: entry["valueFrom"]["secretKeyRef"]
            for entry in container["env"]
            if "secretKeyRef" in entry.get("valueFrom", {})
        }
        assert secrets["AWS_SECRET_ACCESS_KEY"] == {"name": "bucket", "key": "AWS_SECRET_ACCESS_KEY", "optional": True}
        assert all(name.startswith("AWS_") for name in secrets)
        assert container["envFrom"] == [{"configMapRef": {"name": container["envFrom"][0]["configMapRef"]["name"]}}]
    assert (
        references(ctx.spec.model_dump(mode="json"))["secret", "bucket"]
        == "spec.model.source.objectStore.credentialsSecretRef"
    )


def test_without_a_secret_the_identity_of_the_service_account_is_used() -> None:
    (container,) = engine(context({"objectStore": {"url": "gs://models/llama"}}))["containers"]
    assert not [entry for entry in container["env"] if "secretKeyRef" in entry.get("valueFrom", {})]


@pytest.mark.parametrize("source", [S3, HUB])
@pytest.mark.parametrize("cache", [CLAIM, NODE])
def test_only_the_init_container_writes_the_cache(source: dict[str, Any], cache: dict[str, str]) -> None:
    policy = PodPolicy(model_cache_paths=("/var/cache",))
    weights = {"weights": {"revision": "v1"}} if source is S3 else {}
    engine_image = {"image": "registry.example/runtime:other"}
    ctx = context(source, cache=cache, policy=policy, engine=engine_image, **weights)
    for pod in (engine(ctx), check_pod(ctx)["spec"]):
        (fetch,), (container,) = pod["initContainers"], pod["containers"]
        cached = ["--cache", "/model-cache", "--progress-port", "8080"]
        assert fetch["args"] == ["fetch", model_argument(ctx), *cached]
        assert fetch["image"] == "registry.example/runtime:1"
        assert fetch["volumeMounts"] == [{"name": "model-cache", "mountPath": "/model-cache"}]
        assert {"name": "model-cache", "mountPath": "/model-cache", "readOnly": True} in container["volumeMounts"]
        assert {"name": "MEGATRON_MODEL_CACHE", "value": "/model-cache"} in container["env"]
        (volume,) = [volume for volume in pod["volumes"] if volume["name"] == "model-cache"]
        wanted = {"persistentVolumeClaim": {"claimName": "models"}}
        if cache is NODE:
            wanted = {"hostPath": {"path": "/var/cache/models", "type": "Directory"}}
        assert volume == {"name": "model-cache", **wanted}


def test_a_cache_restarts_engines_and_no_server() -> None:
    plain, cached = context(HUB), context(HUB, cache=CLAIM)
    assert engine_revision(engine_statefulset(plain, 0, pods=1)) != engine_revision(
        engine_statefulset(cached, 0, pods=1)
    )
    assert server_deployment(plain) == server_deployment(cached)
    assert model_hash(plain) == model_hash(cached), "engines with the cache continue the answers of the others"


def test_the_chart_must_allow_a_directory_of_the_nodes() -> None:
    with pytest.raises(NotAllowed, match=r"spec\.model\.cache\.hostPath: .*podPolicy\.modelCachePaths") as rejected:
        engine(context(HUB, cache=NODE))
    assert "caches on nodes are not allowed" in str(rejected.value)
    with pytest.raises(NotAllowed, match="paths below /var/cache/other are allowed"):
        engine(context(HUB, cache=NODE, policy=PodPolicy(model_cache_paths=("/var/cache/other",))))
    with pytest.raises(NotAllowed):  # a path of podTemplates, which are mounted read-only
        engine(context(HUB, cache=NODE, policy=PodPolicy(host_paths=("/var/cache",))))
    with pytest.raises(ValueError, match=r"podPolicy\.modelCachePaths \(--allow-model-cache-path\): is '/'"):
        PodPolicy(model_cache_paths=("/",))


@pytest.mark.parametrize(
    ("overlay", "said"),
    [
        (
            {"containers": [{"name": "engine", "volumeMounts": [{"name": "model-cache", "mountPath": "/mnt/c"}]}]},
            "the cache of models is mounted read-only",
        ),
        ({"volumes": [{"name": "model-cache", "emptyDir": {}}]}, "the volume model-cache is the operator's own"),
        (
            {"containers": [{"name": "engine", "env": [{"name": "MEGATRON_MODEL_CACHE", "value": "/mnt"}]}]},
            "the operator sets this variable itself",
        ),
    ],
)
def test_a_pod_template_does_not_get_write_access_to_the_cache(overlay: dict[str, Any], said: str) -> None:
    with pytest.raises(NotAllowed, match=said):
        engine(context(HUB, cache=CLAIM, engine={"podTemplate": {"spec": overlay}}))


def test_a_pod_template_does_not_redirect_credentials() -> None:
    env = [{"name": "AWS_ENDPOINT_URL", "value": "https://elsewhere.example"}]
    template = {"spec": {"containers": [{"name": "engine", "env": env}]}}
    weights = {"revision": "v1"}
    with pytest.raises(NotAllowed, match="redirect no token"):
        engine(context(S3, weights=weights, engine={"podTemplate": template}))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model": {"source": {"objectStore": {"url": "s3://models/../x"}}}}, "must be s3://BUCKET"),
        ({"model": {"source": {"objectStore": {"url": "ftp://models/x"}}}}, "must be s3://BUCKET"),
        ({"model": {"source": {"objectStore": {"url": "https://user:word@host/x"}}}}, "must be s3://BUCKET"),
        ({"model": {"source": S3}}, r"spec\.model\.source\.objectStore\.url: contains \{revision\}"),
        (
            {"model": {"source": {"objectStore": {"url": "s3://models/x"}}}, "weights": {"revision": "v1"}},
            r"spec\.model\.source\.objectStore\.url: has no \{revision\} placeholder",
        ),
        ({"model": {"source": HUB, "cache": {}}}, "set exactly one of persistentVolumeClaim and hostPath"),
        ({"model": {"source": HUB, "cache": CLAIM | NODE}}, "set exactly one of persistentVolumeClaim and hostPath"),
        ({"model": {"source": HUB, "cache": {"hostPath": "/var/../etc"}}}, "an absolute path of letters"),
        ({"model": {"source": {"builtin": "x"}, "cache": CLAIM}}, "only downloaded models are cached"),
    ],
)
def test_bad_sources_and_caches_are_rejected(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        parse_spec(fields)


def test_the_error_of_a_download_is_the_cause_of_the_wait() -> None:
    message = (
        "Error: no objects with the prefix 'llama/v1' in bucket models (s3://models/llama/v1): the model does not "
        "exist there; correct the bucket or the prefix"
    )
    ended = {"exitCode": 1, "message": message, "finishedAt": "2026-11-24T00:00:00Z", "reason": "Error"}
    pod = {
        "metadata": {
            "name": "demo-engine-0-0",
            "namespace": "default",
            "uid": "1",
            "labels": {
                "app.kubernetes.io/component": "engine",
                "inference.megatron.dev/engine": "demo-engine-0",
            },
        },
        "spec": {"initContainers": [{"name": "fetch", "image": "a"}], "containers": [{"name": "engine", "image": "a"}]},
        "status": {
            "phase": "Pending",
            "initContainerStatuses": [
                {"name": "fetch", "ready": False, "restartCount": 0, "state": {"terminated": ended}}
            ],
        },
    }
    found = diagnose(reduce_pod(pod))
    assert found is not None
    assert found[0] is Reason.WEIGHTS_MISSING
    assert "container fetch ended with exit code 1" in found[1]
    assert "s3://models/llama/v1" in found[1]


def _fetching(cluster: Cluster) -> list[str]:
    """Let the init containers of all engine pods run, and return their names."""
    found = [name for name in cluster.pods if name.startswith("demo-engine-")]
    for number, name in enumerate(found):
        running = {"name": "fetch", "restartCount": 0, "state": {"running": {"startedAt": "2026-11-24T00:00:00Z"}}}
        cluster.pods[name]["status"] = {
            "phase": "Pending",
            "podIP": f"10.0.0.{number + 1}",
            "initContainerStatuses": [running],
        }
    return found


def test_the_status_has_the_progress_of_a_download() -> None:
    cluster = Cluster({"replicas": 2, "model": {"source": HUB, "cache": CLAIM}})
    for _ in range(12):
        cluster.step()
        if any(name.startswith("demo-engine-1") for name in cluster.pods):
            break
        cluster.tick()
    first, _ = pods = _fetching(cluster)
    assert cluster.coordinator is not None
    cluster.coordinator.engines.clear()
    world = cluster.world()
    assert [pod.fetching_at for pod in world.pods if pod.name in pods] == ["10.0.0.1", "10.0.0.2"]
    decision = decide(world)
    assert "download" not in decision.status, "the progress is not known yet"
    assert decision.requeue_after is not None
    assert decision.requeue_after <= DOWNLOAD_SECONDS
    decision = decide(replace(world, download=Download(first, 25, 101, 10)))
    MegatronInferenceStatus.model_validate(decision.status)
    assert decision.status["download"] == {
        "pod": first,
        "bytes": 25,
        "totalBytes": 101,
        "bytesPerSecond": 10,
        "secondsLeft": 8,
    }
    messages = [entry["message"] for entry in decision.status["conditions"]]
    assert any("demo-engine-0, demo-engine-1 to download the model" in message for message in messages), messages
    stalled = decide(replace(world, download=Download(first, 25, 101, 0)))
    assert stalled.status["download"] == {"pod": first, "bytes": 25, "totalBytes": 101}
    for name in pods:
        cluster.pods[name]["status"] = {"phase": "Running", "podIP": "10.0.0.1"}
    assert "download" not in decide(cluster.world()).status
