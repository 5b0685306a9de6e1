"""Limits what the author of a custom resource can set, with two profiles.

The profile `restricted` is an allow list. It consists of tables from the path of a field to its rule, and of tables of
allowed names of variables, labels and annotations. A field outside the tables is rejected whatever its value is. Values
of the operator's chart can allow further classes of fields (`resource.pod_policy.Switch`). The profile `trusted`
rejects only changes of fields that the operator itself sets and depends on. Both profiles limit the TLS Secrets and
host names of Ingresses and HTTPRoutes.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_operator.render.allowed_names import ANNOTATIONS, ENVIRONMENT, LABELS, PROTECTED, SECRETS, Group
from megatron_operator.render.context import MODEL_CACHE, NotAllowed, RenderContext
from megatron_operator.resource.engine import Backend, EngineSpec
from megatron_operator.resource.names import (
    COORDINATOR,
    ENGINE,
    GROUP,
    LABEL_COMPONENT,
    LABEL_INSTANCE,
    LABEL_MANAGED_BY,
    LABEL_NAME,
    LABEL_POD_INDEX,
    SERVER,
)
from megatron_operator.resource.pod_policy import PodPolicy, Switch, in_repositories
from megatron_operator.resource.source import CacheSpec
from megatron_operator.resource.text import printable
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.protocol.vllm_arguments import code_arguments

Path = tuple[str, ...]
"""Path of field names, in which an entry of a list is `[]`."""

SHORTEST = 60
"""Maximum number of characters of a rejected value in a message."""


OWN_LABELS = (LABEL_NAME, LABEL_INSTANCE, LABEL_COMPONENT, LABEL_MANAGED_BY, LABEL_POD_INDEX)
OWN_KEYS = (f"{GROUP}/", *OWN_LABELS)
"""Labels and annotations on which the operator depends, in both profiles."""
FRAME = (("metadata",), ("spec",), *(("spec", field) for field in ("containers", "initContainers", "volumes")))
"""Fields of a podTemplate that are merged in both profiles and must not be removed."""
OWN_FIELDS = ("args", "envFrom")
"""Fields of rendered containers that only the operator may set, in both profiles."""
OWN_MOUNTS = ("/etc/megatron", "/cache", "/model", "/model-cache")
"""Mount paths of the operator's volumes, in both profiles."""
MOUNT_ROOTS = ("/mnt", "/data", "/models", "/scratch", "/srv", "/dev/shm", "/dev/hugepages")
"""Allowed parents of volume mount paths in rendered containers. Images have no programs or settings there."""
WRITABLE = {"tmp": ("emptyDir",), "cache": ("emptyDir", "persistentVolumeClaim"), "shm": ("emptyDir",)}
"""Rendered volumes that a podTemplate may change, with the types that it may change them to."""
FIXED_VOLUMES = ("keys", "model", MODEL_CACHE, "api-keys", "tls")
VOLUME_TYPES = ("persistentVolumeClaim", "configMap", "emptyDir")
NO_SWITCH = "remove it; no value of the operator's chart allows it"
EXPANDED = "$("
"""Start of text that Kubernetes expands. It replaces `$(NAME)` by a variable, whose value may come from a Secret."""


@dataclass(frozen=True, slots=True)
class Violation:
    """A field that the pod policy does not allow."""

    path: str
    value: Any
    allowed: str
    """What is allowed instead, as a clause."""
    switch: Switch | None = Switch.PROFILE
    """Value of the chart that allows the field. None if no value allows it, because the operator depends on the
    field.
    """

    def __str__(self) -> str:
        shown = repr(self.value)
        shown = shown if len(shown) <= SHORTEST else f"{shown[: SHORTEST - 1]}…"
        remedy = self.switch.remedy if self.switch else NO_SWITCH
        return f"{printable(self.path)}: is {printable(shown)}; {self.allowed}; {remedy}"


@dataclass(frozen=True, slots=True)
class Request:
    """A podTemplate that is checked, and everything else that the rules read."""

    policy: PodPolicy
    runtime_images: tuple[str, ...]
    default_account: str
    secrets: frozenset[str]
    """Names of the Secrets that the spec refers to."""
    containers: Mapping[str, Collection[str]]
    """Names of the rendered containers, by `containers` and `initContainers`."""
    host_volumes: frozenset[str]
    accounts: frozenset[str]
    """Service accounts that the podTemplate names."""


Rule = Callable[[Any, str, Request], Iterator[Violation]]


def enforce(
    ctx: RenderContext, component: str, overlay: dict[str, Any] | None, *, containers: Mapping[str, Collection[str]]
) -> None:
    """Raise NotAllowed if the policy does not allow a component's podTemplate, or the engines' image.

    Args:
        overlay: the podTemplate, which has been merged without an error.
        containers: names of the rendered containers, by `containers` and `initContainers`.

    Raises:
        NotAllowed: the message has the first invalid field, its value, what is allowed and the remedy.
    """
    if ctx.settings.pod_policy is not None:
        _require_none(violations(ctx, component, overlay, policy=ctx.settings.pod_policy, containers=containers))


def require_annotations(ctx: RenderContext, annotations: Mapping[str, str] | None, field: str) -> None:
    """Raise NotAllowed if the policy does not allow annotations of a Service or Ingress."""
    policy = ctx.settings.pod_policy
    # Recorded templates are not checked. They have none of the operator's own keys either.
    keys = _own_keys if policy is None or policy.trusted else _keys_in(ANNOTATIONS)
    _require_none(keys(annotations or {}, field, policy or PodPolicy()))


def require_hosts(ctx: RenderContext, hosts: Sequence[str] | None, field: str) -> None:
    """Raise NotAllowed if the chart does not allow host names of an Ingress or HTTPRoute.

    This check applies to both profiles of the pod policy.

    hosts: None or empty means every host.
    """
    policy = ctx.settings.pod_policy
    if policy is not None:
        allowed = _named(policy.hostnames, ctx)
        clause = f"the host names {', '.join(allowed)} are allowed" if allowed else "host names are not allowed"
        found = (host for host in hosts or ("*",) if not _allows_host(host, allowed))
        _require_none(Violation(field, host, clause, Switch.HOSTNAMES) for host in found)


def require_tls_secret(ctx: RenderContext, name: str | None, field: str) -> None:
    """Raise NotAllowed if the chart does not allow the Ingress to use the TLS Secret `name`.

    This check applies to both profiles of the pod policy.
    """
    policy = ctx.settings.pod_policy
    if policy is not None and name is not None:
        allowed = _named(policy.tls_secrets, ctx)
        clause = f"the Secrets {', '.join(allowed)} are allowed" if allowed else "TLS Secrets are not allowed"
        if not _listed(name, allowed):
            _require_none([Violation(field, name, clause, Switch.TLS_SECRETS)])


def _named(entries: Sequence[str], ctx: RenderContext) -> tuple[str, ...]:
    """Return the chart's entries, in which `{namespace}` and `{name}` are replaced by the values of the resource."""
    return tuple(entry.replace("{namespace}", ctx.namespace).replace("{name}", ctx.name) for entry in entries)


def _allows_host(host: str, allowed: Sequence[str]) -> bool:
    bare = host.removeprefix("*.")
    return any(
        entry in ("*", host) or (entry.startswith("*.") and host != "*" and bare.endswith(entry[1:]))
        for entry in allowed
    )


def _require_none(violations: Iterable[Violation]) -> None:
    found = list(violations)
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
    """Yield each field of a podTemplate that is not allowed, in the order of the podTemplate."""
    request = _request(ctx, overlay or {}, policy, containers)
    if policy.trusted:
        yield from _depended_on(overlay or {}, ctx.template_field(component), request)
        return
    yield from _release(ctx, component, request)
    if component == SERVER and (vllm := ctx.spec.engine.vllm) is not None and vllm.image is not None:
        yield from _image(vllm.image, "spec.engine.vllm.image", request)
    if component == ENGINE:
        yield from _engine(ctx.spec.engine, request)
        yield from _model_cache(ctx.spec.model.cache, request)
    if component == COORDINATOR:
        priority = ctx.spec.coordinator.priority_class_name
        yield from _priority_class(priority, "spec.coordinator.priorityClassName", request)
    yield from _walk(overlay or {}, ctx.template_field(component), (), POD, request)


def _release(ctx: RenderContext, component: str, request: Request) -> Iterator[Violation]:
    settings = ctx.settings
    if component == COORDINATOR:
        yield from _image(settings.coordinator_image, "status.release.coordinatorImage", request)
    elif ctx.spec.engine.backend is Backend.NATIVE:
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
    for name, value in code_arguments(engine.vllm.args).items():
        if not request.policy.vllm_code:
            allowed = "arguments of vLLM that can load code, or that this release does not know, are not allowed"
            yield Violation(f"spec.engine.vllm.args.{name}", value, allowed, Switch.VLLM_CODE)


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
        containers=containers,
        host_volumes=frozenset(name for name in host if isinstance(name, str)),
        accounts=frozenset(name for name in [spec.get("serviceAccountName")] if isinstance(name, str)),
    )


def _walk(value: Any, path: str, fields: Path, table: Table, request: Request) -> Iterator[Violation]:
    """Yield the violations in `value`, which is at path `fields` of `table`, and in everything below it."""
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
        yield Violation(
            path, value, f"give {table.names(fields)} below it", None if fields in FRAME else Switch.PROFILE
        )


@dataclass(frozen=True)
class Table:
    """The fields of an object that the pod policy allows.

    what:  name of the object in messages.
    rules: rule of each allowed field, by path.
    inner: all prefixes of the allowed paths.
    """

    what: str
    rules: Mapping[Path, Rule]
    inner: frozenset[Path]

    def names(self, fields: Path) -> str:
        """Return the names of the fields that are allowed below the path `fields`, as text."""
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


def _own_field(value: Any, path: str, request: Request) -> Iterator[Violation]:
    yield Violation(path, value, "the operator sets this field itself", None)


def _listed(name: str, names: Iterable[str]) -> bool:
    """Return whether an entry of `names` matches `name`.

    An entry that ends in `*` or `/` matches every name with this prefix.
    """
    return any(
        name == entry or (entry.endswith(("*", "/")) and name.startswith(entry.removesuffix("*"))) for entry in names
    )


def _group_of(name: str, groups: Mapping[str, Group]) -> Group | None:
    return next((group for group in groups.values() if _listed(name, group.names)), None)


KeyRule = Callable[[Any, str, PodPolicy], Iterator[Violation]]


def _own_keys(value: Any, path: str, policy: PodPolicy) -> Iterator[Violation]:
    """Yield a violation for each label or annotation on which the operator depends."""
    if not isinstance(value, dict):
        yield Violation(path, value, "give an object of strings", None)
        return
    for key, each in value.items():
        if _listed(str(key), OWN_KEYS):
            yield Violation(f"{path}[{key}]", each, "the operator sets this key itself", None)


def _keys_in(groups: Mapping[str, Group]) -> KeyRule:
    """Return the rule for labels or annotations that allows the names in `groups` and the names that the chart adds."""

    def rule(value: Any, path: str, policy: PodPolicy) -> Iterator[Violation]:
        yield from _own_keys(value, path, policy)
        for key, each in value.items() if isinstance(value, dict) else ():
            group = _group_of(str(key), groups)
            if _listed(str(key), OWN_KEYS) or _listed(str(key), policy.metadata):
                continue
            if group is None:
                yield Violation(
                    f"{path}[{key}]",
                    each,
                    "it is not on the list of keys that configure no other component",
                    Switch.METADATA,
                )
            elif group.value is not None and not re.fullmatch(group.value, str(each)):
                yield Violation(f"{path}[{key}]", each, f"{group.value} is allowed", Switch.METADATA)

    return rule


def _keys(groups: Mapping[str, Group]) -> Rule:
    rule = _keys_in(groups)
    return lambda value, path, request: rule(value, path, request.policy)


def _variable(value: Any, path: str, request: Request) -> Iterator[Violation]:
    """Yield the violations in one environment variable of a rendered container."""
    yield from _foreign_variable(value, path, request)
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str) or name in request.policy.environment:
        return
    group = _group_of(name, ENVIRONMENT)
    if name in PROTECTED:
        yield Violation(f"{path}.name", name, "the operator sets this variable itself", Switch.ENVIRONMENT)
    elif name in SECRETS:
        if value.get("value") is not None:
            allowed = "it takes a value of a Secret only; give it by valueFrom.secretKeyRef"
            yield Violation(f"{path}.value", "…", allowed, Switch.ENVIRONMENT)
    elif _listed(name, (*request.policy.environment, *request.policy.secret_environment)):
        return
    elif group is None:
        allowed = "it is not on the list of variables that load no code, move no files and redirect no token"
        yield Violation(f"{path}.name", name, allowed, Switch.ENVIRONMENT)
    elif group.value is not None and (
        value.get("valueFrom") is not None or not re.fullmatch(group.value, str(value.get("value") or ""))
    ):
        allowed = f"give {name} a value that matches {group.value}"
        yield Violation(f"{path}.value", value.get("value"), allowed, Switch.ENVIRONMENT)


_SOURCES = ("configMapKeyRef", "fieldRef", "resourceFieldRef", "secretKeyRef")
_VARIABLE_FIELDS = ("name", "value", "valueFrom")


def _foreign_variable(value: Any, path: str, request: Request) -> Iterator[Violation]:
    """Yield the violations in one environment variable of a sidecar or a rendered container.

    The variable's value must not contain text that Kubernetes expands. Only a variable that is meant for a secret may
    take its value from a Secret.
    """
    if not isinstance(value, dict):
        yield Violation(path, value, "give an object with name and value")
        return
    for field, each in value.items():
        if field not in _VARIABLE_FIELDS:
            yield Violation(f"{path}.{field}", each, f"a variable may set {', '.join(_VARIABLE_FIELDS)}")
    name, given = value.get("name"), value.get("valueFrom")
    if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_.-]*", name):
        yield Violation(f"{path}.name", name, "give a name of letters, digits and _", None)
    yield from _literal(value.get("value"), f"{path}.value", request)
    if given is not None and not isinstance(given, dict):
        yield Violation(f"{path}.valueFrom", given, f"give an object with one of {', '.join(_SOURCES)}")
    for kind, source in given.items() if isinstance(given, dict) else ():
        where = f"{path}.valueFrom.{kind}"
        if kind not in _SOURCES:
            yield Violation(where, source, f"{', '.join(_SOURCES)} are allowed")
        if kind != "secretKeyRef":
            continue
        secret = source.get("name") if isinstance(source, dict) else None
        if not isinstance(secret, str) or secret not in request.secrets:
            named = ", ".join(sorted(request.secrets)) or "it names none"
            yield Violation(f"{where}.name", secret, f"Secrets that the spec itself names are allowed ({named})")
        if not _listed(str(name), (*SECRETS, *request.policy.secret_environment)):
            allowed = "only variables that take secrets may have a value of a Secret: HF_TOKEN and credentials"
            yield Violation(where, name, f"{allowed} of object stores", Switch.SECRET_ENVIRONMENT)


def _literal(value: Any, path: str, request: Request) -> Iterator[Violation]:
    """Yield a violation for each text that Kubernetes would expand."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _literal(each, f"{path}.{key}", request)
    elif isinstance(value, list):
        for index, each in enumerate(value):
            yield from _literal(each, f"{path}[{index}]", request)
    elif isinstance(value, str) and EXPANDED in value:
        yield Violation(path, value, f"texts with {EXPANDED}NAME), which Kubernetes replaces, are not allowed")


def _depended_on(overlay: dict[str, Any], path: str, request: Request) -> Iterator[Violation]:
    """Yield a violation for each change of a field that the operator itself sets and depends on.

    The profile `trusted` limits nothing else in a podTemplate.
    """
    own = "the operator depends on it"
    for field in ("metadata", "spec"):
        if not isinstance(overlay.get(field, {}), dict):
            yield Violation(f"{path}.{field}", overlay[field], own, None)
            return
    for field in ("labels", "annotations"):
        yield from _own_keys(overlay.get("metadata", {}).get(field, {}), f"{path}.metadata.{field}", request.policy)
    spec = overlay.get("spec", {})
    for field in ("containers", "initContainers", "volumes"):
        if not isinstance(spec.get(field, []), list):
            yield Violation(f"{path}.spec.{field}", spec[field], own, None)
            return
    for index, volume in enumerate(spec.get("volumes", ())):
        if volume["name"] in (*FIXED_VOLUMES, *WRITABLE):
            yield from _volume(volume, f"{path}.spec.volumes[{index}]", request)
    for field in ("containers", "initContainers"):
        for index, container in enumerate(spec.get(field, ())):
            where = f"{path}.spec.{field}[{index}]"
            is_rendered = container["name"] in request.containers.get(field, ())
            for name in OWN_FIELDS if is_rendered else ():
                if name in container:
                    yield from _own_field(container[name], f"{where}.{name}", request)
            for name in ("env", "volumeMounts"):
                if name in container and not isinstance(container[name], list):
                    yield Violation(f"{where}.{name}", container[name], own, None)
                    return
            for entry, variable in enumerate(container.get("env", ()) if is_rendered else ()):
                if variable.get("name") in PROTECTED and variable["name"] not in request.policy.environment:
                    yield Violation(f"{where}.env[{entry}].name", variable["name"], own, Switch.ENVIRONMENT)
            for entry, mount in enumerate(container.get("volumeMounts", ())):
                yield from _depended_on_mount(mount, f"{where}.volumeMounts[{entry}]", request, is_rendered)


def _is_own(path: object) -> bool:
    """Return whether a normalized mount path is a mount path of the operator, or is below such a path."""
    return isinstance(path, str) and _below(posixpath.normpath(f"/{path.lstrip('/')}"), OWN_MOUNTS)


def _depended_on_mount(value: Any, path: str, request: Request, is_rendered: bool) -> Iterator[Violation]:
    name, where = (value.get("name"), value.get("mountPath")) if isinstance(value, dict) else (None, None)
    if not isinstance(where, str) or not isinstance(name, str):
        yield Violation(path, value, "give an object with name and mountPath", None)
    elif is_rendered and _is_own(where):
        yield Violation(f"{path}.mountPath", where, f"{', '.join(OWN_MOUNTS)} are the operator's own", None)
    else:
        yield from _fixed_volume(name, path)


def _image(value: Any, path: str, request: Request) -> Iterator[Violation]:
    repositories = (*request.runtime_images, *request.policy.image_repositories)
    if not (isinstance(value, str) and in_repositories(value, repositories)):
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
    """Return whether a path has no `.` or `..` parts, and equals an entry of `roots` or is below such an entry."""
    if not isinstance(path, str) or posixpath.normpath(path) != (path.rstrip("/") or "/") or path.startswith("//"):
        return False
    clean = path.rstrip("/")
    return any(clean == root.rstrip("/") or clean.startswith(f"{root.rstrip('/')}/") for root in roots)


def _volume(value: Any, path: str, request: Request) -> Iterator[Violation]:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(value, dict) or not isinstance(name, str):
        yield Violation(path, value, "give an object with a name")
    elif name in FIXED_VOLUMES:
        yield Violation(path, value, f"the volume {name} is the operator's own; choose another name", None)
    else:
        types = WRITABLE.get(name, VOLUME_TYPES)
        for kind, source in value.items():
            where = f"{path}.{kind}"
            if kind == "name" or kind in types or (name in WRITABLE and source is None and kind in VOLUME_TYPES):
                continue
            if kind == "hostPath" and name not in WRITABLE:
                yield from _host_path(source, where, request)
            else:
                switch = None if name in WRITABLE else Switch.PROFILE
                yield Violation(where, source, f"the volume may be of type {', '.join(types)}", switch)


def _host_path(value: Any, path: str, request: Request) -> Iterator[Violation]:
    where = value.get("path") if isinstance(value, dict) else None
    if not _below(where, request.policy.host_paths):
        listed = ", ".join(request.policy.host_paths)
        allowed = f"paths below {listed} are allowed" if listed else "volumes of type hostPath are not allowed"
        yield Violation(f"{path}.path", where, allowed, Switch.HOST_PATHS)


def _mount(value: Any, path: str, request: Request) -> Iterator[Violation]:
    """Yield the violations in a volume mount of a rendered container."""
    yield from _shared_mount(value, path, request)
    where = value.get("mountPath") if isinstance(value, dict) else None
    roots = (*MOUNT_ROOTS, *request.policy.host_paths)
    if not _below(where, roots):
        allowed = f"volumes may be mounted at or below {', '.join(roots)}"
        yield Violation(f"{path}.mountPath", where, allowed, None if _is_own(where) else Switch.PROFILE)


def _foreign_mount(value: Any, path: str, request: Request) -> Iterator[Violation]:
    """Yield the violations in a volume mount of a sidecar."""
    yield from _shared_mount(value, path, request)
    if isinstance(value, dict):
        yield from _fixed_volume(value.get("name"), path)


def _fixed_volume(name: object, path: str) -> Iterator[Violation]:
    if name in FIXED_VOLUMES:
        yield Violation(f"{path}.name", name, "volumes with keys and weights are mounted by the operator alone", None)


_MOUNT_FIELDS = ("name", "mountPath", "readOnly", "recursiveReadOnly", "subPath")


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
    """Yield the violations in a probe or lifecycle hook of a sidecar, which may connect only to its own pod."""
    yield from _literal(value, path, request) if isinstance(value, list | str) else ()
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
CONTAINER = _table(
    "a podTemplate",
    {
        "name": _any,
        "image": _image,
        "imagePullPolicy": _any,
        "resources": _any,
        "env.[]": _variable,
        "volumeMounts.[]": _mount,
        **dict.fromkeys(OWN_FIELDS, _own_field),
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
        "command": _literal,
        "args": _literal,
        "workingDir": _any,
        "restartPolicy": _any,
        "resources": _any,
        "env.[]": _foreign_variable,
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
        "metadata.labels": _keys(LABELS),
        "metadata.annotations": _keys(ANNOTATIONS),
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
