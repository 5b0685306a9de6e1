"""Requests that attempt to crash engines, against two engines on the node, while other clients stream."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from localcluster import installation
from localcluster.kubectl import PATIENCE_SECONDS, Kubectl
from localcluster.progress import Steps
from localcluster.walkthrough import STORY, Stream

from .conftest import Deployed, Platform, deploy, own_namespace, printed_when_failed

POISON_TOKEN = 666
STORY_TOKENS = 200
MOST_EXITS = 3
"""The request is replayed after the first two crashes and fails after the third."""

ECHO = [
    {"name": "MEGATRON_ENGINE_BACKEND", "value": "echo"},
    {"name": "MEGATRON_ENGINE_FAULTS", "value": f"crash-on-token:token={POISON_TOKEN} slow-step:seconds=0.05"},
]


@dataclass(frozen=True)
class Subject:
    deployed: Deployed
    story: str
    """Its undisturbed answer."""

    @property
    def kube(self) -> Kubectl:
        return self.deployed.kube

    def streams(self, count: int) -> list[Stream]:
        """Return streams that have begun."""
        opened = [self.deployed.chat.stream(STORY, max_tokens=STORY_TOKENS) for _ in range(count)]
        for stream in opened:
            assert stream.begun.wait(PATIENCE_SECONDS)
            assert stream.error is None, stream.error
        return opened

    def complete(self, **fields: Any) -> httpx.Response:
        chat = self.deployed.chat
        body = {"model": chat.model, "prompt": "Hello", "max_tokens": 8, **fields}
        return httpx.post(f"{chat.url}/v1/completions", json=body, timeout=PATIENCE_SECONDS)

    def exits(self) -> int:
        """Return the number of restarts of all engine containers."""
        pods = self.kube.json("pods", "-l", "app.kubernetes.io/component=engine")["items"]
        return sum(status["restartCount"] for pod in pods for status in pod["status"]["containerStatuses"])


@pytest.fixture(scope="module")
def subject(platform: Platform) -> Iterator[Subject]:
    # The operator sets these variables itself, unless an administrator allows them.
    allowed = f"podPolicy.environment={{{','.join(entry['name'] for entry in ECHO)}}}"
    installation.install_operator(platform.kube, platform.helm, Steps(), values=[allowed])
    with own_namespace(platform) as kube:
        template = {"containers": [{"name": "engine", "env": ECHO}]}
        engine = {
            "batching": {"kvCacheMemory": "64Mi", "maxRequests": 16},
            "startupSeconds": 300,
            "podTemplate": {"spec": template},
        }
        deployed = deploy(kube, replicas=2, engine=engine)
        yield Subject(deployed, deployed.chat.ask(STORY, max_tokens=STORY_TOKENS))
    installation.install_operator(platform.kube, platform.helm, Steps())


@pytest.fixture(autouse=True)
def state_when_failed(platform: Platform, subject: Subject, request: pytest.FixtureRequest) -> Iterator[None]:
    with printed_when_failed(platform, subject.kube, request):
        yield


def test_grammars_that_overflow_a_stack_crash_no_engine(subject: Subject) -> None:
    before = subject.exits()
    opened = subject.streams(4)
    rules = ["start: r0", *(f"r{number}: r{number + 1}" for number in range(2800)), 'r2800: "a"']
    definitions: dict[str, Any] = {f"d{number}": {"$ref": f"#/$defs/d{number + 1}"} for number in range(1200)}
    definitions["d1200"] = {"type": "integer"}
    schema = {"$ref": "#/$defs/d0", "$defs": definitions}
    for fields in ({"guided_grammar": "\n".join(rules)}, {"guided_json": schema}):
        answer = subject.complete(**fields)
        assert answer.status_code == 400, answer.text
    assert [stream.wait() for stream in opened] == [subject.story] * 4
    assert subject.exits() == before


def test_a_poison_request_fails_and_is_named_in_the_status(subject: Subject) -> None:
    before = subject.exits()
    opened = subject.streams(6)
    answer = subject.complete(prompt=[POISON_TOKEN])
    assert answer.status_code == 500, answer.text
    assert answer.json()["error"]["code"] == "engine_failed"
    assert [stream.wait() for stream in opened] == [subject.story] * 6
    kube = subject.kube
    kube.wait("mi/demo", "condition=Ready")
    assert subject.exits() - before <= MOST_EXITS
    (failed,) = kube.json("mi", "demo")["status"]["failedRequests"]
    assert failed["id"] in answer.json()["error"]["message"]
    (event,) = [event for event in kube.events("demo") if failed["id"] in json.dumps(event)]
    assert event["type"] == "Warning"
