"""The adapters of one engine: loaded before they are visible, unloaded after their last request, undone on failure."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable

import numpy as np
import pytest
from echo_engine import EchoBackend
from echo_executor import echo_answer
from eventually import LONG_SECONDS

from megatron_runtime.engine.backend import CacheEvents, Capability
from megatron_runtime.engine.engine_request import EngineRequest, RequestOutput
from megatron_runtime.engine.lifecycle import Lifecycle
from megatron_runtime.engine.open_requests import OpenRequests
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.protocol.adapters import Adapter, AdapterList
from megatron_runtime.protocol.headers import ErrorCode, Header
from megatron_runtime.protocol.messages import (
    Control,
    ControlAck,
    ControlCommit,
    Dispatch,
    Exported,
    Prefill,
    RequestMeta,
    decode,
    pack,
    tokens_to_bytes,
)
from megatron_runtime.requests.hashing import block_digests
from megatron_runtime.requests.sampling_params import SamplingParams

from .echo_core import FailingRanks

SETTINGS = EngineSettings(coordinator="tcp://127.0.0.1:1", name="e", kv_cache_memory=1 << 20)
SQL, CHAT, LOST = Adapter("sql", "hf:org/sql"), Adapter("chat", "hf:org/chat"), Adapter("lost", "/no/such/directory")


class Rig:
    """An echo engine and its lifecycle."""

    def __init__(self) -> None:
        self.backend = EchoBackend(SETTINGS)
        self.lifecycle = Lifecycle(self.backend)
        self.adapters = self.lifecycle.adapters
        self.tokens: dict[int, list[int]] = {}

    def on_outputs(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.new_tokens)

    def on_cache_events(self, events: CacheEvents) -> None: ...

    def on_failure(self, cause: BaseException) -> None:
        raise cause

    def on_leave(self) -> None: ...

    async def prepare(self, *adapters: Adapter, operation_id: str = "op", generation: int = 1) -> ControlAck:
        wanted = AdapterList(adapters, generation)
        return await self.lifecycle.handle(
            Control(kind=Header.SET_ADAPTERS, operation_id=operation_id, adapters=wanted)
        )

    @property
    def loaded(self) -> list[Adapter]:
        """The adapters that the backend has, in the order in which they were loaded."""
        found = [Adapter(name.partition("@")[0], source) for name, source in self.backend.adapters.items()]
        assert [adapter.key for adapter in found] == list(self.backend.adapters)
        return found

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(LONG_SECONDS):
            while not condition():  # noqa: ASYNC110 - the engine's thread has no event
                await asyncio.sleep(0.005)

    async def commit(self, operation_id: str = "op") -> None:
        await self.lifecycle.commit(ControlCommit(operation_id=operation_id, signal=Header.SET_ADAPTERS))


@pytest.fixture
async def rig() -> AsyncIterator[Rig]:
    rig = Rig()
    await rig.backend.start(rig)
    yield rig
    await rig.backend.stop()


async def test_an_adapter_is_loaded_in_phase_one_and_visible_from_the_commit_on(rig: Rig) -> None:
    assert (await rig.prepare(SQL)).ok
    assert rig.loaded == [SQL]
    assert rig.adapters.begin("sql") is None
    await rig.commit()
    assert rig.adapters.begin("sql") == SQL
    assert rig.adapters.current == AdapterList((SQL,), generation=1)


async def test_all_adapters_of_a_list_are_loaded_or_none(rig: Rig) -> None:
    await rig.prepare(SQL)
    await rig.commit()
    ack = await rig.prepare(SQL, CHAT, LOST, operation_id="second")
    assert not ack.ok
    assert ack.code is None
    assert "adapter 'lost' from /no/such/directory: the directory does not exist" in (ack.error or "")
    assert rig.loaded == [SQL]
    await rig.commit("second")
    assert rig.adapters.current.adapters == (SQL,)


async def test_a_rank_that_does_not_confirm_undoes_the_load(rig: Rig) -> None:
    rig.backend.ranks = FailingRanks(Header.SET_ADAPTERS)
    ack = await rig.prepare(SQL)
    assert "rank 1: did not confirm SET_ADAPTERS" in (ack.error or "")
    assert rig.loaded == []


async def test_an_uncommitted_adapter_is_unloaded_at_the_next_control_message(rig: Rig) -> None:
    await rig.prepare(SQL)
    await rig.lifecycle.handle(Control(kind=Header.SET_GENERATION_EPOCH, operation_id="other", epoch=1))
    assert rig.loaded == []
    await rig.commit()
    assert rig.adapters.begin("sql") is None


async def test_a_failed_operation_is_discarded_at_once(rig: Rig) -> None:
    await rig.prepare(SQL)
    for operation_id, loaded in (("earlier", [SQL]), ("op", [])):
        discard = ControlCommit(operation_id=operation_id, signal=Header.SET_ADAPTERS, discard=True)
        await rig.lifecycle.commit(discard)
        assert rig.loaded == loaded
    await rig.commit()
    assert rig.adapters.begin("sql") is None


async def test_the_present_list_of_a_hello_ack_keeps_what_is_staged_and_another_list_ends_it(rig: Rig) -> None:
    await rig.prepare(SQL)
    assert not await rig.lifecycle.adopt_adapters(AdapterList())
    assert rig.loaded == [SQL]
    assert await rig.lifecycle.adopt_adapters(AdapterList((CHAT,), generation=4))
    assert rig.loaded == [CHAT]


async def test_a_removed_adapter_is_unloaded_after_its_last_request(rig: Rig) -> None:
    await rig.prepare(SQL)
    await rig.commit()
    held = [rig.adapters.begin("sql"), rig.adapters.begin("sql")]
    other = Adapter("sql", "hf:org/sql-2")
    await rig.prepare(other, operation_id="second", generation=2)
    await rig.commit("second")
    assert rig.adapters.begin("sql") == other, "new requests use the new source"
    rig.adapters.end(SQL)
    assert rig.loaded == [SQL, other]
    assert held == [SQL, SQL]
    rig.adapters.end(SQL)
    await rig.until(lambda: rig.loaded == [other])


async def test_an_adapter_that_is_listed_again_before_its_last_request_ends_stays(rig: Rig) -> None:
    await rig.prepare(SQL)
    await rig.commit()
    rig.adapters.begin("sql")
    for number, adapters in enumerate([(), (SQL,)], start=2):
        await rig.prepare(*adapters, operation_id=f"op-{number}", generation=number)
        await rig.commit(f"op-{number}")
    rig.adapters.end(SQL)
    await rig.adapters.discard()
    assert rig.loaded == [SQL]


async def test_a_prompt_for_another_engine_is_computed_with_its_adapter_which_is_then_unloaded(rig: Rig) -> None:
    await rig.prepare(SQL)
    await rig.commit()
    await rig.backend.load()
    await rig.backend.unpause()
    sent: list[Exported] = []
    requests = OpenRequests(
        dataclasses.replace(SETTINGS, role="prefill"),
        rig.backend,
        adapters=rig.adapters,
        send=lambda frames: sent.append(decode(frames)),
        on_idle=lambda: None,
        tracer=None,
    )
    rig.on_outputs = requests.take  # type: ignore[method-assign,assignment]
    prompt = list(range(1, 601))

    def prefill(number: int, adapter: str) -> None:
        body = tokens_to_bytes(prompt), b"", pack(SamplingParams(num_tokens_to_generate=1).serialize())
        requests.receive(Prefill(Dispatch(number, bytes(16), 1, RequestMeta(adapter=adapter), *body)))

    prefill(1, "sql")
    await rig.prepare(operation_id="none", generation=2)
    await rig.commit("none")
    await rig.until(lambda: rig.loaded == [])
    [exported] = sent
    size = rig.backend.info.block_size_tokens
    assert exported.digests == b"".join(block_digests(prompt, size, adapter=SQL.key))
    prefill(2, "sql")
    assert sent[1:] == [Exported(dispatch_id=2)], "without the adapter, no block is computed"
    requests.close()


async def test_an_engine_that_joins_leaves_out_what_it_cannot_load_and_loads_it_when_it_is_set_again(rig: Rig) -> None:
    assert await rig.lifecycle.adopt_adapters(AdapterList((LOST, SQL), generation=3))
    assert rig.loaded == [SQL]
    assert rig.adapters.begin("lost") is None
    assert "does not exist" in rig.adapters.errors["lost"]
    assert not await rig.lifecycle.adopt_adapters(AdapterList((LOST, SQL), generation=3)), "it does not try again"
    await rig.prepare(SQL, operation_id="set", generation=4)
    await rig.commit("set")
    assert rig.adapters.errors == {}


async def test_a_backend_without_adapters_accepts_the_empty_list_only(rig: Rig) -> None:
    rig.backend.info = dataclasses.replace(
        rig.backend.info, name="bare", capabilities=rig.backend.info.capabilities - {Capability.ADAPTERS}
    )
    ack = await rig.prepare(SQL)
    assert (ack.ok, ack.code) == (False, ErrorCode.UNSUPPORTED)
    assert "SET_ADAPTERS needs LoRA adapters, which backend 'bare' does not have" in (ack.error or "")
    assert (await rig.prepare(operation_id="empty")).ok
    await rig.lifecycle.adopt_adapters(AdapterList((SQL,), generation=2))
    assert "backend 'bare'" in rig.adapters.errors["sql"]


async def test_requests_of_one_batch_use_their_own_adapters_and_share_no_prefix(rig: Rig) -> None:
    await rig.backend.load()
    await rig.backend.unpause()
    prompt = list(range(1, 601))
    params = SamplingParams(num_tokens_to_generate=5)

    def submit(number: int, adapter: Adapter | None) -> None:
        key = adapter.key if adapter is not None else ""
        rig.backend.submit(EngineRequest(number, np.array(prompt), np.zeros(0, np.int32), params, adapter=key))

    for number, adapter in enumerate([None, SQL, CHAT]):
        submit(number, adapter)
    await rig.until(lambda: [len(rig.tokens.get(number, ())) for number in range(3)] == [5] * 3)
    assert [rig.tokens[number] for number in range(3)] == [
        echo_answer(prompt, 5, adapter=adapter) for adapter in (None, SQL, CHAT)
    ]
    assert rig.backend.stats().prefix_cache_hits == 0
    submit(3, SQL)
    await rig.until(lambda: len(rig.tokens.get(3, ())) == 5)
    assert rig.tokens[3] == rig.tokens[1]
    assert rig.backend.stats().prefix_cache_hits == 512
