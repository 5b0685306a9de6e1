"""A program with well-behaved clients that stream answers and measure their waits.

Arguments: URL, API key, model, number of clients. Standard input: a line ends a window. Standard output: one JSON
object for each window, the first as soon as every client streams:

    {"longest_wait": 0.04, "longest_delay": 0.001, "tokens": 412, "answers": 9, "failures": []}

longest_wait:  longest time between two events of one stream, or before its first, in seconds.
longest_delay: longest time for which this machine did not run this program although its timer had fired, in seconds.
A failure is an HTTP error, a truncated stream, or an answer that differs from the first one.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time

import httpx

TOKENS = 60
TICK_SECONDS = 0.01


class Window:
    def __init__(self) -> None:
        self.longest_wait = 0.0
        self.longest_delay = 0.0
        self.tokens = 0
        self.answers = 0
        self.failures: list[str] = []

    def as_json(self) -> str:
        return json.dumps(vars(self))


class Clients:
    def __init__(self, url: str, key: str, model: str) -> None:
        self._url, self._model = f"{url}/v1/completions", model
        self._headers = {"authorization": f"Bearer {key}"}
        self._last_received: dict[int, float] = {}
        self._expected: dict[int, str] = {}
        self.window = Window()

    def end_window(self) -> Window:
        """Return the current window and begin the next. Waits in progress count up to now."""
        now = time.monotonic()
        for heard in self._last_received.values():
            self.window.longest_wait = max(self.window.longest_wait, now - heard)
        window, self.window = self.window, Window()
        return window

    async def watch_machine(self) -> None:
        while True:
            due = time.monotonic() + TICK_SECONDS
            await asyncio.sleep(TICK_SECONDS)
            self.window.longest_delay = max(self.window.longest_delay, time.monotonic() - due)

    async def run(self, number: int, began: asyncio.Event) -> None:
        async with httpx.AsyncClient(timeout=None, headers=self._headers) as http:
            while True:
                try:
                    answer = await self._stream(http, number, began)
                except (httpx.HTTPError, ValueError, KeyError) as error:
                    self.window.failures.append(f"client {number}: {error!r}")
                    await asyncio.sleep(0.1)
                    continue
                if self._expected.setdefault(number, answer) != answer:
                    self.window.failures.append(f"client {number}: the answer differs from the first one")
                self.window.answers += 1

    async def _stream(self, http: httpx.AsyncClient, number: int, began: asyncio.Event) -> str:
        body = {
            "model": self._model,
            "prompt": f"Client {number} asks for a story.",
            "max_tokens": TOKENS,
            "temperature": 0,
            "stream": True,
        }
        pieces = []
        self._last_received[number] = time.monotonic()
        async with http.stream("POST", self._url, json=body) as response:
            if response.status_code != 200:
                text = (await response.aread())[:200]
                raise ValueError(f"HTTP {response.status_code}: {text!r}")
            async for line in response.aiter_lines():
                if not line.startswith("data: "):
                    continue
                now = time.monotonic()
                self.window.longest_wait = max(self.window.longest_wait, now - self._last_received[number])
                self._last_received[number] = now
                if line == "data: [DONE]":
                    return "".join(pieces)
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    raise ValueError(str(event["error"]))
                pieces.append(event["choices"][0]["text"])
                self.window.tokens += 1
                began.set()
        raise ValueError("the stream ended without [DONE]")


async def main(url: str, key: str, model: str, count: str) -> None:
    clients = Clients(url, key, model)
    began = [asyncio.Event() for _ in range(int(count))]
    watching = asyncio.create_task(clients.watch_machine())
    tasks = [asyncio.create_task(clients.run(number, event)) for number, event in enumerate(began)]
    await asyncio.gather(*(event.wait() for event in began))
    print(clients.end_window().as_json(), flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        print(clients.end_window().as_json(), flush=True)
    for task in (watching, *tasks):
        task.cancel()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
