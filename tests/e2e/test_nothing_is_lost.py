"""Killed engines, coordinators and operators lose no request, and every verb acts once. One resource for all tests."""

import re
from dataclasses import dataclass

import pytest
from soak import SOAK

from localcluster import installation
from localcluster.kubectl import PATIENCE_SECONDS, Kubectl
from localcluster.walkthrough import STORY, Stream, ask_for_paris

from .conftest import Deployed, Platform, scale

long = pytest.mark.skipif(not SOAK, reason="tests/cluster and tests/survival show it with processes: run by make soak")


@dataclass(frozen=True)
class Subject:
    """The resource and its undisturbed answer."""

    deployed: Deployed
    tokens: int
    story: str


@pytest.fixture
def subject(served: Deployed) -> Subject:
    scale(served.kube, 2)
    _, tokens = ask_for_paris(served.chat)
    return Subject(served, tokens, served.chat.ask(STORY, max_tokens=tokens))


def streams(subject: Subject, count: int) -> list[Stream]:
    """Return streams that have begun."""
    opened = [subject.deployed.chat.stream(STORY, max_tokens=subject.tokens) for _ in range(count)]
    for stream in opened:
        assert stream.begun.wait(PATIENCE_SECONDS)
        assert stream.error is None, stream.error
    return opened


def signals_done(kube: Kubectl, engine: str, signal: str) -> int:
    text = kube("get", "--raw", f"/api/v1/namespaces/{kube.namespace}/pods/{engine}-0:8080/proxy/metrics")
    found = re.search(rf'^megatron_engine_signals_total{{signal="{signal}"}} (\S+)$', text, re.MULTILINE)
    assert found is not None, text
    return int(float(found[1]))


def kill(kube: Kubectl, *selector: str) -> None:
    """Kill pods with SIGKILL."""
    kube("delete", "pod", *selector, "--grace-period=0", "--force")


def test_an_engine_killed_under_load_loses_no_request(subject: Subject) -> None:
    opened = streams(subject, 6)
    kill(subject.deployed.kube, "demo-engine-1-0")
    assert [stream.wait() for stream in opened] == [subject.story] * 6


@long
def test_an_operator_killed_during_a_verb_completes_it_once(platform: Platform, subject: Subject) -> None:
    kube = subject.deployed.kube
    scale(kube, 1)
    before = signals_done(kube, "demo-engine-0", "PAUSE")
    (stream,) = streams(subject, 1)
    system = platform.kube.in_namespace(installation.OPERATOR_NAMESPACE)
    kube.patch_spec("demo", desiredState="Paused")
    kill(system, "-l", f"app.kubernetes.io/instance={installation.RELEASE}")
    status = kube.wait_state("demo", "Paused")
    assert status["lifecycle"]["phase"] == "Confirmed"
    assert signals_done(kube, "demo-engine-0", "PAUSE") == before + 1
    kube.patch_spec("demo", desiredState="Running")
    kube.wait_state("demo", "Running")
    assert stream.wait() == subject.story


@long
def test_a_coordinator_killed_under_load_loses_no_request(subject: Subject) -> None:
    opened = streams(subject, 4)
    kill(subject.deployed.kube, "-l", "app.kubernetes.io/instance=demo,app.kubernetes.io/component=coordinator")
    assert [stream.wait() for stream in opened] == [subject.story] * 4


@long
def test_an_engine_pod_is_evicted_while_paused(subject: Subject) -> None:
    kube = subject.deployed.kube
    scale(kube, 1)
    (stream,) = streams(subject, 1)
    kube.patch_spec("demo", desiredState="Paused")
    kube.wait_state("demo", "Paused")
    kube("delete", "pod", "demo-engine-0-0")
    kube.wait("pod/demo-engine-0-0", "condition=Ready")
    assert not stream.finished.is_set()
    kube.patch_spec("demo", desiredState="Running")
    kube.wait_state("demo", "Running")
    assert stream.wait() == subject.story
