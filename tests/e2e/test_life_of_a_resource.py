"""From `kubectl apply` to a chat answer, every verb, and deletion: on a real node with real weights."""

import ipaddress
import socket
import subprocess

import pytest
from openai import OpenAI

from localcluster.kubectl import CommandError, Kubectl
from localcluster.progress import Steps
from localcluster.walkthrough import QUESTION, Walkthrough

from .conftest import SAMPLE, deploy


def test_every_verb_with_open_streams(kube: Kubectl) -> None:
    walk = Walkthrough(kube, Steps(), SAMPLE, "demo", lambda service: f"http://{kube.cluster_ip(service)}")
    walk.run()
    transitions = [(entry["from"], entry["to"]) for entry in kube.json("mi", "demo")["status"]["history"]]
    for target in ("Paused", "Suspended", "Stopped", "Running"):
        assert any(to == target for _, to in transitions), f"{target} is missing in the history {transitions}"
    reasons = {event["reason"] for event in kube.events("demo")}
    assert {"Paused", "Suspended", "Stopped"} <= reasons
    ask_with_the_openai_sdk(f"http://{kube.cluster_ip('demo')}/v1")
    kube("delete", "mi", "demo", "--timeout=10s")
    selector = "app.kubernetes.io/instance=demo"
    kube("wait", "pod", "-l", selector, "--for=delete", "--timeout=60s")
    assert kube.json("statefulset,deployment,service", "-l", selector)["items"] == []


def test_a_connection_to_an_unknown_service_stays_on_this_machine(kube: Kubectl) -> None:
    known = ipaddress.ip_address(kube.json("service", "kubernetes", "--namespace=default")["spec"]["clusterIP"])
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((str(known + 250), 80), timeout=10)


def ask_with_the_openai_sdk(url: str) -> None:
    client = OpenAI(base_url=url, api_key="none")
    (model,) = client.models.list().data
    asked = client.chat.completions.create(model=model.id, messages=QUESTION, temperature=0, max_tokens=32)
    assert "Paris" in (asked.choices[0].message.content or "")
    assert asked.usage is not None
    assert asked.usage.completion_tokens > 0
    pieces = client.chat.completions.create(
        model=model.id, messages=QUESTION, temperature=0, max_tokens=32, stream=True
    )
    text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces if chunk.choices)
    assert text == asked.choices[0].message.content


def test_an_invalid_resource_is_rejected_with_field_and_remedy(kube: Kubectl) -> None:
    manifest = {
        "apiVersion": "inference.megatron.dev/v1beta1",
        "kind": "MegatronInference",
        "metadata": {"name": "two"},
        "spec": {"model": {"source": {"builtin": "smollm2-135m", "huggingFace": {"repo": "a/b"}}}},
    }
    with pytest.raises(CommandError) as rejected:
        kube.apply(manifest)
    assert "spec.model.source" in rejected.value.output
    assert "exactly one" in rejected.value.output


def test_all_objects_can_be_deleted_at_once_in_any_order(kube: Kubectl) -> None:
    deploy(kube)
    namespace = kube.namespace
    kube("delete", "namespace", namespace, "--timeout=60s")
    kube("create", "namespace", namespace)
    assert subprocess.run(kube.command("get", "mi", "demo"), capture_output=True, check=False).returncode != 0
