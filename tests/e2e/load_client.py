"""Continuous chat requests while a cluster is disturbed; every answer is compared token by token."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
from eventually import LONG_SECONDS
from machine import scaled
from soak import size

QUESTIONS = (
    "Tell me a story about a lighthouse keeper.",
    "Why is the sky blue?",
    "Count from one to twenty.",
    "What is a coordinator?",
)
PAUSE_SECONDS = size(2.0, soak=0.0)
"""Time of a worker between its requests: other groups of `make test` run on the same CPUs."""


@dataclass(frozen=True)
class Answer:
    """One completed request."""

    began: float
    seconds: float
    longest_gap: float
    """The longest wait for the next token, or for the first; of a whole answer its duration."""
    fault: str = ""
    streamed: bool = False


@dataclass
class Disturbance:
    """A fault, and the answers to the requests that were open meanwhile."""

    what: str
    answers: list[Answer] = field(default_factory=list)

    @property
    def faults(self) -> list[str]:
        return [answer.fault for answer in self.answers if answer.fault]

    @property
    def stall(self) -> float:
        """The longest wait for a token of a stream."""
        return max(answer.longest_gap for answer in self.answers if answer.streamed)

    def row(self) -> str:
        longest = max(answer.longest_gap for answer in self.answers)
        return f"| {self.what} | {len(self.answers)} | {len(self.faults)} | {longest:.1f} s | {self.stall:.1f} s |"


HEADING = "| disturbance | requests | failed | longest wait | in a stream |\n|---|---|---|---|---|"


class LoadClient:
    """Workers that ask one question after another. Each answer of the first one is a stream; of the others every second
    answer is. Use as a context manager.

    url:    address of the server.
    tokens: length of each answer. The expected answers are requested first, undisturbed.
    """

    def __init__(self, url: str, model: str, *, workers: int, tokens: int) -> None:
        self._url, self._model, self._tokens = f"{url}/v1/chat/completions", model, tokens
        self._answers: list[Answer] = []
        self.last_token = 0.0
        """Time, on the monotonic clock, when a stream last got a token."""
        self._grew = threading.Condition()
        self._stop = threading.Event()
        self._expected = {question: self._whole(question) for question in QUESTIONS}
        self._threads = [threading.Thread(target=self._work, args=(number,), daemon=True) for number in range(workers)]

    def __enter__(self) -> LoadClient:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(LONG_SECONDS)

    @contextmanager
    def during(self, what: str) -> Iterator[Disturbance]:
        """Collect the answers to all requests that were open or began in the block."""
        disturbance = Disturbance(what)
        self.answered(len(self._threads))
        began = time.monotonic()
        yield disturbance
        ended = time.monotonic()
        # Requests that are open now count too: wait until each worker has begun another one.
        with self._grew:
            self._grew.wait_for(lambda: self._begun_since(ended) >= len(self._threads), timeout=LONG_SECONDS)
            disturbance.answers = [
                answer for answer in self._answers if answer.began + answer.seconds >= began and answer.began <= ended
            ]

    def answered(self, count: int, *, seconds: float = 180) -> None:
        """Wait for `count` more answers, for scaled(seconds) at most."""
        with self._grew:
            wanted = len(self._answers) + count
            is_so = self._grew.wait_for(lambda: len(self._answers) >= wanted, timeout=scaled(seconds))
            assert is_so, "requests are stalled"

    def _begun_since(self, moment: float) -> int:
        return sum(answer.began > moment for answer in self._answers)

    def _work(self, number: int) -> None:
        asked = number
        while not self._stop.is_set():
            question = QUESTIONS[asked % len(QUESTIONS)]
            answer = self._ask(question, stream=number == 0 or asked % 2 == 0)
            with self._grew:
                self._answers.append(answer)
                self._grew.notify_all()
            asked += 1
            self._stop.wait(PAUSE_SECONDS)

    def _ask(self, question: str, *, stream: bool) -> Answer:
        began = last = time.monotonic()
        gap, text, fault = 0.0, "", ""
        try:
            if stream:
                for piece in self._pieces(question):
                    now = self.last_token = time.monotonic()
                    gap, last, text = max(gap, now - last), now, text + piece
            else:
                text = self._whole(question)
            if text != self._expected[question]:
                fault = f"{question!r} was answered {text!r} instead of {self._expected[question]!r}"
        except (httpx.HTTPError, RuntimeError, ValueError) as error:
            fault = f"{question!r}, stream={stream}, after {time.monotonic() - began:.1f} s: {error!r}"
        seconds = time.monotonic() - began
        return Answer(began, seconds, max(gap, time.monotonic() - last) if stream else seconds, fault, stream)

    def _body(self, question: str) -> dict[str, Any]:
        message = {"role": "user", "content": question}
        return {"model": self._model, "messages": [message], "max_tokens": self._tokens, "temperature": 0}

    def _whole(self, question: str) -> str:
        answer = httpx.post(self._url, json=self._body(question), timeout=LONG_SECONDS)
        if answer.status_code != 200:
            raise RuntimeError(f"HTTP {answer.status_code}: {answer.text}")
        return str(answer.json()["choices"][0]["message"]["content"])

    def _pieces(self, question: str) -> Iterator[str]:
        body, done = {**self._body(question), "stream": True}, False
        with httpx.stream("POST", self._url, json=body, timeout=LONG_SECONDS) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"HTTP {answer.status_code}: {answer.read().decode()}")
            for line in answer.iter_lines():
                done = done or line == "data: [DONE]"
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                chunk = json.loads(line.removeprefix("data: "))
                if "error" in chunk:
                    raise RuntimeError(f"the stream carried an error: {chunk['error']}")
                yield from (choice["delta"].get("content") or "" for choice in chunk["choices"])
        if not done:
            raise RuntimeError("the stream ended without [DONE]")
