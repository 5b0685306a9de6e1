"""Clients that are killed, that do not read, and many clients at once."""

import asyncio
import random
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import zmq
from echo_executor import echo_answer
from eventually import LONG_SECONDS, eventually
from fleet import Fleet, Load, until_serving, until_status
from libzmq_keys import set_keys
from soak import repeated, size

from megatron_runtime.protocol.headers import Role
from megatron_runtime.protocol.messages import Final, Heartbeat, Hello, Partial, RequestMeta, Submit, decode, pack
from megatron_runtime.requests.sampling_params import SamplingParams

ENGINE_OPTIONS = ("--max-requests", "400", "--echo-step-seconds", "0.01", "--kv-cache-memory", "16Mi")
UNREAD_TOKENS = size(200, soak=500)

pytestmark = pytest.mark.timeout(300)


@repeated()
async def test_requests_of_a_killed_client_are_aborted_and_their_blocks_freed(fleet: Fleet, seed: int) -> None:
    await fleet.coordinator()
    engine = await fleet.engine("engine-0", *ENGINE_OPTIONS)
    link = await fleet.admin()
    await until_serving(link, fleet.engines)
    arguments = (str(fleet.client_port), str(fleet.keys_dir), "100", "4000")
    vanishing = await fleet.run_python(Path(__file__).with_name("killed_client.py"), *arguments)
    assert vanishing.stdout is not None
    assert await asyncio.wait_for(vanishing.stdout.readline(), LONG_SECONDS) == b"started\n"
    assert (await engine.metrics())["megatron_kv_cache_usage_perc"] > 0, "its streams have begun"
    staying = Load([await fleet.client()])
    for number in range(20):
        staying.add([seed, number], size(200, soak=600))
    vanishing.kill()
    await until_status(link, lambda status: status.in_flight <= 20, what="its requests are aborted")
    await staying.check()

    async def freed() -> bool:
        metrics = await engine.metrics()
        return metrics["megatron_kv_cache_usage_perc"] == metrics["megatron_num_requests_running"] == 0

    await eventually(freed, what="the engine has freed all KV blocks")


class LazyReader:
    """A client that submits requests, sends heartbeats, and reads nothing before read_all()."""

    def __init__(self, fleet: Fleet) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.RCVHWM, 1)
        self.socket.setsockopt(zmq.RCVBUF, 4096)
        set_keys(self.socket, fleet.keys(Role.CLIENT))
        self.socket.connect(f"tcp://127.0.0.1:{fleet.client_port}")
        self.socket.send_multipart(Hello(role=Role.CLIENT, name="lazy", incarnation=1).to_frames())
        self._beating = asyncio.create_task(self._beat())
        self.prompts: dict[bytes, list[int]] = {}

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(0.5)
            self.socket.send_multipart(Heartbeat(incarnation=1).to_frames())

    def submit(self, prompt: list[int], length: int) -> None:
        uid = random.randbytes(16)
        self.prompts[uid] = prompt
        params = pack(SamplingParams(num_tokens_to_generate=length).serialize())
        body = b"".join(token.to_bytes(4, "little") for token in prompt)
        self.socket.send_multipart(Submit(uid, RequestMeta(streaming=True, seed=1), body, b"", params).to_frames())

    async def read_all(self) -> tuple[dict[bytes, list[int]], dict[bytes, list[int]]]:
        """Wait for all finals. Return streamed tokens and final tokens by uid."""
        streamed: dict[bytes, list[int]] = {uid: [] for uid in self.prompts}
        finals: dict[bytes, list[int]] = {}
        while len(finals) < len(self.prompts):
            if not self.socket.poll(0):
                await asyncio.sleep(0.01)
                continue
            message = decode(self.socket.recv_multipart())
            if isinstance(message, Partial):
                position = 0
                for entry in message.entries:
                    assert entry.offset == len(streamed[entry.uid])
                    tokens = memoryview(message.tokens).cast("i")[position : position + entry.count]
                    streamed[entry.uid] += tokens.tolist()
                    position += entry.count
            elif isinstance(message, Final):
                finals[message.uid] = memoryview(message.tokens).cast("i").tolist()
        return streamed, finals

    async def close(self) -> None:
        self._beating.cancel()
        await asyncio.wait([self._beating])
        self._context.destroy(linger=0)


@repeated(soak=3)
async def test_a_client_that_does_not_read_affects_no_other_and_receives_everything_later(
    fleet: Fleet, seed: int, report: Callable[[str], None]
) -> None:
    coordinator, link = await fleet.serve(1, *ENGINE_OPTIONS)
    memory = psutil.Process(coordinator.pid).memory_info
    lazy = LazyReader(fleet)
    try:
        before = memory().rss
        for number in range(200):
            lazy.submit([seed, number], UNREAD_TOKENS)
        others = Load([await fleet.client()])
        for number in range(150):
            others.add([number, seed], size(100, soak=300))
        await others.check()
        await until_status(link, lambda status: status.in_flight == 0, what="all requests are complete")
        grown = (memory().rss - before) / (1 << 20)
        report(f"200 streams of {UNREAD_TOKENS} tokens unread: coordinator grew by {grown:.1f} MiB")
        assert grown < 200
        streamed, finals = await asyncio.wait_for(lazy.read_all(), LONG_SECONDS)
        for uid, prompt in lazy.prompts.items():
            assert finals[uid] == echo_answer(prompt, UNREAD_TOKENS)
            assert streamed[uid] == finals[uid][: len(streamed[uid])]
    finally:
        await lazy.close()


@repeated(soak=5)
async def test_ten_clients_with_many_requests_each_at_once(
    fleet: Fleet, seed: int, report: Callable[[str], None]
) -> None:
    coordinator, link = await fleet.serve(3, "--max-requests", size("250", soak="500"), "--kv-cache-memory", "16Mi")
    clients = [await fleet.client() for _ in range(10)]
    prompts = [[client, number, seed] for number in range(size(100, soak=1000)) for client in range(10)]
    params = SamplingParams(num_tokens_to_generate=4)
    futures = [clients[prompt[0]].add_request(prompt, params) for prompt in prompts]
    answers = await asyncio.wait_for(asyncio.gather(*futures), 2 * LONG_SECONDS)
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["generated_tokens"] == echo_answer(prompt, 4)
    status = await link.status()
    assert (status.queued, status.in_flight) == (0, 0)
    metrics = await coordinator.metrics()
    assert metrics["megatron_coordinator_completed_requests_total"] == len(prompts)
    assert metrics["megatron_coordinator_journal_bytes"] == 0
    report(f"{len(prompts):,} requests at once: slowest {max(answer['latency'] for answer in answers):.2f} s")
