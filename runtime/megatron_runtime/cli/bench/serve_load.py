"""The load of `megatron bench serve`: clients that each wait for their answer before they ask again."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import click
import httpx
import uvloop

from megatron_runtime.cli.bench.report import Figure, percentile
from megatron_runtime.cli.event_stream import EventReader, StreamFailedError, StreamFormatError, terminal_text

_DROPPED = (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError)
_RETRIES = 3
WORDS = ("river", "stone", "engine", "light", "paper", "garden", "signal", "copper", "window", "silver", "forest")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """concurrency: clients at once, each number a run of `requests` requests (at least two for each client).

    seed: of the prompts: no two runs of different seeds ask the same.
    """

    url: str
    model: str
    api_key: str | None
    concurrency: tuple[int, ...]
    requests: int
    prompt_words: int
    new_tokens: int
    seed: int = 0


@dataclass(slots=True)
class _Answers:
    """What came back: seconds to each first token, seconds between later chunks, tokens by the server's own count.

    retries: requests that were sent again, as the server closed the connection before it answered.
    """

    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    tokens: int = 0
    retries: int = 0


def run(options: LoadOptions) -> list[Figure]:
    # The load shares the machine with what it measures: a token takes a quarter less of uvloop than of asyncio's own.
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(_run(options))


async def _run(options: LoadOptions) -> list[Figure]:
    figures: list[Figure] = []
    for clients in options.concurrency:
        figures += await _run_one(options, clients)
    return figures


async def _run_one(options: LoadOptions, clients: int) -> list[Figure]:
    # Each request has a connection of its own: servers differ in how long they keep one that is not used, and in how
    # many requests they take on it.
    headers = {"Connection": "close"}
    if options.api_key is not None:
        headers["Authorization"] = f"Bearer {options.api_key}"
    limits = httpx.Limits(max_connections=clients, max_keepalive_connections=0)
    rng = random.Random(f"{options.seed} {clients}")
    answers = _Answers()
    # One more than is measured: what is made at first use, and no server has seen the others.
    count = max(options.requests, 2 * clients) + 1
    prompts = [" ".join(rng.choices(WORDS, k=options.prompt_words)) for _ in range(count)]
    async with httpx.AsyncClient(headers=headers, limits=limits, timeout=httpx.Timeout(30, read=None)) as http:
        unmeasured = _Answers()
        await _ask(http, options, prompts.pop(), unmeasured)
        answers.retries = unmeasured.retries

        async def client() -> None:
            while prompts:
                await _ask(http, options, prompts.pop(), answers)

        begun = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(clients)))
        seconds = time.perf_counter() - begun
    return list(_figures(answers, clients, seconds))


def _figures(answers: _Answers, clients: int, seconds: float) -> Iterator[Figure]:
    who = f"{clients} clients"
    yield Figure(f"c{clients}_tokens_per_s", f"{who}: generated", answers.tokens / seconds, "tokens/s")
    yield Figure(f"c{clients}_retries", f"{who}: dropped unanswered, sent again", answers.retries, "requests")
    for percent in (50, 99):
        first = percentile(answers.first, percent) * 1000
        yield Figure(f"c{clients}_ttft_p{percent}_ms", f"{who}: TTFT, p{percent}", first, "ms")
        if answers.between:
            between = percentile(answers.between, percent) * 1000
            yield Figure(f"c{clients}_itl_p{percent}_ms", f"{who}: ITL, p{percent}", between, "ms")


async def _ask(http: httpx.AsyncClient, options: LoadOptions, prompt: str, answers: _Answers) -> None:
    """One streamed completion of exactly `new_tokens` tokens."""
    body: dict[str, Any] = {
        "model": options.model,
        "prompt": prompt,
        "max_tokens": options.new_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    last = time.perf_counter()
    waiting = True
    async with contextlib.aclosing(await _send(http, f"{options.url}/v1/completions", body, answers)) as reply:
        events = EventReader()
        try:
            async for data in reply.aiter_raw():
                if reply.status_code != 200:
                    shown = terminal_text(data[:200].decode(errors="replace"))
                    raise click.ClickException(f"{options.url} answered {reply.status_code}: {shown}")
                for event in events.feed(data):
                    answers.tokens += _completion_tokens(event)
                    if event.get("choices"):
                        now = time.perf_counter()
                        (answers.first if waiting else answers.between).append(now - last)
                        last, waiting = now, False
        except (StreamFormatError, StreamFailedError) as error:
            raise click.ClickException(f"{options.url}: {error}") from error
        if reply.status_code != 200:
            raise click.ClickException(f"{options.url} answered {reply.status_code}")


def _completion_tokens(event: dict[str, Any]) -> int:
    usage = event.get("usage") or {}
    count = usage.get("completion_tokens", 0) if isinstance(usage, dict) else None
    if type(count) is not int:
        raise StreamFormatError(f"the usage of an event is {usage!r:.80}")
    return count


async def _send(http: httpx.AsyncClient, url: str, body: dict[str, Any], answers: _Answers) -> httpx.Response:
    """The reply as it begins; a request whose connection is closed before that is sent again."""
    for _ in range(_RETRIES):
        with contextlib.suppress(*_DROPPED):
            return await http.send(http.build_request("POST", url, json=body), stream=True)
        answers.retries += 1
    return await http.send(http.build_request("POST", url, json=body), stream=True)
