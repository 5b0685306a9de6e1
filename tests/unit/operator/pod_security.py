"""The restricted profile of the Pod Security Standards, as Kubernetes 1.34 enforces it: one function for each control.

After the tables of https://kubernetes.io/docs/concepts/security/pod-security-standards/.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

Pod = dict[str, Any]
Check = Callable[[Pod], Iterator[str]]

VOLUME_TYPES = {
    *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral", "image", "persistentVolumeClaim", "projected"),
    "secret",
}
SELINUX_TYPES = {"", "container_t", "container_init_t", "container_kvm_t", "container_engine_t"}
PROFILES = {"RuntimeDefault", "Localhost"}
SYSCTLS = {
    *("kernel.shm_rmid_forced", "net.ipv4.ip_local_port_range", "net.ipv4.tcp_syncookies"),
    *("net.ipv4.ping_group_range", "net.ipv4.ip_unprivileged_port_start", "net.ipv4.ip_local_reserved_ports"),
    *("net.ipv4.tcp_keepalive_time", "net.ipv4.tcp_fin_timeout", "net.ipv4.tcp_keepalive_intvl"),
    *("net.ipv4.tcp_keepalive_probes", "net.ipv4.tcp_rmem", "net.ipv4.tcp_wmem"),
}
APPARMOR = "container.apparmor.security.beta.kubernetes.io/"


def _containers(pod: Pod) -> Iterator[tuple[str, dict[str, Any]]]:
    for field in ("initContainers", "containers", "ephemeralContainers"):
        for container in pod["spec"].get(field) or ():
            yield f"{field}[{container.get('name')}]", container


def _contexts(pod: Pod) -> Iterator[tuple[str, dict[str, Any]]]:
    yield "spec", pod["spec"].get("securityContext") or {}
    for where, container in _containers(pod):
        yield where, container.get("securityContext") or {}


def host_namespaces(pod: Pod) -> Iterator[str]:
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if pod["spec"].get(field):
            yield field


def container_privileges(pod: Pod) -> Iterator[str]:
    for where, container in _containers(pod):
        context = container.get("securityContext") or {}
        if context.get("privileged"):
            yield f"{where}: privileged"
        if context.get("allowPrivilegeEscalation") is not False:
            yield f"{where}: allowPrivilegeEscalation"
        if context.get("procMount") not in (None, "Default"):
            yield f"{where}: procMount"
        capabilities = context.get("capabilities") or {}
        if "ALL" not in (capabilities.get("drop") or ()):
            yield f"{where}: capabilities.drop"
        if set(capabilities.get("add") or ()) - {"NET_BIND_SERVICE"}:
            yield f"{where}: capabilities.add"


def users(pod: Pod) -> Iterator[str]:
    for where, context in _contexts(pod):
        if context.get("runAsUser") == 0:
            yield f"{where}: runAsUser"
        if context.get("runAsNonRoot") is False:
            yield f"{where}: runAsNonRoot"
    whole = pod["spec"].get("securityContext") or {}
    for where, container in _containers(pod):
        if not whole.get("runAsNonRoot") and not (container.get("securityContext") or {}).get("runAsNonRoot"):
            yield f"{where}: runAsNonRoot is not set"


def profiles(pod: Pod) -> Iterator[str]:
    for where, context in _contexts(pod):
        seccomp = context.get("seccompProfile")
        if seccomp is not None and seccomp.get("type") not in PROFILES:
            yield f"{where}: seccompProfile"
        if (context.get("appArmorProfile") or {}).get("type", "RuntimeDefault") not in PROFILES:
            yield f"{where}: appArmorProfile"
        selinux = context.get("seLinuxOptions") or {}
        if selinux.get("type", "") not in SELINUX_TYPES or selinux.get("user") or selinux.get("role"):
            yield f"{where}: seLinuxOptions"
        if (context.get("windowsOptions") or {}).get("hostProcess"):
            yield f"{where}: windowsOptions.hostProcess"
    for where, container in _containers(pod):
        whole = pod["spec"].get("securityContext") or {}
        if "seccompProfile" not in whole and "seccompProfile" not in (container.get("securityContext") or {}):
            yield f"{where}: seccompProfile is not set"
    for key, value in ((pod.get("metadata") or {}).get("annotations") or {}).items():
        if (
            key.startswith(APPARMOR)
            and value not in ("runtime/default", "")
            and not str(value).startswith("localhost/")
        ):
            yield f"annotation {key}"


def volumes(pod: Pod) -> Iterator[str]:
    for volume in pod["spec"].get("volumes") or ():
        types = {kind for kind, source in volume.items() if kind != "name" and source is not None}
        if types - VOLUME_TYPES or not types:
            yield f"volume {volume.get('name')}: {sorted(types)}"


def network(pod: Pod) -> Iterator[str]:
    for where, container in _containers(pod):
        for port in container.get("ports") or ():
            if port.get("hostPort"):
                yield f"{where}: hostPort"
        handlers = [container.get(name) or {} for name in ("startupProbe", "readinessProbe", "livenessProbe")]
        handlers += [each or {} for each in (container.get("lifecycle") or {}).values()]
        for handler in handlers:
            if any((handler.get(kind) or {}).get("host") for kind in ("httpGet", "tcpSocket")):
                yield f"{where}: host of a probe or hook"


def sysctls(pod: Pod) -> Iterator[str]:
    for entry in (pod["spec"].get("securityContext") or {}).get("sysctls") or ():
        if entry.get("name") not in SYSCTLS:
            yield f"sysctl {entry.get('name')}"


CHECKS: tuple[Check, ...] = (
    host_namespaces,
    container_privileges,
    users,
    profiles,
    volumes,
    network,
    sysctls,
)


def violations(pod: Pod) -> list[str]:
    """What of a pod template the restricted profile forbids."""
    return [f"{check.__name__}: {found}" for check in CHECKS for found in check(pod)]
