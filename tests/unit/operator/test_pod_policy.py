"""What a podTemplate may contain, by default and with each switch of the chart."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from bad_values import bad_values
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from in_memory_cluster import MINIMAL, Cluster
from soak import size

from megatron_operator.decision.world import ChildRef
from megatron_operator.render.allowed_names import ENVIRONMENT, PROTECTED, SECRETS
from megatron_operator.render.children import all_children
from megatron_operator.render.context import NotAllowed, RenderContext, RenderError
from megatron_operator.render.model_source import OBJECT_STORE_VARIABLES
from megatron_operator.render.pod import config_data
from megatron_operator.resource.names import LABEL_COMPONENT, LABEL_ENGINE, LABEL_INSTANCE, LABEL_MANAGED_BY, LABEL_NAME
from megatron_operator.resource.pod_policy import PodPolicy, Switch, in_repositories, repository_of
from megatron_operator.resource.settings import Settings
from megatron_operator.resource.spec import parse_spec
from megatron_runtime.protocol.vllm_arguments import CLASSES, Effect

from .pod_security import violations as restricted_violations

ROOT = Path(__file__).parents[3]
GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.yaml"))
RUNTIME = "registry.example/runtime"
HUB = {"huggingFace": {"repo": "org/name", "tokenSecretRef": {"name": "hf-token", "key": "token"}}}
ALL = PodPolicy(
    host_paths=("/dev/infiniband",),
    capabilities=("IPC_LOCK",),
    host_network=True,
    sidecars=True,
    service_accounts=("trainer",),
    image_repositories=("registry.example/tools/",),
    environment=("HF_ENDPOINT", "LD_LIBRARY_PATH", "NVSHMEM_*"),
    secret_environment=("WANDB_API_KEY",),
    metadata=("k8s.v1.cni.cncf.io/networks", "example.com/", "team"),
)
TRUSTED = PodPolicy(profile="trusted")
SAFE = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
SIDECAR = {"name": "log", "image": "registry.example/tools/log:1", "securityContext": SAFE}


def context(policy: PodPolicy | None = None, **fields: Any) -> RenderContext:
    spec = {"model": {"source": HUB}, "server": {"tls": {"secretName": "front-cert"}}, **fields}
    fixed = Settings(runtime_image=f"{RUNTIME}:1", pod_policy=policy or PodPolicy())
    return RenderContext("demo", "default", "uid", parse_spec(spec), fixed)


def render(overlay: dict[str, Any], policy: PodPolicy | None = None, *, component: str = "engine") -> list[Any]:
    multi = {"parallelism": {"pipeline": 2}}
    return all_children(context(policy, **{**multi, component: {"podTemplate": overlay}}))


def pod_of(children: list[Any], kind: str = "StatefulSet") -> dict[str, Any]:
    return next(child["spec"]["template"] for child in children if child["kind"] == kind)


def container(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "engine", **fields}]}}


def pod(**fields: Any) -> dict[str, Any]:
    return {"spec": fields}


def volume(**source: Any) -> dict[str, Any]:
    return pod(volumes=[{"name": "v", **source}])


HOST = {"name": "rdma", "hostPath": {"path": "/dev/infiniband"}}
C0 = "spec.containers[0]"

ALLOWED: list[dict[str, Any]] = [
    {},
    container(resources={"limits": {"rdma/hca_shared": 1, "memory": "1Gi"}, "claims": [{"name": "gpu"}]}),
    pod(resourceClaims=[{"name": "gpu", "resourceClaimTemplateName": "gpu"}]),
    pod(nodeSelector={"gpu": "h100"}, tolerations=[{"operator": "Exists"}]),
    pod(affinity={"nodeAffinity": {}}, topologySpreadConstraints=[], schedulerName="volcano"),
    pod(runtimeClassName="nvidia", priorityClassName="high", imagePullSecrets=[{"name": "pull"}]),
    pod(terminationGracePeriodSeconds=90, hostNetwork=False, automountServiceAccountToken=False),
    {
        "metadata": {
            "labels": {"kueue.x-k8s.io/queue-name": "gpus", "sidecar.istio.io/inject": "false"},
            "annotations": {"prometheus.io/scrape": "", "linkerd.io/inject": "disabled"},
        }
    },
    {"metadata": {"annotations": {"cluster-autoscaler.kubernetes.io/safe-to-evict": "false"}}},
    container(env=[{"name": "NCCL_DEBUG", "value": "INFO"}, {"name": "https_proxy", "value": "http://proxy:3128"}]),
    container(env=[{"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "compute,utility"}]),
    container(env=[{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf-token", "key": "token"}}}]),
    container(env=[{"name": "NCCL_IB_HCA", "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k"}}}]),
    container(env=[{"name": "OTEL_SERVICE_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]),
    container(env=[{"name": "MEGATRON_THREADS", "value": "4", "valueFrom": None}]),
    container(image=f"{RUNTIME}:2"),
    container(securityContext={"privileged": False, "capabilities": {"drop": ["ALL"]}}),
    volume(persistentVolumeClaim={"claimName": "c"}),
    volume(configMap={"name": "c"}),
    volume(emptyDir={"medium": "Memory"}),
    pod(volumes=[{"name": "cache", "emptyDir": None, "persistentVolumeClaim": {"claimName": "c"}}]),
    pod(volumes=[{"name": "cache", "persistentVolumeClaim": {"claimName": "c"}}]),
    container(volumeMounts=[{"name": "v", "mountPath": "/mnt/v", "subPath": "a", "readOnly": True}]),
    pod(initContainers=[{"name": "preflight", "resources": {"limits": {"cpu": "1"}}}]),
]

REJECTED: dict[Switch | None, list[tuple[dict[str, Any], str]]] = {
    Switch.PROFILE: [
        (container(securityContext={"privileged": True}), f"{C0}.securityContext.privileged: is True"),
        (container(securityContext={"allowPrivilegeEscalation": True}), "allowPrivilegeEscalation: is True"),
        (container(securityContext={"runAsNonRoot": False}), "runAsNonRoot: is False"),
        (container(securityContext={"runAsUser": 0}), "runAsUser: is 0"),
        (container(securityContext={"readOnlyRootFilesystem": False}), "readOnlyRootFilesystem: is False"),
        (container(securityContext={"capabilities": {"drop": []}}), "capabilities.drop: is []"),
        (container(securityContext={"seccompProfile": {"type": "Unconfined"}}), "seccompProfile: is"),
        (container(securityContext={"procMount": "Unmasked"}), "procMount: is 'Unmasked'"),
        (container(securityContext=None), f"{C0}.securityContext: is None"),
        (pod(securityContext={"runAsUser": 0}), "podTemplate.spec.securityContext: is"),
        (pod(securityContext={"sysctls": [{"name": "kernel.msgmax", "value": "1"}]}), "spec.securityContext: is"),
        (pod(hostPID=True), "spec.hostPID: is True"),
        (pod(hostIPC=True), "spec.hostIPC: is True"),
        (pod(shareProcessNamespace=True), "spec.shareProcessNamespace: is True"),
        (pod(nodeName="node-1"), "spec.nodeName: is 'node-1'"),
        (pod(hostAliases=[{"ip": "1.2.3.4", "hostnames": ["h"]}]), "spec.hostAliases: is"),
        (pod(dnsConfig={"nameservers": ["1.2.3.4"]}), "spec.dnsConfig: is"),
        (pod(priorityClassName="system-node-critical"), "spec.priorityClassName: is 'system-node-critical'"),
        (pod(ephemeralContainers=[{"name": "x"}]), "spec.ephemeralContainers: is"),
        (pod(fieldOfTheFuture=1), "spec.fieldOfTheFuture: is 1"),
        ({"metadata": {"finalizers": ["x"]}}, "metadata.finalizers: is"),
        (container(command=["sh"]), f"{C0}.command: is ['sh']"),
        (container(lifecycle={"postStart": {"exec": {"command": ["sh"]}}}), f"{C0}.lifecycle: is"),
        (container(livenessProbe={"exec": {"command": ["sh"]}}), f"{C0}.livenessProbe: is"),
        (container(ports=[{"containerPort": 8000, "hostPort": 8000}]), f"{C0}.ports: is"),
        (container(volumeDevices=[{"name": "d", "devicePath": "/d"}]), f"{C0}.volumeDevices: is"),
        (
            container(env=[{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "other", "key": "k"}}}]),
            "env[0].valueFrom.secretKeyRef.name: is 'other'; Secrets that the spec itself names are allowed "
            "(front-cert, hf-token)",
        ),
        (volume(secret={"secretName": "s"}), "volumes[0].secret: is"),
        (volume(projected={"sources": [{"serviceAccountToken": {"path": "t"}}]}), "volumes[0].projected: is"),
        (volume(csi={"driver": "d"}), "volumes[0].csi: is"),
        (volume(ephemeral={}), "volumes[0].ephemeral: is"),
        (volume(nfs={"server": "s", "path": "/"}), "volumes[0].nfs: is"),
        (volume(image={"reference": "r"}), "volumes[0].image: is"),
        (container(volumeMounts=[{"name": "v", "mountPath": "/opt/venv"}]), "mountPath: is '/opt/venv'"),
        (container(volumeMounts=[{"name": "v", "mountPath": "/mnt/../opt"}]), "mountPath: is '/mnt/../opt'"),
        (
            container(volumeMounts=[{"name": "v", "mountPath": "/mnt", "mountPropagation": "Bidirectional"}]),
            "mountPropagation: is 'Bidirectional'",
        ),
        (
            container(env=[{"name": "HTTPS_PROXY", "value": "http://$(HF_TOKEN)@proxy"}]),
            "env[0].value: is 'http://$(HF_TOKEN)@proxy'; texts with $(NAME)",
        ),
        (
            container(volumeMounts=[{"name": "v", "mountPath": "/mnt/v", "subPathExpr": "$(HF_TOKEN)"}]),
            "subPathExpr: is '$(HF_TOKEN)'",
        ),
    ],
    None: [
        ({"spec": None}, "podTemplate.spec: is None"),
        (pod(containers=None), "spec.containers: is None"),
        (container(args=["-c"]), f"{C0}.args: is ['-c']"),
        (container(envFrom=[{"secretRef": {"name": "s"}}]), f"{C0}.envFrom: is"),
        (pod(volumes=[{"name": "keys", "emptyDir": {}}]), "volumes[0]: is"),
        (pod(volumes=[{"name": "tmp", "persistentVolumeClaim": {"claimName": "c"}}]), "persistentVolumeClaim: is"),
        (container(volumeMounts=[{"name": "v", "mountPath": "/cache/triton"}]), "mountPath: is '/cache/triton'"),
        ({"metadata": {"labels": {"app.kubernetes.io/name": "victim"}}}, "the operator sets this key itself"),
        ({"metadata": {"labels": {"inference.megatron.dev/engine": "x"}}}, "the operator sets this key itself"),
        ({"metadata": {"labels": None}}, "give an object of strings"),
    ],
    Switch.CAPABILITIES: [
        (container(securityContext={"capabilities": {"add": ["IPC_LOCK"]}}), "add[0]: is 'IPC_LOCK'"),
    ],
    Switch.HOST_PATHS: [
        (pod(volumes=[HOST]), "volumes[0].hostPath.path: is '/dev/infiniband'"),
    ],
    Switch.HOST_NETWORK: [
        (pod(hostNetwork=True), "spec.hostNetwork: is True"),
        (pod(hostNetwork=True, dnsPolicy="ClusterFirstWithHostNet"), "spec.hostNetwork: is True"),
    ],
    Switch.SIDECARS: [
        (pod(containers=[SIDECAR]), f"{C0}.name: is 'log'; rendered containers are allowed (engine)"),
        (pod(initContainers=[SIDECAR]), "spec.initContainers[0].name: is 'log'"),
    ],
    Switch.SERVICE_ACCOUNTS: [
        (pod(serviceAccountName="trainer"), "spec.serviceAccountName: is 'trainer'"),
        (
            pod(automountServiceAccountToken=True, serviceAccountName="trainer"),
            "spec.automountServiceAccountToken: is True",
        ),
    ],
    Switch.IMAGES: [
        (container(image="registry.example/tools/engine:1"), f"{C0}.image: is 'registry.example"),
    ],
    Switch.ENVIRONMENT: [
        (container(env=[{"name": "LD_LIBRARY_PATH", "value": "/mnt"}]), "name: is 'LD_LIBRARY_PATH'"),
        (container(env=[{"name": "HF_ENDPOINT", "value": "http://x"}]), "name: is 'HF_ENDPOINT'"),
        (
            container(env=[{"name": "HF_TOKEN", "value": "hf_secret"}]),
            "env[0].value: is '…'; it takes a value of a Secret only",
        ),
        (container(env=[{"name": "NVSHMEM_IB_ENABLE", "value": "1"}]), "is 'NVSHMEM_IB_ENABLE'"),
        (container(env=[{"name": "HF_HOME", "value": "/mnt"}]), "the operator sets this variable itself"),
        (
            container(env=[{"name": "NVIDIA_DRIVER_CAPABILITIES", "value": "all"}]),
            "env[0].value: is 'all'; give NVIDIA_DRIVER_CAPABILITIES a value that matches",
        ),
    ],
    Switch.METADATA: [
        (
            {"metadata": {"annotations": {"k8s.v1.cni.cncf.io/networks": "ib"}}},
            "metadata.annotations[k8s.v1.cni.cncf.io/networks]: is 'ib'",
        ),
        ({"metadata": {"labels": {"app": "victim"}}}, "metadata.labels[app]: is 'victim'"),
        ({"metadata": {"labels": {"sidecar.istio.io/inject": "true"}}}, "false|disabled is allowed"),
    ],
    Switch.SECRET_ENVIRONMENT: [
        (
            container(
                env=[{"name": "NCCL_DEBUG", "valueFrom": {"secretKeyRef": {"name": "hf-token", "key": "token"}}}]
            ),
            "env[0].valueFrom.secretKeyRef: is 'NCCL_DEBUG'; only variables that take secrets",
        ),
    ],
}


def _name(case: Any) -> str:
    return json.dumps(case)[:60] if isinstance(case, dict) else ""


@pytest.mark.parametrize("overlay", ALLOWED, ids=_name)
def test_what_placement_resources_and_data_need_is_allowed(overlay: dict[str, Any]) -> None:
    assert restricted_violations(pod_of(render(overlay))) == []


@pytest.mark.parametrize(
    ("overlay", "words", "switch"),
    [(overlay, words, switch) for switch, cases in REJECTED.items() for overlay, words in cases],
    ids=_name,
)
def test_what_is_not_listed_is_rejected_with_its_field_and_the_switch_that_allows_it(
    overlay: dict[str, Any], words: str, switch: Switch | None
) -> None:
    with pytest.raises(NotAllowed) as rejected:
        render(overlay)
    message = str(rejected.value)
    assert message.startswith("spec.engine.podTemplate")
    assert words in message
    assert ("no value of the operator's chart allows it" if switch is None else switch.chart_value) in message
    if switch in (Switch.PROFILE, None):
        with pytest.raises(NotAllowed):
            render(overlay, ALL)
    if switch is None:
        with pytest.raises(NotAllowed):
            render(overlay, TRUSTED)
    else:
        assert pod_of(render(overlay, TRUSTED if switch is Switch.PROFILE else _allowing(switch, overlay)))


def _allowing(switch: Switch, overlay: dict[str, Any]) -> PodPolicy:
    """Return ALL, with the names that the overlay uses on the list of the switch."""
    names = [entry["name"] for entry in (overlay.get("spec") or {}).get("containers", [{}])[0].get("env", ())]
    keys = [key for keys in (overlay.get("metadata") or {}).values() for key in keys or ()]
    if switch is Switch.ENVIRONMENT:
        return replace(ALL, environment=(*ALL.environment, *names))
    if switch is Switch.SECRET_ENVIRONMENT:
        return replace(ALL, secret_environment=(*ALL.secret_environment, *names))
    return replace(ALL, metadata=(*ALL.metadata, *keys)) if switch is Switch.METADATA else ALL


@pytest.mark.parametrize("component", ["engine", "coordinator", "server"])
def test_the_policy_is_the_same_for_every_component(component: str) -> None:
    with pytest.raises(NotAllowed, match=f"^spec.{component}.podTemplate.spec.hostPID: is True; "):
        render(pod(hostPID=True), ALL, component=component)


# --- The deny lists of earlier releases, which the allow lists replace ----------------------------------------------


def words(text: str) -> list[str]:
    return text.split()


CODE_VARIABLES = words("""
    LD_PRELOAD LD_LIBRARY_PATH LD_AUDIT ld_preload GLIBC_TUNABLES GCONV_PATH LOCPATH PATH HOME ENV BASH_ENV PYTHONPATH
    PYTHONSTARTUP PYTHONHOME VIRTUAL_ENV CC CXX CUDA_HOME CUDA_PATH CUDA_INJECTION64_PATH NVIDIA_VISIBLE_DEVICES
    NVIDIA_IMEX_CHANNELS NVIDIA_MIG_CONFIG_DEVICES TRITON_CACHE_DIR TRITON_PTXAS_PATH NUMBA_CACHE_DIR
    TORCHINDUCTOR_CACHE_DIR TORCHINDUCTOR_CPP_WRAPPER TORCH_HOME TORCH_EXTENSIONS_DIR TORCH_FORCE_WEIGHTS_ONLY_LOAD
    TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD OUTLINES_CACHE_DIR XDG_CACHE_HOME XDG_CONFIG_HOME NCCL_NET_PLUGIN
    NCCL_TUNER_PLUGIN NCCL_PROFILER_PLUGIN NCCL_ENV_PLUGIN NCCL_CONF_FILE UCX_MODULES UCX_MODULE_DIR FI_PROVIDER_PATH
    RDMAV_DRIVERS IBV_DRIVERS OPENSSL_CONF OPENSSL_MODULES OMP_TOOL OMP_TOOL_LIBRARIES OMPI_MCA_x PMIX_x SSLKEYLOGFILE
    HF_HOME HF_TOKEN_PATH HF_HUB_CACHE HUGGINGFACE_HUB_CACHE MEGATRON_MODEL_CACHE VLLM_PLUGINS VLLM_NCCL_SO_PATH
    VLLM_CUDART_SO_PATH VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_ALLOW_RUNTIME_LORA_UPDATING VLLM_SERVER_DEV_MODE
    VLLM_USE_MODELSCOPE VLLM_CACHE_ROOT VLLM_CONFIG_ROOT VLLM_LOGGING_CONFIG_PATH VLLM_MODEL_REDIRECT_PATH
    VLLM_TUNED_CONFIG_FOLDER VLLM_TORCH_PROFILER_DIR VLLM_LORA_RESOLVER_CACHE_DIR VLLM_USAGE_STATS_SERVER
    FLASHINFER_WORKSPACE_BASE DG_JIT_CACHE_DIR DG_JIT_NVCC_COMPILER
""")
OPEN_SET = words("""
    NCCL_TOPO_FILE NCCL_TOPO_DUMP_FILE NCCL_DEBUG_FILE NCCL_GRAPH_FILE NCCL_COMM_ID NCCL_RAS_ADDR NCCL_GIN_PLUGIN
    CUDA_VISIBLE_DEVICES CUDA_CACHE_PATH CUDA_COREDUMP_FILE TORCH_LOGS TORCH_NCCL_DEBUG_INFO_TEMP_FILE
    TORCH_DEVICE_BACKEND_AUTOLOAD OTEL_PYTHON_ID_GENERATOR OTEL_PROPAGATORS OTEL_EXPERIMENTAL_RESOURCE_DETECTORS
    OTEL_EXPORTER_OTLP_CERTIFICATE QT_PLUGIN_PATH GIO_EXTRA_MODULES PERL5LIB NODE_OPTIONS JAVA_TOOL_OPTIONS RUBYOPT
    MALLOC_CONF AFTER_THE_NEXT_RELEASE OCL_ICD_VENDORS VK_ICD_FILENAMES NVCC_PREPEND_FLAGS NVCC_CCBIN CPATH
    LIBRARY_PATH C_INCLUDE_PATH GCC_EXEC_PREFIX COMPILER_PATH TMPDIR MEGATRON_PARENT_PID
""")
"""Names that no earlier list had."""
TOKEN_VARIABLES = words("""
    HF_ENDPOINT SSL_CERT_FILE SSL_CERT_DIR REQUESTS_CA_BUNDLE CURL_CA_BUNDLE AWS_ENDPOINT_URL AWS_CONFIG_FILE
    AWS_CA_BUNDLE AWS_ENDPOINT AWS_SKIP_SIGNATURE GOOGLE_BASE_URL GOOGLE_APPLICATION_CREDENTIALS
    AZURE_STORAGE_ENDPOINT AZURE_AUTHORITY_HOST
""")
INJECTING_KEYS = words("""
    container.apparmor.security.beta.kubernetes.io/engine seccomp.security.alpha.kubernetes.io/pod cdi.k8s.io/gpu
    openshift.io/scc k8s.v1.cni.cncf.io/networks multus-cni.io/x k8s.ovn.org/x cni.projectcalico.org/ipAddrs
    policy.cilium.io/proxy-visibility devices.nri.io/container.engine sidecar.istio.io/inject proxy.istio.io/config
    linkerd.io/inject config.linkerd.io/proxy-image vault.hashicorp.com/agent-inject kuma.io/sidecar-injection
    dapr.io/enabled openservicemesh.io/sidecar-injection instrumentation.opentelemetry.io/inject-python
    sidecar.jaegertracing.io/inject ad.datadoghq.com/engine.checks oneagent.dynatrace.com/inject
    vault.security.banzaicloud.io/x eks.amazonaws.com/x azure.workload.identity/use iam.gke.io/x gke-gcsfuse/volumes
    aad-pod-identity.x/y infisical.com/x external-secrets.io/x conjur.org/x kyverno.io/x sysdig.com/x newrelic.com/x
    instana.io/x io.katacontainers.config.hypervisor.path io.kubernetes.cri-o.Devices io.containerd.x io.cilium.x
    run.oci.hooks aadpodidbinding
""")
SELECTED = words("""
    app name team k8s-app tier role app.kubernetes.io/part-of app.kubernetes.io/version app.kubernetes.io/created-by
    helm.sh/chart service.istio.io/canonical-name example.com/service statefulset.kubernetes.io/pod-name
""")
"""Labels by which Services commonly select pods."""


@pytest.mark.parametrize("source", [{"builtin": "smollm2-135m"}, HUB], ids=["open", "token"])
def test_a_variable_that_is_not_listed_is_rejected(source: dict[str, Any]) -> None:
    for name in (*CODE_VARIABLES, *OPEN_SET, *TOKEN_VARIABLES):
        overlay = container(env=[{"name": name, "value": "x"}])
        with pytest.raises(NotAllowed, match=rf"env\[0\].name: is '{name}'; .*podPolicy.environment"):
            all_children(context(model={"source": source}, engine={"podTemplate": overlay}))


def test_every_listed_variable_is_allowed_and_no_rendered_one_is_unknown() -> None:
    values = {"Time zone": "Europe/Berlin", "NVIDIA driver libraries": "compute,utility"}
    listed = [
        {"name": name.replace("*", "ALL"), "value": values.get(title, "1")}
        for title, group in ENVIRONMENT.items()
        for name in group.names
    ]
    secrets = [{"name": name, "valueFrom": {"secretKeyRef": {"name": "hf-token", "key": "token"}}} for name in SECRETS]
    assert render(container(env=[*listed, *secrets]))
    assert not {each["name"] for each in listed} & {*CODE_VARIABLES, *OPEN_SET, *TOKEN_VARIABLES, *PROTECTED, *SECRETS}
    object_stores = {name for names in OBJECT_STORE_VARIABLES.values() for name in names}
    assert set(SECRETS) - {"HF_TOKEN"} <= object_stores
    rendered = set(config_data(context()))
    for fields in (
        {"engine": {"gpusPerPod": 2}},
        {"engine": {"backend": "VLLM", "vllm": {"allowPickleBetweenPods": True}}},
    ):
        model = {"source": HUB, "cache": {"persistentVolumeClaim": "c"}}
        children = all_children(context(model=model, parallelism={"tensor": 4}, **fields))
        for pod_spec in (template["spec"] for template in _templates(children)):
            for each in (*pod_spec["containers"], *pod_spec.get("initContainers", ())):
                rendered |= {entry["name"] for entry in each.get("env", ())}
    known = {name for group in ENVIRONMENT.values() for name in group.names} | {*SECRETS, *PROTECTED}
    assert rendered - known == {"PYTHONUNBUFFERED"}, "each rendered variable is protected, or may be changed"


@pytest.mark.parametrize("kind", ["labels", "annotations"])
def test_keys_that_change_a_pod_are_rejected(kind: str) -> None:
    for key in INJECTING_KEYS:
        with pytest.raises(NotAllowed, match=f"metadata.{kind}"):
            render({"metadata": {kind: {key: "x"}}})
        prefix = f"{key.rpartition('/')[0]}/"
        assert render({"metadata": {kind: {key: "x"}}}, PodPolicy(metadata=(prefix if "/" in key else key,)))


@pytest.mark.parametrize("component", ["engine", "coordinator", "server"])
def test_no_label_makes_a_pod_a_member_of_another_service(component: str) -> None:
    """A Service of the namespace selects pods by one label; the labels of an author never are such a label."""
    for key in SELECTED:
        with pytest.raises(NotAllowed, match=r"metadata.labels.*podPolicy.metadata"):
            render({"metadata": {"labels": {key: "victim"}}}, component=component)
    for key in (LABEL_NAME, LABEL_INSTANCE, LABEL_COMPONENT, LABEL_MANAGED_BY, LABEL_ENGINE):
        for value in ("victim", None):
            for policy in (ALL, TRUSTED, PodPolicy(metadata=(key, "app.kubernetes.io/"))):
                with pytest.raises(NotAllowed, match="sets this key itself"):
                    render({"metadata": {"labels": {key: value}}}, policy, component=component)


PROTECTED_IN_BOTH = [
    {"metadata": {"annotations": {"inference.megatron.dev/server-key": "2"}}},
    {"metadata": None},
    {"spec": None},
    pod(containers=None),
    pod(initContainers=None),
    pod(volumes=None),
    container(args=["engine"]),
    container(envFrom=[{"secretRef": {"name": "s"}}]),
    container(env=None),
    container(volumeMounts=None),
    container(volumeMounts=[{"name": "v", "mountPath": "/cache"}]),
    container(volumeMounts=[{"name": "v", "mountPath": "/cache/vllm"}]),
    container(volumeMounts=[{"name": "v", "mountPath": "/x/../etc/megatron/keys/"}]),
    container(volumeMounts=[{"name": "v", "mountPath": "//model"}]),
    pod(volumes=[{"name": "keys", "emptyDir": {}}]),
    pod(volumes=[{"name": "cache", "hostPath": {"path": "/"}}]),
    pod(containers=[{**SIDECAR, "volumeMounts": [{"name": "keys", "mountPath": "/k"}]}]),
    *(container(env=[{"name": name, "value": "x"}]) for name in PROTECTED),
]
FREE = [
    container(env=[{"name": name, "value": "x"} for name in ("LD_PRELOAD", "VLLM_PLUGINS", "PATH", "HF_ENDPOINT")]),
    container(env=[{"name": "X", "valueFrom": {"secretKeyRef": {"name": "other", "key": "k"}}}]),
    container(env=[{"name": "X", "value": "$(HF_TOKEN)"}], command=["nsys"], image="elsewhere.example/x:1"),
    container(securityContext={"privileged": True}, lifecycle={"preStop": {"exec": {"command": ["sh"]}}}),
    pod(hostNetwork=True, hostPID=True, serviceAccountName="other", automountServiceAccountToken=True),
    pod(containers=[{"name": "x", "image": "x", "args": ["$(A)"], "envFrom": [{"secretRef": {"name": "s"}}]}]),
    volume(hostPath={"path": "/"}),
    volume(secret={"secretName": "s"}),
    {"metadata": {"labels": {"app": "x"}, "annotations": {"sidecar.istio.io/inject": "true"}}},
    pod(volumes=[{"name": "cache", "emptyDir": None, "persistentVolumeClaim": {"claimName": "c"}}]),
]


@pytest.mark.parametrize("overlay", PROTECTED_IN_BOTH, ids=_name)
def test_what_the_operator_depends_on_is_protected_in_both_profiles(overlay: dict[str, Any]) -> None:
    for policy in (PodPolicy(), ALL, TRUSTED):
        with pytest.raises(NotAllowed, match=r"^spec\.engine\.podTemplate"):
            render(overlay, policy)


@pytest.mark.parametrize("overlay", FREE, ids=_name)
def test_a_trusted_author_may_set_what_a_user_who_creates_pods_may_set(overlay: dict[str, Any]) -> None:
    found = pod_of(render(overlay, TRUSTED))
    plain = pod_of(render({}, TRUSTED))
    assert (
        plain["metadata"]["labels"].items() <= found["metadata"]["labels"].items() | plain["metadata"]["labels"].items()
    )
    (before,), after = plain["spec"]["containers"], found["spec"]["containers"][0]
    strip = [arg for arg in after["args"] if not arg.isalnum()]
    assert strip == [arg for arg in before["args"] if not arg.isalnum()]
    assert after["volumeMounts"] == before["volumeMounts"]
    assert after["envFrom"] == before["envFrom"]


def test_a_trusted_author_may_use_code_of_vllm_and_any_image() -> None:
    vllm = {"args": {"trust_remote_code": True}, "image": "elsewhere.example/x:1"}
    engine = {"backend": "VLLM", "vllm": vllm}
    with pytest.raises(NotAllowed):
        all_children(context(engine=engine))
    (found,) = pod_of(all_children(context(TRUSTED, engine=engine)))["spec"]["containers"]
    assert "--vllm-allow-code" in found["args"]


# --- Texts that Kubernetes would expand -----------------------------------------------------------------------------

CANARY = "$(HF_TOKEN)"


def _strings(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for each in value.values():
            yield from _strings(each)
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)
    elif isinstance(value, str):
        yield value


def _specs_with(text: str) -> Iterator[dict[str, Any]]:
    """Yield a spec for each string field of the schema, which has the text in its value."""
    for bad in bad_values():
        if bad.why.startswith("not string") or bad.why == "malformed":
            yield replace(bad, value=text).spec()
    source = {"persistentVolumeClaim": {"claimName": "c", "path": f"/models/{text}"}}
    adapters = [{"name": f"a{text}", "source": {"huggingFace": {"repo": "a/b", "revision": text}}}]
    yield {"model": {"source": source}}
    yield {"model": {"source": source, "adapters": adapters}}
    for name in (name for name, each in CLASSES.items() if each.kind is Effect.HARMLESS and "." not in name):
        yield {**MINIMAL, "engine": {"backend": "VLLM", "vllm": {"args": {name: text}}}}


def test_no_text_of_a_spec_is_expanded_in_what_kubernetes_expands() -> None:
    rendered = 0
    for spec in _specs_with(CANARY):
        try:
            children = all_children(context(TRUSTED, **spec))
        except ValueError:  # rejected by the schema or by the policy
            continue
        rendered += 1
        for template in _templates(children):
            for each in (*template["spec"]["containers"], *template["spec"].get("initContainers", ())):
                expanded = [
                    *each.get("command", ()),
                    *each["args"],
                    *(var.get("value", "") for var in each.get("env", ())),
                ]
                assert not [text for text in expanded if CANARY in text.replace("$$", "")], spec
    assert rendered >= 10


@pytest.mark.parametrize("field", ["command", "args"])
def test_a_sidecar_expands_nothing(field: str) -> None:
    for change in ({field: ["sh", CANARY]}, {"env": [{"name": "A", "value": CANARY}]}):
        with pytest.raises(NotAllowed, match=r"texts with \$\(NAME\)"):
            render(pod(containers=[{**SIDECAR, **change}]), ALL)
    probe = {"livenessProbe": {"exec": {"command": ["cat", CANARY]}}}
    with pytest.raises(NotAllowed, match=r"texts with \$\(NAME\)"):
        render(pod(containers=[{**SIDECAR, **probe}]), ALL)
    secret = {"env": [{"name": "A", "valueFrom": {"secretKeyRef": {"name": "hf-token", "key": "token"}}}]}
    with pytest.raises(NotAllowed, match=r"podPolicy.secretEnvironment"):
        render(pod(containers=[{**SIDECAR, **secret}]), ALL)


def test_an_engine_image_is_of_the_runtime_images_repository_or_of_a_listed_one() -> None:
    foreign = {"engine": {"image": "registry.example/other:1"}}
    with pytest.raises(NotAllowed, match=r"^spec.engine.image: is 'registry.example/other:1'; .*imageRepositories"):
        all_children(context(**foreign))
    assert all_children(context(PodPolicy(image_repositories=("registry.example/other",)), **foreign))
    assert all_children(context(engine={"image": f"{RUNTIME}@sha256:{'0' * 64}"}))


@pytest.mark.parametrize(
    ("image", "repository"),
    [
        ("runtime", "docker.io/library/runtime"),
        ("runtime:1", "docker.io/library/runtime"),
        ("docker.io/runtime:1", "docker.io/library/runtime"),
        ("team/runtime:1@sha256:0", "docker.io/team/runtime"),
        ("localhost/runtime:dev", "localhost/runtime"),
        ("registry:5000/runtime", "registry:5000/runtime"),
        ("registry:5000/a/runtime:1", "registry:5000/a/runtime"),
        ("registry.example/runtime-evil:1", "registry.example/runtime-evil"),
    ],
)
def test_repositories_are_compared_whole(image: str, repository: str) -> None:
    assert repository_of(image) == repository
    assert in_repositories(image, (repository,))
    assert in_repositories(image, (image,))
    assert in_repositories(image, (repository.rpartition("/")[0] + "/",))
    assert not in_repositories(image, ("registry.example/runtime", "registry.example/run", "", "/"))


def test_a_host_path_is_below_its_prefix_and_mounted_read_only() -> None:
    def overlay(path: str, **mount: Any) -> dict[str, Any]:
        mounts = [{"name": "h", "mountPath": "/dev/infiniband", **mount}]
        volumes = [{"name": "h", "hostPath": {"path": path}}]
        return pod(volumes=volumes, containers=[{"name": "engine", "volumeMounts": mounts}])

    assert render(overlay("/dev/infiniband/uverbs0", readOnly=True), ALL)
    for path in ("/dev", "/dev/infiniband2", "/dev/infiniband/../kmsg", "//dev/infiniband", "dev/infiniband"):
        with pytest.raises(NotAllowed, match=r"hostPath.path: is"):
            render(overlay(path, readOnly=True), ALL)
    with pytest.raises(NotAllowed, match=r"volumeMounts\[0\].readOnly: is None; volumes of type hostPath"):
        render(overlay("/dev/infiniband"), ALL)
    # Entries for one path are merged, so that none may leave out which volume it is about.
    twice = overlay("/dev/infiniband", readOnly=True)
    twice["spec"]["containers"][0]["volumeMounts"].append({"mountPath": "/dev/infiniband", "readOnly": False})
    with pytest.raises(NotAllowed, match=r"volumeMounts\[1\]: is"):
        render(twice, ALL)


@pytest.mark.parametrize("prefix", ["", "/", "//", "dev", "/dev/../etc"])
def test_a_prefix_that_allows_everything_is_rejected_at_the_start(prefix: str) -> None:
    with pytest.raises(ValueError, match=r"podPolicy.hostPaths \(--allow-host-path\): is"):
        PodPolicy(host_paths=(prefix,))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"securityContext": {}}, "securityContext.allowPrivilegeEscalation: is None"),
        ({"securityContext": {"allowPrivilegeEscalation": False}}, "securityContext.capabilities: is None"),
        ({"securityContext": {**SAFE, "privileged": True}}, "privileged: is True"),
        ({"securityContext": {**SAFE, "runAsUser": 0}}, "runAsUser: is 0"),
        ({"image": "registry.example/elsewhere:1"}, "podPolicy.imageRepositories"),
        ({"volumeMounts": [{"name": "keys", "mountPath": "/k"}]}, "volumeMounts[0].name: is 'keys'"),
        ({"ports": [{"containerPort": 1, "hostPort": 1}]}, "ports[0].hostPort: is 1"),
        ({"livenessProbe": {"httpGet": {"host": "10.0.0.1", "port": 80}}}, "livenessProbe.httpGet.host: is '10.0.0.1'"),
        ({"envFrom": [{"secretRef": {"name": "s"}}]}, "envFrom[0].secretRef: is"),
    ],
)
def test_a_sidecar_stays_within_the_restricted_profile(change: dict[str, Any], words: str) -> None:
    with pytest.raises(NotAllowed) as rejected:
        render(pod(containers=[{**SIDECAR, **change}]), ALL)
    assert words in str(rejected.value)


# --- The restricted profile -----------------------------------------------------------------------------------------


def _templates(children: list[Any]) -> list[dict[str, Any]]:
    return [child["spec"]["template"] for child in children if "template" in (child.get("spec") or {})]


@pytest.mark.parametrize("golden", GOLDEN, ids=lambda path: path.stem)
def test_every_rendered_pod_meets_the_restricted_profile(golden: Path) -> None:
    templates = _templates([each for each in yaml.safe_load_all(golden.read_text()) if each])
    assert templates
    assert [found for template in templates for found in restricted_violations(template)] == []


def test_every_source_of_weights_meets_the_restricted_profile() -> None:
    for source in (
        {"image": {"reference": "r", "path": "/m"}},
        {"persistentVolumeClaim": {"claimName": "c"}},
        {"builtin": "x"},
        HUB,
    ):
        children = all_children(context(model={"source": source}, engine={"gpusPerPod": 2}, parallelism={"tensor": 4}))
        assert [found for template in _templates(children) for found in restricted_violations(template)] == []


def _optional(**fields: st.SearchStrategy[Any]) -> st.SearchStrategy[dict[str, Any]]:
    """One or two of the fields."""
    names = st.lists(st.sampled_from(sorted(fields)), max_size=2, unique=True)
    return names.flatmap(lambda chosen: st.fixed_dictionaries({name: fields[name] for name in chosen}))


FLAG = st.sampled_from([True, False, None, 0, 1, "true", [], {}])
PROFILE = st.sampled_from([None, {}, {"type": "Unconfined"}, {"type": "RuntimeDefault"}, {"type": None}])
CAPABILITIES = _optional(
    add=st.sampled_from([["SYS_ADMIN"], ["NET_BIND_SERVICE"], [], None, "ALL"]),
    drop=st.sampled_from([["ALL"], [], ["KILL"], None]),
)
SECURITY = _optional(
    privileged=FLAG,
    allowPrivilegeEscalation=FLAG,
    runAsNonRoot=FLAG,
    runAsUser=st.sampled_from([0, 1000, None, False]),
    capabilities=CAPABILITIES | st.none(),
    seccompProfile=PROFILE,
    appArmorProfile=PROFILE,
    procMount=st.sampled_from(["Unmasked", "Default"]),
    seLinuxOptions=st.just({"type": "spc_t"}),
    windowsOptions=st.just({"hostProcess": True}),
)
CONTAINER = st.builds(
    lambda name, fields: {"name": name, **fields},
    st.sampled_from(["engine", "preflight", "log"]),
    _optional(
        image=st.sampled_from([f"{RUNTIME}:2", "registry.example/tools/log:1", None]),
        securityContext=SECURITY | st.just(SAFE) | st.none(),
        ports=st.just([{"containerPort": 80, "hostPort": 80}]),
        livenessProbe=st.just({"httpGet": {"host": "10.0.0.1", "port": 1}}),
        lifecycle=st.just({"preStop": {"tcpSocket": {"host": "10.0.0.1", "port": 1}}}),
        env=st.just([{"name": "NCCL_DEBUG", "value": "INFO"}]),
        resources=st.just({"limits": {"cpu": "1"}}) | st.none(),
        volumeMounts=st.just([{"name": "v", "mountPath": "/mnt/v"}]),
    ),
)
VOLUME = st.builds(
    lambda name, source: {"name": name, **source},
    st.sampled_from(["v", "cache", "tmp", "keys"]),
    _optional(
        emptyDir=st.sampled_from([{}, None]),
        persistentVolumeClaim=st.just({"claimName": "c"}) | st.none(),
        configMap=st.just({"name": "c"}),
        hostPath=st.just({"path": "/"}),
        nfs=st.just({"server": "s", "path": "/"}),
    ),
)
UNCONFINED = {"container.apparmor.security.beta.kubernetes.io/engine": "unconfined"}
TEMPLATE = st.fixed_dictionaries(
    {
        "metadata": _optional(
            annotations=st.sampled_from(
                [{"prometheus.io/port": "b"}, {"container.apparmor.security.beta.kubernetes.io/x": "unconfined"}]
            ),
            labels=st.just({"kueue.x-k8s.io/queue-name": "x"}),
        ),
        "spec": _optional(
            containers=st.lists(CONTAINER, max_size=3),
            initContainers=st.lists(CONTAINER, max_size=2),
            ephemeralContainers=st.lists(CONTAINER, max_size=1),
            volumes=st.lists(VOLUME, max_size=2),
            securityContext=SECURITY | st.none(),
            hostNetwork=FLAG,
            hostPID=FLAG,
            nodeSelector=st.just({"a": "b"}),
            tolerations=st.just([{"operator": "Exists"}]),
        ),
    }
)
SIDECARS = PodPolicy(sidecars=True, image_repositories=("registry.example/tools/",), capabilities=("NET_BIND_SERVICE",))


@pytest.mark.slow
@pytest.mark.parametrize("policy", [PodPolicy(), SIDECARS], ids=["default", "sidecars"])
def test_no_accepted_template_leaves_the_restricted_profile(policy: PodPolicy) -> None:
    accepted = 0

    @settings(max_examples=size(80, soak=400), deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
    @given(TEMPLATE)
    def look(overlay: dict[str, Any]) -> None:
        nonlocal accepted
        try:
            template = pod_of(render(overlay, policy))
        except RenderError:
            return
        accepted += 1
        # A volume of no type, as an overlay may leave it, is rejected by the API server.
        found = [each for each in restricted_violations(template) if not each.endswith(": []")]
        assert found == []

    look()
    assert accepted > size(8, soak=40), "too few templates are accepted for the test to say anything"


# --- Resources that there are ---------------------------------------------------------------------------------------

FORMER = container(env=[{"name": "MY_SETTING", "value": "1"}])
"""Accepted by releases that had a deny list."""
FORBIDDEN = {
    "engine": {"image": "registry.example/other:1", "podTemplate": container(securityContext={"privileged": True})},
}


def formerly_accepted(**fields: Any) -> Cluster:
    """A resource that runs since before there was a policy, and an operator that has just been replaced."""
    cluster = Cluster({**MINIMAL, **fields})
    policy = cluster.settings
    cluster.settings = replace(policy, pod_policy=None)
    cluster.settle()
    assert cluster.state == "Running"
    cluster.settings = policy
    cluster.unverified |= set(cluster.objects)
    return cluster


def running(cluster: Cluster) -> tuple[Any, Any]:
    workloads = {ref: obj["spec"] for ref, obj in cluster.objects.items() if ref.kind in ("Deployment", "StatefulSet")}
    return workloads, {name: pod["metadata"]["uid"] for name, pod in cluster.pods.items()}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        (FORBIDDEN, "spec.engine.image"),
        ({"coordinator": {"podTemplate": pod(hostPID=True)}}, "spec.coordinator.podTemplate.spec.hostPID"),
        ({"server": {"podTemplate": pod(hostPID=True)}}, "spec.server.podTemplate.spec.hostPID"),
        ({"engine": {"podTemplate": FORMER}}, "spec.engine.podTemplate.spec.containers[0].env[0].name"),
        (
            {"server": {"podTemplate": {"metadata": {"labels": {"team": "a"}}}}},
            "spec.server.podTemplate.metadata.labels[team]: is 'a'",
        ),
    ],
    ids=["engine", "coordinator", "server", "variable", "label"],
)
def test_a_resource_that_a_new_policy_rejects_keeps_serving(fields: dict[str, Any], field: str) -> None:
    cluster = formerly_accepted(replicas=2, **fields)
    before = running(cluster)
    cluster.settle()
    assert running(cluster) == before
    assert cluster.signals() == []
    assert cluster.condition("Ready")["status"] == "True"
    degraded = cluster.condition("Degraded")
    assert (degraded["status"], degraded["reason"]) == ("True", "NotAllowed")
    assert field in degraded["message"]
    writes = cluster.status_writes
    for _ in range(5):
        assert cluster.step().actions == ()
        cluster.tick()
    assert cluster.status_writes == writes

    # Upkeep of the rest goes on, and so do verbs.
    service = ChildRef("Service", "demo-coordinator")
    del cluster.objects[service]
    cluster.step()
    assert service in cluster.objects
    for state in ("Paused", "Suspended", "Running"):
        cluster.change(desiredState=state)
        assert cluster.state == state
    assert running(cluster)[0] == before[0]


def test_an_engine_that_a_new_policy_rejects_is_re_created_from_its_own_revision() -> None:
    cluster = formerly_accepted(replicas=2, **FORBIDDEN)
    cluster.settle()
    first = ChildRef("StatefulSet", "demo-engine-0", "apps/v1")
    spec = cluster.objects.pop(first)["spec"]
    cluster.settle()
    assert cluster.objects[first]["spec"] == spec

    cluster.change(desiredState="Stopped")
    assert (cluster.state, cluster.engine_pods()) == ("Stopped", [])
    cluster.change(desiredState="Running")
    assert (cluster.state, cluster.status["ready"]) == ("Running", "2/2")
    assert cluster.objects[first]["spec"] == spec

    cluster.change(replicas=3)
    assert cluster.status["ready"] == "2/3", "no engine that never was is made from what is not allowed"
    cluster.spec["engine"] = {}
    cluster.change()
    assert (cluster.status["ready"], cluster.status["updatedReplicas"]) == ("3/3", 3)
    assert cluster.condition("Degraded")["status"] == "False"


def test_a_change_that_is_not_allowed_changes_nothing_that_runs(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2).settled()
    before = running(cluster)
    cluster.change(engine=FORBIDDEN["engine"])
    assert running(cluster) == before
    assert cluster.condition("Degraded")["reason"] == "NotAllowed"


def test_a_new_resource_that_the_policy_rejects_gets_no_engine(make_cluster: Any) -> None:
    cluster = make_cluster(**FORBIDDEN).settled()
    assert cluster.engine_pods() == []
    assert cluster.condition("Ready")["reason"] == "NotAllowed"


def test_a_rejected_template_names_its_own_component_only(make_cluster: Any) -> None:
    cluster = make_cluster(server={"podTemplate": pod(hostPID=True)})
    cluster.broken_engines.add("demo-engine-0")
    cluster.settle()
    assert cluster.condition("Degraded")["reason"] == "NotAllowed"
    assert cluster.condition("CoordinatorReady")["status"] == "True"
    assert "no such weights" in cluster.condition("EnginesReady")["message"]


def test_an_engine_keeps_its_number_of_pods_until_its_turn(make_cluster: Any) -> None:
    cluster = make_cluster(replicas=2).settled()
    cluster.patch(parallelism={"pipeline": 2})
    first = ChildRef("StatefulSet", "demo-engine-0", "apps/v1")
    old = cluster.objects[first]["metadata"]["annotations"]
    seen = set()
    for _ in range(60):
        if cluster.objects[first]["metadata"]["annotations"] == old:
            seen.add(cluster.objects[first]["spec"]["replicas"])
        cluster.step()
        cluster.tick()
    assert seen == {1}
    assert cluster.status["ready"] == "2/2"


# --- The chart ------------------------------------------------------------------------------------------------------


def test_every_switch_is_a_value_of_the_chart_that_is_off_and_reaches_the_operator() -> None:
    chart = ROOT / "charts/megatron-inference"
    values = yaml.safe_load((chart / "values.yaml").read_text())
    schema = json.loads((chart / "values.schema.json").read_text())["properties"]
    deployment = (chart / "templates/deployment.yaml").read_text()
    flags = {switch.chart_value: switch.option for switch in Switch}
    flags["podPolicy.quotedImageRepositories"] = "--quote-image-repository"
    assert values["podPolicy"]["profile"] == "restricted"
    policy = {name.removeprefix("podPolicy.") for name in flags if name.startswith("podPolicy.")}
    assert set(values["podPolicy"]) == set(schema["podPolicy"]["properties"]) == policy
    for path, flag in flags.items():
        section, name = path.split(".")
        assert name in schema[section]["properties"]
        assert not values[section][name] or path == "podPolicy.profile"
        condition = f'{{{{- if eq (toString .{name}) "trusted" }}}}' if path == "podPolicy.profile" else f".{name} }}}}"
        assert f"{condition}\n            - {flag}\n" in deployment


def test_the_priority_class_of_a_coordinator_is_not_one_of_the_system() -> None:
    with pytest.raises(NotAllowed, match=r"^spec.coordinator.priorityClassName: is 'system-cluster-critical'"):
        all_children(context(coordinator={"priorityClassName": "system-cluster-critical"}))
