"""Another EngineBackend behind the real worker, coordinator and server: the interface is sufficient."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest
from control_link import ControlLink
from eventually import LONG_SECONDS
from fleet import Fleet, Load, until_serving, until_status

from megatron_runtime.protocol.adapters import Adapter, AdapterList
from megatron_runtime.protocol.headers import ErrorCode, Header
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.tokenization import load_tokenizer
from megatron_runtime.transport.control_calls import ControlRejectedError

from . import toy_backend
from .toy_backend import toy_answer

ENGINES = ("engine-0", "engine-1")
TOY = Path(toy_backend.__file__)


class Pool:
    """A coordinator and two toy engines, each a process, with keys."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self._operations = 0

    async def start(self) -> None:
        await self.fleet.coordinator()
        for name in ENGINES:
            await self.fleet.engine_program(name, TOY)
        self.admin: ControlLink = await self.fleet.admin()
        await until_serving(self.admin, ENGINES)
        self.client = await self.fleet.client()

    async def control(self, kind: Header, **fields: object) -> None:
        self._operations += 1
        await self.admin.control(
            kind, operation_id=f"op-{self._operations}", fence=1, timeout_seconds=LONG_SECONDS, **fields
        )


@pytest.fixture
async def pool(fleet: Fleet) -> Pool:
    pool = Pool(fleet)
    await pool.start()
    return pool


async def test_it_serves_chat_and_rejects_unsupported_fields(pool: Pool) -> None:
    _, url = await pool.fleet.server("--model-name", "toy")
    messages = [{"role": "user", "content": "Hello, toy!"}]
    body = {"model": "toy", "messages": messages, "max_tokens": 12, "temperature": 0}
    async with httpx.AsyncClient(base_url=url, timeout=LONG_SECONDS) as http:
        reply = (await http.post("/v1/chat/completions", json=body)).json()
        tokenizer = load_tokenizer("builtin:smollm2-135m")
        assert reply["choices"][0]["message"]["content"] == tokenizer.decode(
            toy_answer(tokenizer.encode_chat(messages), 12)
        )
        assert reply["usage"]["completion_tokens"] == 12
        for field, extra in (
            ("structured_output", {"response_format": {"type": "json_object"}}),
            ("logit_bias", {"logit_bias": {"7": 5}}),
            ("bad_words", {"bad_words": ["toy"]}),
            ("return_log_probs", {"logprobs": True}),
        ):
            rejected = await http.post("/v1/chat/completions", json={**body, **extra})
            assert rejected.status_code == 400, rejected.text
            assert field in rejected.text
            assert "backend 'toy'" in rejected.text


async def test_answers_survive_pause_suspend_and_resume(pool: Pool) -> None:
    load = Load([pool.client])
    for number in range(20):
        load.add([number, 5], 60)
    await load.until(100)
    await pool.control(Header.PAUSE)
    held = await load.at_rest()  # the last tokens may arrive after the answer to the verb, on another connection
    await pool.control(Header.SUSPEND)
    await asyncio.sleep(10 * toy_backend.TICK_SECONDS)
    assert load.tokens == held
    await pool.fleet.engine_program("engine-2", TOY)  # an engine that joins now loads nothing before RESUME
    await until_status(
        pool.admin,
        lambda status: [engine.state for engine in status.engines] == ["SUSPENDED"] * 3,
        what="a third engine has joined the suspended pool",
    )
    await pool.control(Header.RESUME)
    await pool.control(Header.UNPAUSE)
    for number in range(20, 40):
        load.add([number, 5], 10)
    await load.check(answer=toy_answer)


async def test_an_unsupported_verb_fails_and_names_the_remedy(pool: Pool) -> None:
    with pytest.raises(
        ControlRejectedError, match="UPDATE_WEIGHTS needs weight updates, which backend 'toy'"
    ) as failed:
        await pool.control(Header.UPDATE_WEIGHTS, source="other", epoch=3)
    assert "--backend" in str(failed.value)
    await until_serving(pool.admin, ENGINES)
    with pytest.raises(ControlRejectedError, match="LoRA adapters, which backend 'toy' does not have") as failed:
        await pool.control(Header.SET_ADAPTERS, adapters=AdapterList((Adapter("sql", "hf:org/sql"),)))
    assert failed.value.code == ErrorCode.UNSUPPORTED
    reply = await pool.client.add_request([3], SamplingParams(num_tokens_to_generate=4))
    assert reply["generated_tokens"] == toy_answer([3], 4)
