"""From `kubectl apply` to a chat answer, every verb, and deletion: on a real node with real weights."""

import ipaddress
import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from eventually import LONG_SECONDS, eventually
from openai import OpenAI

from localcluster import installation
from localcluster.kubectl import Kubectl
from localcluster.progress import Steps
from localcluster.walkthrough import QUESTION, Walkthrough

from .conftest import SAMPLE, Deployed, Platform

ROOT = Path(__file__).parents[2]


async def test_every_verb_with_open_streams(kube: Kubectl) -> None:
    walk = Walkthrough(kube, Steps(), SAMPLE, "demo", lambda service: f"http://{kube.cluster_ip(service)}")
    walk.run()
    transitions = [(entry["from"], entry["to"]) for entry in kube.json("mi", "demo")["status"]["history"]]
    for target in ("Paused", "Suspended", "Stopped", "Running"):
        assert any(to == target for _, to in transitions), f"{target} is missing in the history {transitions}"

    async def reported() -> bool:
        return {"Paused", "Suspended", "Stopped"} <= {event["reason"] for event in kube.events("demo")}

    await eventually(reported, what="an Event of each state", look_seconds=1)
    ask_with_the_openai_sdk(f"http://{kube.cluster_ip('demo')}/v1")
    kube("delete", "mi", "demo")
    children = ("pod,statefulset,deployment,service", "-l", "app.kubernetes.io/instance=demo")
    kube("wait", *children, "--for=delete", f"--timeout={LONG_SECONDS:g}s")
    assert kube.json(*children)["items"] == []


def test_a_connection_to_an_unknown_service_stays_on_this_machine(platform: Platform) -> None:
    known = ipaddress.ip_address(
        platform.kube.json("service", "kubernetes", "--namespace=default")["spec"]["clusterIP"]
    )
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((str(known + 250), 80), timeout=LONG_SECONDS)


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


def test_helm_test_passes_with_a_model_and_names_what_does_not_answer(platform: Platform, served: Deployed) -> None:
    kubeconfig = ["--kubeconfig", platform.cluster.kubeconfig, "-n", installation.OPERATOR_NAMESPACE]

    def helm_test(url: str, *, seconds: int) -> subprocess.CompletedProcess[str]:
        values = [f"tests.serverUrl={url}", f"tests.timeoutSeconds={seconds}"]
        installation.install_operator(platform.kube, platform.helm, Steps(), values=values)
        command = [platform.helm, *kubeconfig, "test", installation.RELEASE]
        return subprocess.run(command, check=False, capture_output=True, text=True)

    namespace = served.kube.namespace
    passed = helm_test(f"http://{served.name}.{namespace}", seconds=round(LONG_SECONDS))
    assert passed.returncode == 0, passed.stdout + passed.stderr
    assert "Phase:          Succeeded" in passed.stdout
    failed = helm_test(f"http://absent.{namespace}", seconds=5)
    assert failed.returncode != 0
    system = platform.kube.in_namespace(installation.OPERATOR_NAMESPACE)
    assert "check failed that the model answers" in system("logs", "megatron-operator-test-verify")


def test_the_plugin_shows_logs_and_load(served: Deployed, platform: Platform, tmp_path: Path) -> None:
    """The single file, called by kubectl as `kubectl megatron`, in an environment without the packages."""
    program = tmp_path / "kubectl-megatron"
    subprocess.run([sys.executable, ROOT / "tools" / "build_plugin.py", program], check=True)
    (tmp_path / "python3").symlink_to(sys._base_executable)  # type: ignore[attr-defined]
    path = f"{tmp_path}:{platform.cluster.kubectl.parent}:/usr/bin:/bin"
    environment = {"HOME": str(tmp_path), "KUBECONFIG": str(platform.cluster.kubeconfig), "PATH": path}
    namespace = served.kube.namespace

    def run(*arguments: str) -> str:
        command = [platform.cluster.kubectl, "megatron", *arguments, "--namespace", namespace]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    assert run("list").splitlines()[1].split()[:4] == ["demo", "Running", "1/1", "demo"]
    lines = run("logs", "demo", "--component", "coordinator").splitlines()
    assert any("engine demo-engine-0 registered" in line for line in lines)
    assert all(line.startswith("demo-coordinator-") for line in lines)
    top = json.loads(run("top", "demo", "-o", "json"))
    (engine,) = top["engines"]
    assert (engine["name"], engine["state"], top["metricsError"]) == ("demo-engine-0", "RUNNING", "")
    assert engine["kvUse"] is not None
    assert run("scale", "demo", "--replicas", "2").splitlines()[-1] == "demo: done, 2 of 2 engines updated, 2/2 ready"
    assert run("rollout", "status", "demo") == "demo: done, 2 of 2 engines updated, 2/2 ready\n"
