"""Creates the cluster's certificates with openssl: one authority, and one certificate per identity."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from localcluster.settings import Layout, Node, Settings
from localcluster.shell import run

DAYS = "3650"


@dataclass(frozen=True)
class Identity:
    """A server or client of the cluster that has a certificate. Kubernetes reads user and group from `subject`."""

    name: str
    subject: str
    alternative_names: tuple[str, ...] = ()


def identities(settings: Settings) -> list[Identity]:
    """Return the identities of a cluster's servers and clients.

    The clients' names are the names to which Kubernetes' default RBAC roles are bound.
    """
    service = "kubernetes.default.svc"
    api_names = ("localhost", "kubernetes", "kubernetes.default", service, f"{service}.cluster.local")
    api_addresses = ("127.0.0.1", settings.kubernetes_service_ip, settings.node_ip)
    return [
        Identity(
            "apiserver",
            "/CN=kube-apiserver",
            (*(f"DNS:{name}" for name in api_names), *(f"IP:{address}" for address in api_addresses)),
        ),
        Identity("admin", "/O=system:masters/CN=admin"),
        Identity("apiserver-kubelet-client", "/O=system:masters/CN=kube-apiserver-kubelet-client"),
        Identity("front-proxy-client", "/CN=front-proxy-client"),
        Identity("controller-manager", "/CN=system:kube-controller-manager"),
        Identity("scheduler", "/CN=system:kube-scheduler"),
        Identity("proxy", "/CN=system:kube-proxy"),
        Identity("coredns", "/CN=system:coredns"),
        *(_kubelet(node) for node in settings.nodes),
    ]


def _kubelet(node: Node) -> Identity:
    subject = f"/O=system:nodes/CN=system:node:{node.name}"
    return Identity(f"kubelet{node.suffix}", subject, (f"DNS:{node.name}", f"IP:{node.ip}"))


def ensure(settings: Settings, layout: Layout) -> None:
    """Create the missing keys and certificates in `layout.pki`.

    Existing files are complete, because files are created by rename.
    """
    layout.pki.mkdir(parents=True, exist_ok=True)
    layout.pki.chmod(0o700)
    if not _has(layout.pki, "ca"):
        with _Pair(layout.pki, "ca") as pair:
            request = ["openssl", "req", "-x509", *_ec_key(pair.key), "-out", pair.certificate, "-days", DAYS]
            run(
                [*request, "-subj", f"/CN=megatron-{settings.name}", "-addext", "keyUsage=critical,keyCertSign,cRLSign"]
            )
    for identity in identities(settings):
        if not _has(layout.pki, identity.name):
            _issue(identity, layout.pki)
    if not _has(layout.pki, "service-account"):
        with _Pair(layout.pki, "service-account") as pair:
            run(["openssl", "genrsa", "-out", pair.key, "2048"])
            run(["openssl", "rsa", "-in", pair.key, "-pubout", "-out", pair.certificate])


def _issue(identity: Identity, folder: Path) -> None:
    with _Pair(folder, identity.name) as pair:
        extensions = pair.certificate.with_suffix(".ext")
        lines = ["keyUsage=digitalSignature", "extendedKeyUsage=clientAuth,serverAuth"]
        if identity.alternative_names:
            lines.append("subjectAltName=" + ",".join(identity.alternative_names))
        extensions.write_text("\n".join(lines) + "\n")
        request = run(["openssl", "req", *_ec_key(pair.key), "-subj", identity.subject]).stdout
        authority: list[str | Path] = [
            "-CA",
            folder / "ca.crt",
            "-CAkey",
            folder / "ca.key",
            "-set_serial",
            str(int.from_bytes(os.urandom(8))),
        ]
        sign = ["openssl", "x509", "-req", *authority, "-days", DAYS, "-extfile", extensions, "-out", pair.certificate]
        run(sign, stdin=request)
        extensions.unlink()


def _ec_key(path: Path) -> list[str | Path]:
    return ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", path]


def _has(folder: Path, name: str) -> bool:
    return (folder / f"{name}.crt").exists() and (folder / f"{name}.key").exists()


class _Pair:
    """A context manager that yields temporary paths for a key and a certificate.

    At the end of the `with` block, it renames both files, the certificate last.
    """

    def __init__(self, folder: Path, name: str) -> None:
        self._final = (folder / f"{name}.key", folder / f"{name}.crt")
        self.key = folder / f"{name}.key.partial"
        self.certificate = folder / f"{name}.crt.partial"

    def __enter__(self) -> _Pair:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.key.chmod(0o600)
            self.key.replace(self._final[0])
            self.certificate.replace(self._final[1])
