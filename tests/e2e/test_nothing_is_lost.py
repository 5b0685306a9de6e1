"""Whatever dies, every request is answered, and every verb acts once."""

import re

from localcluster import installation
from localcluster.kubectl import Kubectl
from localcluster.walkthrough import STORY, Chat, Stream

from .conftest import Platform, deploy

TOKENS = 120


def streams(chat: Chat, count: int) -> list[Stream]:
    """Streams that have begun."""
    opened = [chat.stream(STORY, max_tokens=TOKENS) for _ in range(count)]
    for stream in opened:
        assert stream.begun.wait(60)
        assert stream.error is None, stream.error
    return opened


def signals_done(kube: Kubectl, engine: str, signal: str) -> int:
    text = kube("get", "--raw", f"/api/v1/namespaces/{kube.namespace}/pods/{engine}-0:8080/proxy/metrics")
    found = re.search(rf'^megatron_engine_signals_total{{signal="{signal}"}} (\S+)$', text, re.MULTILINE)
    assert found is not None, text
    return int(float(found[1]))


def kill(kube: Kubectl, *selector: str) -> None:
    """End pods by SIGKILL."""
    kube("delete", "pod", *selector, "--grace-period=0", "--force")


def test_the_operator_is_killed_in_the_middle_of_a_verb(platform: Platform, kube: Kubectl) -> None:
    deployed = deploy(kube)
    story = deployed.chat.ask(STORY, max_tokens=TOKENS)
    (stream,) = streams(deployed.chat, 1)
    system = platform.kube.in_namespace(installation.OPERATOR_NAMESPACE)
    kube.patch_spec("demo", desiredState="Paused")
    kill(system, "-l", f"app.kubernetes.io/instance={installation.RELEASE}")
    status = kube.wait_state("demo", "Paused", seconds=120)
    assert status["lifecycle"]["phase"] == "Confirmed"
    assert signals_done(kube, "demo-engine-0", "PAUSE") == 1
    kube.patch_spec("demo", desiredState="Running")
    kube.wait_state("demo", "Running", seconds=60)
    assert stream.wait(120) == story


def test_an_engine_dies_under_load(kube: Kubectl) -> None:
    deployed = deploy(kube, replicas=2)
    story = deployed.chat.ask(STORY, max_tokens=TOKENS)
    opened = streams(deployed.chat, 6)
    kill(kube, "demo-engine-1-0")
    assert [stream.wait(180) for stream in opened] == [story] * 6
    kube.wait("mi/demo", "condition=Ready", seconds=120)


def test_the_coordinator_dies_under_load(kube: Kubectl) -> None:
    deployed = deploy(kube)
    story = deployed.chat.ask(STORY, max_tokens=TOKENS)
    opened = streams(deployed.chat, 4)
    kill(kube, "-l", "app.kubernetes.io/instance=demo,app.kubernetes.io/component=coordinator")
    assert [stream.wait(180) for stream in opened] == [story] * 4
    kube.wait("mi/demo", "condition=Ready", seconds=120)


def test_an_engine_pod_is_evicted_while_paused(kube: Kubectl) -> None:
    deployed = deploy(kube)
    story = deployed.chat.ask(STORY, max_tokens=TOKENS)
    (stream,) = streams(deployed.chat, 1)
    kube.patch_spec("demo", desiredState="Paused")
    kube.wait_state("demo", "Paused", seconds=60)
    kube("delete", "pod", "demo-engine-0-0")
    kube.wait("pod/demo-engine-0-0", "condition=Ready", seconds=120)
    assert not stream.finished.is_set()
    kube.patch_spec("demo", desiredState="Running")
    kube.wait_state("demo", "Running", seconds=60)
    assert stream.wait(120) == story
