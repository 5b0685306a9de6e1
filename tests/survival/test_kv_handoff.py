"""Megatron-Core's names for a split that the client directs: KV goes from one request to the next, once and signed."""

from __future__ import annotations

import base64
import random
from typing import Any

import pytest
from echo_executor import echo_answer
from eventually import eventually
from fleet import Fleet, Process, until_serving, until_status

from megatron_runtime.megatron_core.inference_client import InferenceClient, InvalidRequestError
from megatron_runtime.protocol.headers import Header
from megatron_runtime.requests.sampling_params import IGNORE_EOS, SamplingParams

OPTIONS = ("--block-size-tokens", "16", "--max-tokens", "128", "--kv-cache-memory", "4Mi")
PROMPT = random.Random(56).choices(range(40_000), k=240)
"""Too short for a split that the coordinator directs."""
BLOCKS = (len(PROMPT) - 2) // 16
pytestmark = pytest.mark.timeout(200)


def params(tokens: int, **fields: Any) -> SamplingParams:
    return SamplingParams(num_tokens_to_generate=tokens, temperature=0.0, termination_id=IGNORE_EOS, **fields)


class Pool:
    """A coordinator, a prefill and a decode engine, and a client."""

    def __init__(self, fleet: Fleet, coordinator: Process, client: InferenceClient) -> None:
        self.fleet = fleet
        self.coordinator = coordinator
        self.client = client

    async def imports(self) -> float:
        return (await self.coordinator.metrics())["megatron_coordinator_kv_imports_total"]

    async def usage(self, engine: str) -> float:
        return (await self.fleet.engines[engine].metrics())["megatron_kv_cache_usage_perc"]

    async def until_released(self) -> None:
        for engine in self.fleet.engines:

            async def is_empty(engine: str = engine) -> bool:
                return await self.usage(engine) == 0

            await eventually(is_empty, what=f"{engine} keeps no block")

    async def first_answer(self, **options: Any) -> dict[str, Any]:
        """Return `disaggregated_params` of a request whose engine keeps its KV."""
        reply = await self.client.add_request(PROMPT, params(1, do_kv_handoff=True), **options)
        assert reply["generated_tokens"] == echo_answer(PROMPT, 1)
        handoff = reply["disaggregated_params"]
        assert handoff["request_id"] == reply["request_id"]
        assert handoff["block_ids"] == list(range(BLOCKS))
        assert await self.usage("p-0") > 0, "a prefill engine keeps it"
        return handoff


@pytest.fixture
async def pool(fleet: Fleet) -> Pool:
    coordinator = await fleet.coordinator()
    await fleet.engine("p-0", *OPTIONS, "--role", "prefill")
    await fleet.engine("d-0", *OPTIONS, "--role", "decode")
    link = await fleet.admin()
    await until_serving(link, fleet.engines)
    await until_status(
        link, lambda status: all(engine.digest for engine in status.engines), what="the engines report their weights"
    )
    return Pool(fleet, coordinator, await fleet.client())


async def test_a_request_uses_the_kv_of_an_earlier_one_once(pool: Pool) -> None:
    client, answer = pool.client, echo_answer(PROMPT, 8)
    handoff = await pool.first_answer()
    again = handoff["kv_meta"], handoff["block_ids"]
    reply = await client.add_request_with_kv_handoff(PROMPT, params(8), *again)
    assert reply["generated_tokens"] == answer
    assert reply["num_cached_tokens"] == 16 * BLOCKS, "the decode engine computed only the rest"
    assert await pool.imports() == 1
    await pool.until_released()
    reply = await client.add_request_with_kv_handoff(PROMPT, params(8, cache_salt="other blocks"), *again)
    assert reply["generated_tokens"] == answer
    longer = [*PROMPT, 7, 8, 9]
    handoff = await pool.first_answer()
    stream = client.add_request_with_kv_handoff_streaming(longer, params(8), handoff["kv_meta"], [])
    *partials, last = [frame async for frame in stream]
    assert partials
    assert last["final"]["generated_tokens"] == echo_answer(longer, 8)
    await pool.until_released()
    handoff = await pool.first_answer()
    client.release_handoff(handoff["request_id"])
    client.release_handoff(123_456)  # unknown
    await pool.until_released()


async def test_anything_but_the_own_handoff_means_computing_again(pool: Pool) -> None:
    handoff = await pool.first_answer(tenant="one")
    token = bytearray(base64.b64decode(handoff["kv_meta"]["handoff"]))
    token[-1] ^= 1
    forged = {"handoff": base64.b64encode(token).decode()}
    other = await pool.fleet.client()
    for client, tenant, kv_meta in (
        (other, "one", handoff["kv_meta"]),
        (pool.client, "two", handoff["kv_meta"]),
        (pool.client, "one", forged),
        (pool.client, "one", {"handoff": "no base64"}),
        (pool.client, "one", {"agent_name": "prefill-rank0", "agent_metadata_b64": "AA=="}),
        (pool.client, "one", None),
    ):
        reply = await client.native.add_request(PROMPT, params(8), tenant=tenant, kv_meta=kv_meta)
        assert reply["generated_tokens"] == echo_answer(PROMPT, 8)
    assert await pool.imports() == 0
    assert await pool.usage("p-0") > 0, "another client's request releases nothing"
    link = await pool.fleet.admin()
    assert (await link.control(Header.SET_GENERATION_EPOCH, fence=1, epoch=1)).ok
    await pool.until_released()
    reply = await pool.client.native.add_request(PROMPT, params(8), tenant="one", kv_meta=handoff["kv_meta"])
    assert reply["generated_tokens"] == echo_answer(PROMPT, 8)
    assert await pool.imports() == 0
    await pool.first_answer()
    pool.client.stop()
    await pool.until_released()


async def test_engines_without_a_role_keep_no_kv(fleet: Fleet) -> None:
    await fleet.coordinator()
    await fleet.engine("plain", *OPTIONS)
    link = await fleet.admin()
    await until_serving(link, fleet.engines)
    client = await fleet.client()
    with pytest.raises(InvalidRequestError, match="exchange of KV blocks"):
        await client.add_request(PROMPT, params(1, do_kv_handoff=True))
    reply = await client.add_request_with_kv_handoff(PROMPT, params(8), {"handoff": ""}, [])
    assert reply["generated_tokens"] == echo_answer(PROMPT, 8)
