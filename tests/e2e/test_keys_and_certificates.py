"""Keys are rotated under load, and servers serve HTTPS with a renewed certificate: on a real node, whose kubelet
updates mounted Secrets with its usual delay."""

from __future__ import annotations

import base64
import hashlib
import socket
import ssl
import subprocess
from pathlib import Path

import httpx
import pytest
import yaml
from eventually import LONG_SECONDS, eventually
from soak import SOAK

from localcluster.kubectl import Kubectl

from .conftest import SAMPLE, deploy
from .load_client import HEADING, LoadClient

pytestmark = pytest.mark.skipif(not SOAK, reason="waits minutes for the kubelet; `make soak` runs it")
KUBELET_SECONDS = 240.0
"""The kubelet has updated a mounted Secret within this time."""


def test_keys_are_rotated_under_load(kube: Kubectl) -> None:
    model = yaml.safe_load(SAMPLE.read_text())["spec"]["model"]
    deployed = deploy(kube, replicas=2, model={**model, "dtype": "Float32"})
    pods = {pod["metadata"]["uid"] for pod in kube.json("pods", "-l", "app.kubernetes.io/component=engine")["items"]}
    before = kube.json("secret", "demo-keys")["data"]["server.pub"]
    load = LoadClient(deployed.chat.url, deployed.chat.model, workers=3, tokens=32)
    with load, load.during("keys replaced") as done:
        kube.patch_spec("demo", keys={"generation": 2})
        kube.wait("mi/demo", "jsonpath={.status.keys.generation}=2")
        kube.wait("mi/demo", "jsonpath={.status.keys.stage}=Settled", seconds=3 * KUBELET_SECONDS)
        kube.wait("mi/demo", "condition=Ready")
    print(f"\n{HEADING}\n{done.row()}")
    assert done.faults == []
    assert kube.json("secret", "demo-keys")["data"]["server.pub"] != before
    after = {pod["metadata"]["uid"] for pod in kube.json("pods", "-l", "app.kubernetes.io/component=engine")["items"]}
    assert after == pods, "a key rotation must not replace pods"


def certificate(folder: Path, host: str) -> tuple[Path, Path]:
    key, cert = folder / "tls.key", folder / "tls.crt"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", str(key), "-out", str(cert), "-days", "2", "-subj", "/CN=demo"]
    subprocess.run([*command, "-addext", f"subjectAltName=DNS:{host}"], check=True, capture_output=True)
    return key, cert


def store(kube: Kubectl, key: Path, cert: Path) -> None:
    data = {path.name: base64.b64encode(path.read_bytes()).decode() for path in (key, cert)}
    meta = {"name": "demo-tls"}
    kube.apply({"apiVersion": "v1", "kind": "Secret", "type": "kubernetes.io/tls", "metadata": meta, "data": data})


def shown(address: str, host: str) -> str:
    """Return the digest of the certificate that a server presents."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    with (
        socket.create_connection((address, 443), timeout=LONG_SECONDS) as plain,
        context.wrap_socket(plain, server_hostname=host) as connection,
    ):
        return hashlib.sha256(connection.getpeercert(binary_form=True) or b"").hexdigest()


async def test_servers_serve_https_and_reload_a_renewed_certificate(kube: Kubectl, tmp_path: Path) -> None:
    host = f"demo.{kube.namespace}.svc"
    key, cert = certificate(tmp_path, host)
    store(kube, key, cert)
    server = yaml.safe_load(SAMPLE.read_text())["spec"]["server"]
    deployed = deploy(kube, server={**server, "tls": {"secretName": "demo-tls"}})
    address = kube.cluster_ip("demo")
    body = {
        "model": deployed.chat.model,
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 16,
        "temperature": 0,
    }
    trust = ssl.create_default_context(cafile=str(cert))
    async with httpx.AsyncClient(verify=trust, timeout=120) as client:
        answer = await client.post(
            f"https://{address}/v1/chat/completions",
            json=body,
            headers={"Host": host},
            extensions={"sni_hostname": host},
        )
    assert answer.status_code == 200
    assert "Paris" in answer.json()["choices"][0]["message"]["content"]

    server_pods = ("pods", "-l", "app.kubernetes.io/instance=demo,app.kubernetes.io/component=server")
    before = {pod["metadata"]["uid"] for pod in kube.json(*server_pods)["items"]}
    first = shown(address, host)
    store(kube, *certificate(tmp_path, host))

    async def renewed() -> bool:
        return shown(address, host) != first

    await eventually(
        renewed, seconds=KUBELET_SECONDS, what="the server presents the renewed certificate", look_seconds=1
    )
    assert {pod["metadata"]["uid"] for pod in kube.json(*server_pods)["items"]} == before
