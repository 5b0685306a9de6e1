"""LoRA adapters are loaded and unloaded under streaming load, and their requests survive a killed process."""

import asyncio
import random
from pathlib import Path

import pytest
from control_link import ControlLink
from echo_executor import echo_answer
from eventually import LONG_SECONDS
from fleet import Fleet, Load, Process, until_serving, until_status
from soak import size

from megatron_runtime.client.rejection import AdapterNotFoundError
from megatron_runtime.megatron_core.inference_client import InferenceClient
from megatron_runtime.protocol.adapters import Adapter, AdapterList
from megatron_runtime.protocol.headers import ErrorCode, Header
from megatron_runtime.protocol.messages import ControlAck
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.transport.control_calls import ControlRejectedError

ENGINE_OPTIONS = ("--max-requests", "200", "--echo-step-seconds", "0.02", "--kv-cache-memory", "16Mi")
STREAMS = size(24, soak=60)
SQL, CHAT = Adapter("sql", "hf:org/sql"), Adapter("chat", "hf:org/chat")

pytestmark = pytest.mark.timeout(400)


class Pool:
    """A coordinator, three engines and a client, and streams whose answers depend on their adapters."""

    coordinator: Process
    link: ControlLink
    client: InferenceClient

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.asked: list[Adapter | None] = []
        self._random = random.Random(5)
        self._operations = 0

    async def start(self) -> None:
        self.coordinator, self.link = await self.fleet.serve(3, *ENGINE_OPTIONS)
        self.client = await self.fleet.client()
        self.load = Load([self.client])

    async def set_adapters(self, *adapters: Adapter) -> ControlAck:
        self._operations += 1
        return await self.link.control(
            Header.SET_ADAPTERS,
            operation_id=f"op-{self._operations}",
            fence=1,
            timeout_seconds=LONG_SECONDS,
            adapters=AdapterList(adapters),
        )

    async def until_loaded(self, *adapters: Adapter, engines: int) -> None:
        """Wait until every engine reports the adapters and the client knows them."""
        await until_status(
            self.link,
            lambda status: (
                [(entry.name, entry.engines) for entry in status.adapters or ()]
                == [(adapter.name, engines) for adapter in adapters]
            ),
            what=f"{engines} engines have {[adapter.name for adapter in adapters]}",
        )
        async with asyncio.timeout(LONG_SECONDS):
            while self.client.adapters.adapters != adapters:  # noqa: ASYNC110 - it comes with a heartbeat
                await asyncio.sleep(0.02)

    def stream(self, count: int, *adapters: Adapter | None) -> None:
        for number in range(count):
            adapter = adapters[number % len(adapters)]
            prompt = [len(self.asked) + 1, *self._random.choices(range(50_000), k=7)]
            self.asked.append(adapter)
            self.load.add(prompt, self._random.randint(80, 160), adapter=adapter.name if adapter is not None else "")

    async def check(self) -> None:
        await self.load.finish()
        for record, adapter in zip(self.load.records, self.asked, strict=True):
            record.check(echo_answer(record.prompt, record.length, adapter=adapter))


@pytest.fixture
async def pool(fleet: Fleet) -> Pool:
    pool = Pool(fleet)
    await pool.start()
    return pool


async def test_adapters_come_and_go_under_streams_and_an_engine_is_killed(pool: Pool) -> None:
    pool.stream(STREAMS, None)
    await pool.load.until(STREAMS)
    ack = await pool.set_adapters(SQL, CHAT)
    assert len(ack.engines) == 3
    await pool.until_loaded(SQL, CHAT, engines=3)
    pool.stream(2 * STREAMS, None, SQL, CHAT)
    await pool.load.until(pool.load.tokens + 6 * STREAMS)
    assert any(record.final is None for record in pool.load.records[STREAMS:])
    await pool.fleet.engines.pop("engine-1").kill()
    await pool.check()
    assert (await pool.coordinator.metrics())["megatron_coordinator_replays_total"] > 0
    await pool.fleet.engine("engine-1", *ENGINE_OPTIONS)
    await until_serving(pool.link, pool.fleet.engines)
    await pool.until_loaded(SQL, CHAT, engines=3)

    pool.stream(STREAMS, SQL, CHAT)
    await pool.load.until(pool.load.tokens + 2 * STREAMS)
    await pool.set_adapters(CHAT)
    with pytest.raises(AdapterNotFoundError):
        await pool.client.add_request([1], SamplingParams(num_tokens_to_generate=2), adapter="sql")
    await pool.check()  # requests that were at an engine end with their adapter
    await pool.until_loaded(CHAT, engines=3)


async def test_the_coordinator_is_killed_with_adapter_requests_in_flight(pool: Pool) -> None:
    await pool.set_adapters(SQL)
    await pool.until_loaded(SQL, engines=3)
    pool.stream(STREAMS, None, SQL)
    await pool.load.until(3 * STREAMS)
    await pool.coordinator.kill()
    pool.coordinator = await pool.fleet.coordinator()
    await pool.check()
    await pool.until_loaded(SQL, engines=3)


async def test_an_adapter_that_engines_cannot_read_changes_nothing(pool: Pool, tmp_path: Path) -> None:
    directory = tmp_path / "adapter"
    directory.mkdir()
    (directory / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    (directory / "adapter_model.safetensors").touch()
    present = Adapter("present", str(directory))
    await pool.set_adapters(present)
    await pool.until_loaded(present, engines=3)
    with pytest.raises(ControlRejectedError, match="adapter 'lost' from /no/such: the directory does not exist") as bad:
        await pool.set_adapters(Adapter("absent", "/none"), present, Adapter("lost", "/no/such"))
    assert bad.value.code == ErrorCode.ENGINE_FAILED
    errors = bad.value.ack.adapter_errors or {}
    assert sorted(errors) == ["absent", "lost"], "every adapter that cannot be loaded is named"
    assert "adapter 'absent' from /none: the directory does not exist" in errors["absent"]
    assert (await pool.link.status()).operations[-1].adapter_errors == errors
    await pool.until_loaded(present, engines=3)

    directory.rename(tmp_path / "elsewhere")
    await pool.fleet.engines.pop("engine-0").kill()
    await pool.fleet.engine("engine-0", *ENGINE_OPTIONS)
    await until_serving(pool.link, pool.fleet.engines)
    await pool.until_loaded(present, engines=2)
    status = await until_status(
        pool.link, lambda status: any(entry.error for entry in status.adapters or ()), what="engine-0 reports the error"
    )
    [entry] = status.adapters or []
    assert entry.error == "engine-0: the directory does not exist: name one that every engine can read"
    pool.stream(20, present, None)
    await pool.check()
    (tmp_path / "elsewhere").rename(directory)
    await pool.set_adapters(present)
    await pool.until_loaded(present, engines=3)
