"""Runs the demo on a cluster with the operator: applies a custom resource, sends requests, and executes every verb.

Each step is checked. A failed check raises CheckError.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from localcluster.kubectl import PATIENCE_SECONDS, Kubectl
from localcluster.progress import Steps
from megatron_runtime.protocol import strict_json as json

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
STORY = [{"role": "user", "content": "Tell me a long story about a lighthouse keeper."}]
MAX_STORY_TOKENS, MIN_STORY_TOKENS = 640, 64
STORY_SECONDS = 10.0
"""Approximate duration of the streamed story during which the demo pauses, suspends or kills the engine."""
FROZEN_SECONDS = 2.0
ENGINE_METRICS_PORT = 8080


class CheckError(AssertionError):
    """A check of the demo failed."""


def check(holds: bool, what: str) -> None:
    if not holds:
        raise CheckError(what)


@dataclass
class Stream:
    """A streamed chat answer, read in a separate thread."""

    text: str = ""
    chunks: int = 0
    last_at: float = 0.0
    error: Exception | None = None
    finished: threading.Event = field(default_factory=threading.Event)
    begun: threading.Event = field(default_factory=threading.Event)

    def wait(self, seconds: float = PATIENCE_SECONDS) -> str:
        check(self.finished.wait(seconds), f"the stream did not end within {seconds:g} s: {self.text!r}")
        if self.error is not None:
            raise CheckError(f"the stream broke: {self.error}") from self.error
        return self.text

    def at_rest(self) -> int:
        """Wait until no chunk has arrived for one second, and return the number of chunks.

        Call this method when the custom resource is paused, because the last chunks of the answer may arrive after
        the pause.
        """
        before = -1
        while self.chunks != before:
            before = self.chunks
            time.sleep(1.0)
        return before


def reachable(url: str, *, seconds: float = PATIENCE_SECONDS) -> str:
    """Wait until `url` answers, and return `url`.

    kube-proxy adds a pod to a Service a moment after the pod is ready. Until kube-proxy has added a pod, every
    connection fails.
    """
    until = time.monotonic() + seconds
    while True:
        try:
            httpx.get(f"{url}/readyz", timeout=10)
            return url
        except httpx.TransportError as error:
            check(time.monotonic() < until, f"{url} cannot be reached within {seconds:g} s: {error}")
        time.sleep(0.1)


class Chat:
    """A minimal client of the OpenAI API."""

    def __init__(self, url: str, model: str) -> None:
        self.url = url
        self.model = model

    def ask(self, messages: list[dict[str, str]], *, max_tokens: int = 32, timeout: float = PATIENCE_SECONDS) -> str:
        answer = httpx.post(self._path, json=self._body(messages, max_tokens), timeout=timeout)
        check(answer.status_code == 200, f"HTTP {answer.status_code}: {answer.text}")
        return str(answer.json()["choices"][0]["message"]["content"])

    def status_of(self, messages: list[dict[str, str]]) -> int:
        """Return the HTTP status of the answer to a chat request."""
        return httpx.post(self._path, json=self._body(messages, 8), timeout=PATIENCE_SECONDS).status_code

    def stream(self, messages: list[dict[str, str]], *, max_tokens: int) -> Stream:
        stream = Stream()
        threading.Thread(target=self._read, args=(stream, messages, max_tokens), daemon=True).start()
        return stream

    @property
    def _path(self) -> str:
        return f"{self.url}/v1/chat/completions"

    def _body(self, messages: list[dict[str, str]], max_tokens: int) -> dict[str, object]:
        return {"model": self.model, "messages": messages, "max_tokens": max_tokens, "temperature": 0}

    def _read(self, stream: Stream, messages: list[dict[str, str]], max_tokens: int) -> None:
        body = {**self._body(messages, max_tokens), "stream": True}
        try:
            with httpx.stream("POST", self._path, json=body, timeout=PATIENCE_SECONDS) as answer:
                if answer.status_code != 200:
                    raise CheckError(f"HTTP {answer.status_code}: {answer.read().decode()}")
                for line in answer.iter_lines():
                    if line.startswith("data: ") and line != "data: [DONE]":
                        self._take(stream, json.loads(line[6:]))
        except Exception as error:
            stream.error = error
        finally:
            stream.begun.set()
            stream.finished.set()

    @staticmethod
    def _take(stream: Stream, chunk: dict[str, object]) -> None:
        if "error" in chunk:
            raise CheckError(f"the stream carried an error: {chunk['error']}")
        for choice in chunk["choices"]:  # type: ignore[attr-defined]
            piece = choice["delta"].get("content") or ""
            if piece:
                stream.text += piece
                stream.chunks += 1
                stream.last_at = time.monotonic()
                stream.begun.set()


def ask_for_paris(chat: Chat) -> tuple[str, int]:
    """Ask a question. Return the answer, and the number of tokens that the engines generate in about STORY_SECONDS."""
    began = time.monotonic()
    answer = chat.ask(QUESTION)
    check("Paris" in answer, f"the answer for the capital of France is {answer!r}")
    pace = len(answer.split()) / (time.monotonic() - began)
    return answer, min(MAX_STORY_TOKENS, max(MIN_STORY_TOKENS, int(pace * STORY_SECONDS)))


@dataclass(frozen=True)
class Walkthrough:
    """A demo that takes one custom resource through its lifecycle, from apply to delete.

    reach: returns the URL at which this machine reaches a Service of the namespace.
    """

    kube: Kubectl
    steps: Steps
    sample: Path
    name: str
    reach: Callable[[str], str]

    def run(self) -> None:
        with self._step(f"kubectl apply -f {self.sample}: Ready") as say:
            self.kube("apply", "-f", str(self.sample))
            self.kube.wait(f"mi/{self.name}", "condition=Ready")
            say(str(self.kube("get", "mi", self.name, "--no-headers")).strip())
        chat = Chat(reachable(self.reach(self.name)), self.kube.json("mi", self.name)["status"]["model"])
        with self._step("chat completion through the Service") as say:
            answer, tokens = ask_for_paris(chat)
            say(answer)
        with self._step("an undisturbed story, as the yardstick") as say:
            story = chat.ask(STORY, max_tokens=tokens)
            say(f"{tokens} tokens")
        self._pause(chat, story, tokens)
        self._suspend(chat, story, tokens)
        self._scale(chat)
        self._stop(chat)

    def _pause(self, chat: Chat, story: str, tokens: int) -> None:
        with self._step("patch desiredState: Paused, in the middle of a stream"):
            stream = chat.stream(STORY, max_tokens=tokens)
            check(stream.begun.wait(PATIENCE_SECONDS), "the stream did not begin")
            self._patch("Paused")
        with self._step(f"the stream pauses for {FROZEN_SECONDS:g} s, a new request waits") as say:
            waiting = chat.stream(QUESTION, max_tokens=16)
            before = stream.at_rest()
            check(not stream.finished.wait(FROZEN_SECONDS), "the stream ended while paused")
            check(stream.chunks == before, f"{stream.chunks - before} pieces came while paused")
            check(not waiting.begun.is_set(), "a new request was answered while paused")
            say(f"{before} pieces so far")
        with self._step("patch desiredState: Running; both complete, the story without a difference"):
            self._patch("Running")
            check(stream.wait() == story, f"the story changed: {stream.text!r} instead of {story!r}")
            check("Paris" in waiting.wait(), f"the waiting request got {waiting.text!r}")

    def _suspend(self, chat: Chat, story: str, tokens: int) -> None:
        with self._step("patch desiredState: Suspended, in the middle of a stream: memory is released") as say:
            stream = chat.stream(STORY, max_tokens=tokens)
            check(stream.begun.wait(PATIENCE_SECONDS), "the stream did not begin")
            before = self._resident_mib()
            self._patch("Suspended")
            after = self._resident_mib()
            check(after < before - 300, f"resident memory of the engine went from {before} to {after} MiB only")
            say(f"engine {before} -> {after} MiB")
        with self._step("patch desiredState: Running; the stream continues and completes with the same text"):
            self._patch("Running")
            check(stream.wait() == story, f"the story changed: {stream.text!r} instead of {story!r}")

    def _scale(self, chat: Chat) -> None:
        with self._step("kubectl scale --replicas=2: a second engine shares the load") as say:
            self.kube("scale", "mi", self.name, "--replicas=2")
            self.kube.wait(f"mi/{self.name}", "jsonpath={.status.readyReplicas}=2")
            self.kube.wait(f"mi/{self.name}", "condition=Ready")
            streams = [chat.stream(STORY, max_tokens=24) for _ in range(4)]
            for stream in streams:
                stream.wait()
            tokens = [self._metric(engine, "megatron_generation_tokens_total") for engine in range(2)]
            check(min(tokens) > 0, f"tokens generated per engine: {tokens}")
            say(f"tokens per engine {[int(count) for count in tokens]}")

    def _stop(self, chat: Chat) -> None:
        with self._step("patch desiredState: Stopped; no engine pod is left, requests get 503") as say:
            self._patch("Stopped")
            selector = f"app.kubernetes.io/instance={self.name},app.kubernetes.io/component=engine"
            pods = self.kube.json("pods", "-l", selector)["items"]
            check(not pods, f"{len(pods)} engine pods are left")
            status = chat.status_of(QUESTION)
            check(status == 503, f"a request to a stopped model got HTTP {status}")
            say(f"HTTP {status}")
        with self._step("patch desiredState: Running; it answers again") as say:
            self._patch("Running")
            self.kube.wait(f"mi/{self.name}", "condition=Ready")
            say(ask_for_paris(chat)[0])

    def _patch(self, state: str) -> None:
        self.kube.patch_spec(self.name, desiredState=state)
        self.kube.wait_state(self.name, state)

    def _resident_mib(self) -> int:
        return int(self._metric(0, "process_resident_memory_bytes")) >> 20

    def _metric(self, engine: int, name: str) -> float:
        """Return a metric of an engine's first pod, read through the API server."""
        pod = f"{self.name}-engine-{engine}-0:{ENGINE_METRICS_PORT}"
        text = self.kube("get", "--raw", f"/api/v1/namespaces/{self.kube.namespace}/pods/{pod}/proxy/metrics")
        match = re.search(rf"^{name} (\S+)$", text, re.MULTILINE)
        check(match is not None, f"{pod} has no metric {name}")
        assert match is not None
        return float(match[1])

    @contextmanager
    def _step(self, title: str) -> Iterator[Callable[[str], None]]:
        with self.steps.step(title) as step:
            yield step.note
