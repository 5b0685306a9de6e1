"""Allow list of podTemplates, as tables from the path of a field to its rule. Pure.

A field that is not in the tables is rejected, whatever its value. A rule checks one value and yields its errors. One
value of the operator's chart allows a further class of fields (`model.pod_policy.Switch`).
"""

from __future__ import annotations

import fnmatch
import posixpath
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_operator.model.pod_policy import PodPolicy, Switch, in_repositories
from megatron_operator.model.resource import Backend, EngineSpec
from megatron_operator.model.source import CacheSpec
from megatron_operator.model.text import printable
from megatron_operator.render.context import COORDINATOR, ENGINE, MODEL_CACHE, SERVER, NotAllowed, RenderContext
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.protocol.vllm_arguments import LOADS_CODE

Path = tuple[str, ...]
"""Field names; an entry of a list is `[]`."""

SHORTEST = 60
"""Limit of characters of a rejected value in a message."""
CODE_VARIABLES = (
    *("LD_*", "GLIBC_*", "GCONV_PATH", "LOCPATH", "PATH", "HOME", "ENV", "BASH_ENV", "PYTHON*", "VIRTUAL_ENV"),
    *("CC", "CXX", "CUDA_HOME", "CUDA_PATH", "CUDA_INJECTION*", "NVIDIA_*", "TRITON_*", "NUMBA_*", "TORCHINDUCTOR_*"),
    *("TORCH_HOME", "TORCH_EXTENSIONS_DIR", "TORCH_FORCE_*", "*_CACHE_DIR", "XDG_*"),
    *("NCCL_*PLUGIN*", "NCCL_CONF_FILE", "UCX_MODULE*", "FI_PROVIDER_PATH", "RDMAV_DRIVERS", "IBV_DRIVERS"),
    *("OPENSSL_*", "OMP_TOOL*", "OMPI_*", "PMIX_*", "SSLKEYLOGFILE", "HF_HOME", "HF_TOKEN_PATH", "HF_HUB_CACHE"),
    *("HUGGINGFACE_HUB_CACHE", "MEGATRON_MODEL_CACHE", "VLLM_*", "FLASHINFER_*", "DG_*"),
)
"""Variables that make a process load code, or read or write files in other places."""
TOKEN_VARIABLES = (
    *("HF_ENDPOINT", "SSL_CERT_FILE", "SSL_CERT_DIR", "REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"),
    *("AWS_*", "GOOGLE_*", "AZURE_*"),
)
"""Variables that determine to which server the Hugging Face token or the credentials of an object store are sent."""
INJECTING_DOMAINS = (
    *("kubernetes.io", "k8s.io", "openshift.io", "inference.megatron.dev", "cncf.io", "multus-cni.io", "ovn.org"),
    *("projectcalico.org", "cilium.io", "nri.io", "istio.io", "linkerd.io", "hashicorp.com", "kuma.io", "dapr.io"),
    *("openservicemesh.io", "opentelemetry.io", "jaegertracing.io", "datadoghq.com", "dynatrace.com"),
    *("banzaicloud.io", "amazonaws.com", "azure.workload.identity", "gke.io", "gke-gcsfuse", "aad-pod-identity"),
    *("infisical.com", "external-secrets.io", "conjur.org", "kyverno.io", "sysdig.com", "newrelic.com", "instana.io"),
)
"""Domains of keys by which admission webhooks, container runtimes and network plugins change a pod."""
INJECTING_KEYS = ("io.katacontainers.*", "io.kubernetes.*", "io.containerd.*", "io.cilium*", "run.oci.*", "aadpod*")
"""The same for keys without a domain before a slash."""
HARMLESS_DOMAINS = (
    *("app.kubernetes.io", "cluster-autoscaler.kubernetes.io", "kubectl.kubernetes.io", "scheduling.k8s.io"),
)
MOUNT_ROOTS = ("/mnt", "/data", "/models", "/scratch", "/srv", "/dev/shm", "/dev/hugepages")
"""Mount paths of volumes in rendered containers, where images have no programs or settings."""
WRITABLE = {"tmp": ("emptyDir",), "cache": ("emptyDir", "persistentVolumeClaim"), "shm": ("emptyDir",)}
"""Rendered volumes that a podTemplate may change, and to which types."""
FIXED_VOLUMES = ("keys", "model", MODEL_CACHE, "api-keys", "tls")
VOLUME_TYPES = ("persistentVolumeClaim", "configMap", "emptyDir")
NO_SWITCH = "remove it; no value of the operator's chart allows it"


@dataclass(frozen=True, slots=True)
class Violation:
    """One field that is not allowed."""

    path: str
    value: Any
    allowed: str
    """What is allowed instead, as a clause."""
    switch: Switch | None = None

    def __str__(self) -> str:
        shown = repr(self.value)
        shown = shown if len(shown) <= SHORTEST else f"{shown[: SHORTEST - 1]}…"
        remedy = self.switch.remedy if self.switch else NO_SWITCH
        return f"{printable(self.path)}: is {printable(shown)}; {self.allowed}; {remedy}"


@dataclass(frozen=True, slots=True)
class Request:
    """One podTemplate and the input of its rules."""

    policy: PodPolicy
    runtime_images: tuple[str, ...]
    default_account: str
    secrets: frozenset[str]
    """Names of the Secrets that the spec refers to."""
    sends_token: bool
    containers: Mapping[str, Collection[str]]
    """Names of the rendered containers, by `containers` and `initContainers`."""
    host_volumes: frozenset[str]
    accounts: frozenset[str]
    """Service accounts that the podTemplate names."""

    def allows_image(self, image: object) -> bool:
        repositories = (*self.runtime_images, *self.policy.image_repositories)
        return isinstance(image, str) and in_repositories(image, repositories)


Rule = Callable[[Any, str, Request], Iterator[Violation]]


def check(
    ctx: RenderContext, component: str, overlay: dict[str, Any] | None, *, containers: Mapping[str, Collection[str]]
) -> None:
    """Reject a component's podTemplate, and the engines' image, if the policy does not allow it.

    Args:
        overlay: the podTemplate, which has been merged without an error.
        containers: names of the rendered containers, by `containers` and `initContainers`.

    Raises:
        NotAllowed: with the first field, its value, what is allowed and the remedy.
    """
    if ctx.settings.pod_policy is not None:
        found = list(violations(ctx, component, overlay, policy=ctx.settings.pod_policy, containers=containers))
        if found:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            raise NotAllowed(f"{found[0]}{more}")


def violations(
    ctx: RenderContext,
    component: str,
    overlay: dict[str, Any] | None,
    *,
    policy: PodPolicy,
    containers: Mapping[str, Collection[str]],
) -> Iterator[Violation]:
    """Yield every field that is not allowed, in the order of the podTemplate."""
    request = _request(ctx, overlay or {}, policy, containers)
    yield from _release(ctx, component, request)
    if component == ENGINE:
        yield from _engine(ctx.spec.engine, request)
        yield from _model_cache(ctx.spec.model.cache, request)
    if component == COORDINATOR:
        priority = ctx.spec.coordinator.priority_class_name
        yield from _priority_class(priority, "spec.coordinator.priorityClassName", request)
    yield from _walk(overlay or {}, f"spec.{component}.podTemplate", (), POD, request)


def _release(ctx: RenderContext, component: str, request: Request) -> Iterator[Violation]:
    settings = ctx.settings
    if component == COORDINATOR:
        yield from _image(settings.coordinator_image, "status.release.coordinatorImage", request)
    elif component == SERVER or ctx.spec.engine.backend is Backend.NATIVE:
        yield from _image(settings.runtime_image, "status.release.runtimeImage", request)
    else:
        yield from _image(settings.vllm_runtime_image, "status.release.vllmRuntimeImage", request)


def _engine(engine: EngineSpec, request: Request) -> Iterator[Violation]:
    if engine.image is not None:
        yield from _image(engine.image, "spec.engine.image", request)
    if engine.vllm is None:
        return
    if engine.vllm.image is not None:
        yield from _image(engine.vllm.image, "spec.engine.vllm.image", request)
    for name in sorted(engine.vllm.args.keys() & LOADS_CODE.keys()):
        if not request.policy.vllm_code:
            allowed = "arguments of vLLM that can load code are not allowed"
            yield Violation(f"spec.engine.vllm.args.{name}", engine.vllm.args[name], allowed, Switch.VLLM_CODE)


def _model_cache(cache: CacheSpec | None, request: Request) -> Iterator[Violation]:
    if cache is not None and cache.host_path is not None:
        roots = request.policy.model_cache_paths
        if not _below(cache.host_path, roots):
            allowed = f"paths below {', '.join(roots)} are allowed" if roots else "caches on nodes are not allowed"
            yield Violation("spec.model.cache.hostPath", cache.host_path, allowed, Switch.MODEL_CACHE_PATHS)


def _request(
    ctx: RenderContext, overlay: dict[str, Any], policy: PodPolicy, containers: Mapping[str, Collection[str]]
) -> Request:
    source, server = ctx.spec.model.source, ctx.spec.server
    token = source.hugging_face.token_secret_ref if source.hugging_face is not None else None
    credentials = source.object_store.credentials_secret_ref if source.object_store is not None else None
    named = (
        token.name if token else None,
        credentials.name if credentials else None,
        server.api_keys_secret_ref.name if server.api_keys_secret_ref else None,
        server.tls.secret_name if server.tls else None,
    )
    spec = overlay.get("spec") or {}
    host = (entry["name"] for entry in spec.get("volumes") or () if "hostPath" in entry)
    return Request(
        policy=policy,
        runtime_images=ctx.settings.runtime_images,
        default_account=ctx.name,
        secrets=frozenset(name for name in named if name),
        sends_token=token is not None or source.object_store is not None,
        containers=containers,
        host_volumes=frozenset(name for name in host if isinstance(name, str)),
        accounts=frozenset(name for name in [spec.get("serviceAccountName")] if isinstance(name, str)),
    )


def _walk(value: Any, path: str, fields: Path, table: Table, request: Request) -> Iterator[Violation]:
    """Check `value` at path `fields` of `table`, and everything below it."""
    if fields in table.rules:
        yield from table.rules[fields](value, path, request)
    elif fields not in table.inner:
        yield Violation(path, value, f"{table.what} may set {table.names(fields[:-1])} there")
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _walk(each, f"{path}.{key}", (*fields, str(key)), table, request)
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _walk(each, f"{path}[{index}]", (*fields, "[]"), table, request)
    else:
        yield Violation(path, value, f"give {table.names(fields)} below it")


@dataclass(frozen=True)
class Table:
    """Rules by path, and the prefixes of these paths."""

    what: str
    rules: Mapping[Path, Rule]
    inner: frozenset[Path]

    def names(self, fields: Path) -> str:
        """Return the fields that are allowed at a path."""
        depth = len(fields)
        known = {rule[depth] for rule in self.rules if len(rule) > depth and rule[:depth] == fields}
        return ", ".join(sorted(known)) or "nothing"


def _table(what: str, rules: Mapping[str, Rule]) -> Table:
    parsed = {tuple(path.split(".")): rule for path, rule in rules.items()}
    inner = {path[:length] for path in parsed for length in range(len(path))}
    return Table(what, parsed, frozenset(inner))


# --- Rules ----------------------------------------------------------------------------------------------------------


def _any(value: Any, path: str, request: Request) -> Iterator[Violation]:
    yield from ()


def _key(key: str, request: Request) -> bool:
    """Return whether no webhook, runtime or network plugin acts on the key of a label or annotation."""
    if any(key == entry or (entry.endswith("/") and key.startswith(entry)) for entry in request.policy.metadata):
        return True
    domain, slash, _ = key.rpartition("/")
    if not slash:
        return not any(fnmatch.fnmatchcase(key, pattern) for pattern in INJECTING_KEYS)
    below = (domain == each or domain.endswith(f".{each}") for each in INJECTING_DOMAINS)
    return domain in HARMLESS_DOMAINS or not any(below)


def _keys(value: Any, path: str, request: Request) -> Iterator[Violation]:
    if not isinstance(value, dict):
        yield Violation(path, value, "give an object of strings")
        return
    for key, each in value.items():
        if not _key(str(key), request):
            allowed = "keys by which webhooks, container runtimes and network plugins change a pod are not allowed"
            yield Violation(f"{path}[{key}]", each, allowed, Switch.METADATA)


def _variable(value: Any, path: str, request: Request) -> Iterator[Violation]:
    name = value if isinstance(value, str) else ""
    if name in request.policy.environment:
        return
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", name):
        yield Violation(path, value, "give a name of letters, digits and _")
    elif any(fnmatch.fnmatchcase(name.upper(), pattern) for pattern in CODE_VARIABLES):
        allowed = "variables that load code, or move files that a process reads or writes, are not allowed"
        yield Violation(path, value, allowed, Switch.ENVIRONMENT)
    elif request.sends_token and any(fnmatch.fnmatchcase(name.upper(), pattern) for pattern in TOKEN_VARIABLES):
        allowed = "not allowed together with a source that sends a token or credentials, which it redirects"
        yield Violation(path, value, allowed, Switch.ENVIRONMENT)


_SOURCES = ("configMapKeyRef", "fieldRef", "resourceFieldRef", "secretKeyRef")


def _value_from(value: Any, path: str, request: Request) -> Iterator[Violation]:
    for kind, source in (value if isinstance(value, dict) else {}).items():
        if kind not in _SOURCES:
            yield Violation(f"{path}.{kind}", source, f"{', '.join(_SOURCES)} are allowed")
        name = source.get("name") if isinstance(source, dict) else None
        if kind == "secretKeyRef" and (not isinstance(name, str) or name not in request.secrets):
            named = ", ".join(sorted(request.secrets)) or "it names none"
            yield Violation(f"{path}.{kind}.name", name, f"Secrets that the spec itself names are allowed ({named})")


def _image(value: Any, path: str, request: Request) -> Iterator[Violation]:
    if not request.allows_image(value):
        allowed = f"images of the repositories of {' and '.join(request.runtime_images)} are allowed"
        if request.policy.image_repositories:
            allowed += f", and of {', '.join(request.policy.image_repositories)}"
        yield Violation(path, value, allowed, Switch.IMAGES)


def _added(value: Any, path: str, request: Request) -> Iterator[Violation]:
    for index, name in enumerate(value if isinstance(value, list) else [value]):
        if name not in request.policy.capabilities:
            listed = ", ".join(request.policy.capabilities)
            allowed = f"only {listed} may be added" if listed else "capabilities may not be added"
            yield Violation(f"{path}[{index}]", name, allowed, Switch.CAPABILITIES)


def _dropped(value: Any, path: str, request: Request) -> Iterator[Violation]:
    if not isinstance(value, list) or "ALL" not in value:
        yield Violation(path, value, "it must contain ALL")


def _exactly(wanted: bool | dict[str, str]) -> Rule:
    def rule(value: Any, path: str, request: Request) -> Iterator[Violation]:
        if type(value) is not type(wanted) or value != wanted:
            yield Violation(path, value, f"{json.dumps(wanted)} is allowed")

    return rule


def _user(value: Any, path: str, request: Request) -> Iterator[Violation]:
    if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
        yield Violation(path, value, "a user other than root is allowed")


def _host_network(value: Any, path: str, request: Request) -> Iterator[Violation]:
    if value is not False and not request.policy.host_network:
        yield Violation(path, value, "false is allowed", Switch.HOST_NETWORK)


def _dns_policy(value: Any, path: str, request: Request) -> Iterator[Violation]:
    if value != "ClusterFirst" and not (value == "ClusterFirstWithHostNet" and request.policy.host_network):
        yield Violation(path, value, "ClusterFirst is allowed", Switch.HOST_NETWORK)


def _account(value: Any, path: str, request: Request) -> Iterator[Violation]:
    if value != request.default_account and value not in request.policy.service_accounts:
        allowed = f"the account of the resource, {request.default_account}, is allowed"
        if request.policy.service_accounts:
            allowed += f", and {', '.join(request.policy.service_accounts)}"
        yield Violation(path, value, allowed, Switch.SERVICE_ACCOUNTS)


def _token(value: Any, path: str, request: Request) -> Iterator[Violation]:
    if value is not False and not request.accounts & set(request.policy.service_accounts):
        allowed = "false is allowed, and true together with a serviceAccountName that the chart lists"
        yield Violation(path, value, allowed, Switch.SERVICE_ACCOUNTS)


def _priority_class(value: Any, path: str, request: Request) -> Iterator[Violation]:
    if value is not None and (not isinstance(value, str) or value.startswith("system-")):
        yield Violation(path, value, "classes whose name does not begin with system- are allowed")


def _below(path: object, roots: Collection[str]) -> bool:
    """Return whether a path is one of `roots` or below one, without `.` and `..` parts."""
    if not isinstance(path, str) or posixpath.normpath(path) != (path.rstrip("/") or "/") or path.startswith("//"):
        return False
    clean = path.rstrip("/")
    return any(clean == root.rstrip("/") or clean.startswith(f"{root.rstrip('/')}/") for root in roots)


def _volume(value: Any, path: str, request: Request) -> Iterator[Violation]:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(name, str):
        yield Violation(path, value, "give an object with a name")
    elif name in FIXED_VOLUMES:
        yield Violation(path, value, f"the volume {name} is the operator's own; choose another name")
    else:
        types = WRITABLE.get(name, VOLUME_TYPES)
        for kind, source in value.items():
            where = f"{path}.{kind}"
            if kind == "name" or kind in types or (name in WRITABLE and source is None and kind in VOLUME_TYPES):
                continue
            if kind == "hostPath" and name not in WRITABLE:
                yield from _host_path(source, where, request)
            else:
                yield Violation(where, source, f"the volume may be of type {', '.join(types)}")


def _host_path(value: Any, path: str, request: Request) -> Iterator[Violation]:
    where = value.get("path") if isinstance(value, dict) else None
    if not _below(where, request.policy.host_paths):
        listed = ", ".join(request.policy.host_paths)
        allowed = f"paths below {listed} are allowed" if listed else "volumes of type hostPath are not allowed"
        yield Violation(f"{path}.path", where, allowed, Switch.HOST_PATHS)


def _mount(value: Any, path: str, request: Request) -> Iterator[Violation]:
    """Check a volume mount of a rendered container."""
    yield from _shared_mount(value, path, request)
    where = value.get("mountPath") if isinstance(value, dict) else None
    roots = (*MOUNT_ROOTS, *request.policy.host_paths)
    if not _below(where, roots):
        allowed = f"volumes may be mounted at or below {', '.join(roots)}"
        yield Violation(f"{path}.mountPath", where, allowed)


def _foreign_mount(value: Any, path: str, request: Request) -> Iterator[Violation]:
    """Check a volume mount of a sidecar."""
    yield from _shared_mount(value, path, request)
    if isinstance(value, dict) and value.get("name") in FIXED_VOLUMES:
        yield Violation(
            f"{path}.name", value["name"], "volumes with keys and weights are mounted by the operator alone"
        )


_MOUNT_FIELDS = ("name", "mountPath", "readOnly", "recursiveReadOnly", "subPath", "subPathExpr")


def _shared_mount(value: Any, path: str, request: Request) -> Iterator[Violation]:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        yield Violation(path, value, "give an object with name and mountPath")
        return
    for key, each in value.items():
        if key not in _MOUNT_FIELDS:
            yield Violation(f"{path}.{key}", each, f"a mount may set {', '.join(_MOUNT_FIELDS)}")
    if value["name"] == MODEL_CACHE and value.get("readOnly") is not True:
        yield Violation(f"{path}.readOnly", value.get("readOnly"), "the cache of models is mounted read-only")
    if value["name"] in request.host_volumes and value.get("readOnly") is not True:
        # A writable mount could hold a symbolic link that leads another mount out of the prefix.
        yield Violation(f"{path}.readOnly", value.get("readOnly"), "volumes of type hostPath are mounted read-only")


def _handler(value: Any, path: str, request: Request) -> Iterator[Violation]:
    """Check a probe or lifecycle hook of a sidecar: it may only connect to its own pod."""
    if isinstance(value, dict):
        for key, each in value.items():
            if key == "host":
                yield Violation(f"{path}.host", each, "probes and hooks go to their own pod")
            else:
                yield from _handler(each, f"{path}.{key}", request)


def _container(field: str) -> Rule:
    def rule(value: Any, path: str, request: Request) -> Iterator[Violation]:
        if value["name"] in list(request.containers.get(field, ())):
            yield from _walk(value, path, (), CONTAINER, request)
        elif not request.policy.sidecars:
            known = ", ".join(request.containers.get(field, ())) or "none"
            yield Violation(f"{path}.name", value["name"], f"rendered {field} are allowed ({known})", Switch.SIDECARS)
        else:
            yield from _sidecar(value, path, request)

    return rule


def _sidecar(value: Any, path: str, request: Request) -> Iterator[Violation]:
    yield from _walk(value, path, (), SIDECAR, request)
    context = value.get("securityContext")
    context = context if isinstance(context, dict) else {}
    for name, wanted in (("allowPrivilegeEscalation", False), ("capabilities", {"drop": ["ALL"]})):
        if name not in context or (name == "capabilities" and "drop" not in (context[name] or {})):
            yield Violation(f"{path}.securityContext.{name}", None, f"a sidecar must set {name}: {wanted}")


_SECURITY: dict[str, Rule] = {
    "securityContext.allowPrivilegeEscalation": _exactly(False),
    "securityContext.privileged": _exactly(False),
    "securityContext.runAsNonRoot": _exactly(True),
    "securityContext.readOnlyRootFilesystem": _exactly(True),
    "securityContext.capabilities.add": _added,
    "securityContext.capabilities.drop": _dropped,
    "securityContext.seccompProfile": _exactly({"type": "RuntimeDefault"}),
}
_ENVIRONMENT: dict[str, Rule] = {
    "env.[].value": _any,
    "env.[].valueFrom": _value_from,
}
CONTAINER = _table(
    "a podTemplate",
    {
        "name": _any,
        "image": _image,
        "imagePullPolicy": _any,
        "resources": _any,
        "env.[].name": _variable,
        **_ENVIRONMENT,
        "volumeMounts.[]": _mount,
        **_SECURITY,
    },
)
"""Rules of a rendered container."""
SIDECAR = _table(
    "a sidecar",
    {
        "name": _any,
        "image": _image,
        "imagePullPolicy": _any,
        "command": _any,
        "args": _any,
        "workingDir": _any,
        "restartPolicy": _any,
        "resources": _any,
        "env.[].name": _any,
        **_ENVIRONMENT,
        "envFrom.[].configMapRef": _any,
        "envFrom.[].prefix": _any,
        "ports.[].name": _any,
        "ports.[].containerPort": _any,
        "ports.[].protocol": _any,
        "startupProbe": _handler,
        "readinessProbe": _handler,
        "livenessProbe": _handler,
        "lifecycle": _handler,
        "terminationMessagePolicy": _any,
        "volumeMounts.[]": _foreign_mount,
        **_SECURITY,
        "securityContext.readOnlyRootFilesystem": _any,
        "securityContext.runAsUser": _user,
        "securityContext.runAsGroup": _any,
    },
)
"""Rules of a container that a podTemplate adds."""
POD = _table(
    "a podTemplate",
    {
        "metadata.labels": _keys,
        "metadata.annotations": _keys,
        "spec.containers.[]": _container("containers"),
        "spec.initContainers.[]": _container("initContainers"),
        "spec.volumes.[]": _volume,
        "spec.resourceClaims": _any,
        "spec.resources": _any,
        "spec.nodeSelector": _any,
        "spec.affinity": _any,
        "spec.tolerations": _any,
        "spec.topologySpreadConstraints": _any,
        "spec.schedulerName": _any,
        "spec.schedulingGates": _any,
        "spec.runtimeClassName": _any,
        "spec.priorityClassName": _priority_class,
        "spec.imagePullSecrets": _any,
        "spec.terminationGracePeriodSeconds": _any,
        "spec.hostNetwork": _host_network,
        "spec.dnsPolicy": _dns_policy,
        "spec.serviceAccountName": _account,
        "spec.automountServiceAccountToken": _token,
    },
)
"""Rules of a pod."""
