"""`megatron bench serve`: measures a running server in a closed loop."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import httpx
import uvloop

from megatron_runtime.cli.api_client import (
    ApiClient,
    EventReader,
    StreamFormatError,
    connection_options,
    readable_failures,
    terminal_text,
)
from megatron_runtime.cli.bench.report import Figure, json_file, percentiles, report
from megatron_runtime.cli.options import COUNT, COUNTS
from megatron_runtime.process.environment import http_client

_DROPPED = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)
_RETRIES = 3
WORDS = ("river", "stone", "engine", "light", "paper", "garden", "signal", "copper", "window", "silver", "forest")


@dataclass(slots=True)
class Answers:
    """The measurements of all clients in one run.

    first:    seconds from each request to the first token of its answer.
    between:  seconds between consecutive chunks after the first token.
    tokens:   number of generated tokens, as reported by the server.
    retries:  number of requests that were sent again because the server closed the connection before the answer began.
    duration: seconds from the first request to the last answer.
    """

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    tokens: int = 0
    retries: int = 0
    duration: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.tokens / self.duration


def run(*, concurrency: tuple[int, ...], **options: Any) -> list[Figure]:
    """Run the benchmark once for each number of clients in `concurrency`, and return the figures.

    options: options of `megatron bench serve`, and the API key.

    Raises the errors of measure().
    """
    return [figure for clients in concurrency for figure in _figures(clients, measure(clients, **options))]


def measure(clients: int, **options: Any) -> Answers:
    """Run a closed loop of `clients` concurrent clients, and return their measurements.

    options: options of `megatron bench serve`, and the API key. For a route other than /v1/completions, pass two more
             options. `path` is the path of the route. `prompt` converts a text to the fields of the request body that
             contain the prompt.

    Raises httpx.HTTPError, StreamFormatError, StreamFailedError, and ClickException if the server rejects a request.
    """
    # The load generator shares the machine with the server. uvloop reduces the generator's CPU time per token by a
    # quarter.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_measure(clients, **options))


async def _measure(
    clients: int,
    *,
    url: str,
    model: str,
    api_key: str | None,
    requests: int,
    prompt_words: int,
    new_tokens: int,
    seed: int = 0,
    path: str = "/v1/completions",
    prompt: Callable[[str], dict[str, Any]] = lambda text: {"prompt": text},
) -> Answers:
    # Each request opens its own connection, because servers differ in how long they keep an idle connection.
    headers = {"Connection": "close", **({} if api_key is None else {"Authorization": f"Bearer {api_key}"})}
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=0)
    rng = random.Random(f"{seed} {clients}")
    bodies = [
        {
            "model": model,
            **prompt(" ".join(rng.choices(WORDS, k=prompt_words))),
            "max_tokens": new_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        for _ in range(max(requests, 2 * clients) + 1)
    ]
    warm_up = Answers()
    timeout = httpx.Timeout(30, read=None)
    async with http_client(httpx.AsyncClient, url, headers=headers, limits=limits, timeout=timeout) as http:
        await _request(http, url + path, bodies.pop(), warm_up)
        answers = Answers(retries=warm_up.retries)

        async def client() -> None:
            while bodies:
                await _request(http, url + path, bodies.pop(), answers)

        begun = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        answers.duration = time.perf_counter() - begun
    return answers


def _figures(clients: int, answers: Answers) -> list[Figure]:
    key, what = f"c{clients}", f"{clients} clients"
    figures = [
        Figure(f"{key}_tokens_per_s", f"{what}: generated", answers.tokens_per_second, "tokens/s"),
        Figure(f"{key}_retries", f"{what}: dropped unanswered, sent again", answers.retries, "requests"),
    ]
    for name, seconds in (("ttft", answers.first), ("itl", answers.between)):
        if seconds:
            figures += percentiles(f"{key}_{name}", f"{what}: {name.upper()}", seconds)
    return figures


async def _request(http: httpx.AsyncClient, url: str, body: dict[str, Any], answers: Answers) -> None:
    """Send a streaming request to `url` and add its measurements to `answers`."""
    last, waiting = time.perf_counter(), True
    async with contextlib.aclosing(await _send(http, url, body, answers)) as reply:
        if reply.status_code != 200:
            shown = terminal_text((await anext(reply.aiter_raw(), b""))[:200].decode(errors="replace"))
            raise click.ClickException(f"{url} answered {reply.status_code}: {shown}")
        events = EventReader()
        async for data in reply.aiter_raw():
            for event in events.feed(data):
                usage = event.get("usage") or {}
                tokens = usage.get("completion_tokens", 0) if isinstance(usage, dict) else None
                if type(tokens) is not int:
                    raise StreamFormatError(f"the usage of an event is {usage!r:.80}")
                answers.tokens += tokens
                if event.get("choices"):
                    now = time.perf_counter()
                    (answers.first if waiting else answers.between).append(now - last)
                    last, waiting = now, False


async def _send(http: httpx.AsyncClient, url: str, body: dict[str, Any], answers: Answers) -> httpx.Response:
    """Send a request and return the reply when its headers have arrived.

    If the connection closes before the headers arrive, send the request again.
    """
    for _ in range(_RETRIES):
        with contextlib.suppress(*_DROPPED):
            return await http.send(http.build_request("POST", url, json=body), stream=True)
        answers.retries += 1
    return await http.send(http.build_request("POST", url, json=body), stream=True)


@click.command()
@connection_options
@click.option(
    "--concurrency",
    type=COUNTS,
    default="1,8,32",
    help="Numbers of concurrent clients to measure, one run per number.",
)
@click.option(
    "--requests",
    type=COUNT,
    default=32,
    help="Number of requests per run. The command sends at least two requests per client.",
)
@click.option("--prompt-words", type=COUNT, default=64, help="Number of words per prompt.")
@click.option("--new-tokens", type=COUNT, default=64, help="Number of tokens per answer. Answers do not end early.")
@click.option("--seed", type=int, default=0, help="Random seed for the prompts.")
@json_file
def serve(*, json_file: Path | None, url: str, model: str | None, api_key: str | None, **values: Any) -> None:
    """Measure a running server. Each client waits for an answer before it sends its next request."""
    model = model or ApiClient(url, api_key=api_key).first_model()
    options = {"url": url.rstrip("/").removesuffix("/v1"), "model": model, **values}
    with readable_failures(url):
        figures = run(api_key=api_key, **options)
    report("serve", f"Server at {options['url']}, {model}", options, figures, json_file)
