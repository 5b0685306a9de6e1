"""Weights of a trainer reach every engine or none, whichever process is killed, and when. One pool for most tests."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
import trainer_program
from eventually import LONG_SECONDS
from fleet import Fleet, Process, until_serving, until_status
from machine import scaled
from random_checkpoint import LLAMA, random_tensors, write_model
from soak import SOAK, repeated, size
from trainer_process import TrainerProcess

from megatron_runtime.megatron_core.inference_client import InferenceClient
from megatron_runtime.protocol.headers import Header
from megatron_runtime.protocol.messages import StatusReply
from megatron_runtime.requests.sampling_params import IGNORE_EOS, SamplingParams

ENGINES = ("engine-0", "engine-1")
TOKENS, LONG_ANSWER = 40, 240
ORDERLY = ("none", "engine", "trainer", "coordinator")
STAGED = ("staged engine", "staged trainer", "staged coordinator")
"""Faults after an engine has staged the weights."""
TIE = 1e-4
"""Logits this close may be ordered differently by another implementation."""


class Oracle:
    """The model of every epoch, computed by transformers."""

    def __init__(self, model: str) -> None:
        from transformers import LlamaForCausalLM  # it takes seconds, also in processes that run other files

        self._directory = model
        self._model = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32).eval()

    @torch.no_grad()
    def allows(self, epoch: int, tokens: list[int], prompt: int) -> list[bool]:
        """Return for each token of an answer whether the model of `epoch` samples it greedily. prompt: its length."""
        self._model.load_state_dict(trainer_program.weights_of(self._directory, epoch))
        logits_TV = self._model(torch.tensor([tokens])).logits[0, prompt - 1 : -1]
        chosen_T = logits_TV.gather(1, torch.tensor(tokens[prompt:])[:, None])[:, 0]
        return (chosen_T >= logits_TV.max(1).values - TIE).tolist()


class Pool:
    """A coordinator, two engines that are started again, a trainer, and clients that ask all the time."""

    def __init__(self, fleet: Fleet, model: str) -> None:
        self.fleet = fleet
        self.trainer = TrainerProcess(f"127.0.0.1:{fleet.admin_port}", fleet.keys_dir, model)
        self.oracle = Oracle(model)
        self.epoch = 0
        self._model = model
        self.random = random.Random(0)

    async def start(self, *, ranks: int = 1) -> None:
        """ranks: tensor parallel ranks of an engine. Engines of several ranks are not started again."""
        options = ("--backend", "native", "--model", self._model, "--dtype", "float32", "--threads", "1")
        memory = ("--kv-cache-memory", "1Mi", "--block-size-tokens", "16")
        self.coordinator = await self.fleet.coordinator()
        for name in ENGINES[: 2 if ranks == 1 else 1]:
            if ranks == 1:
                await self.fleet.keep_running(name, *options, *memory)
            else:
                await self.fleet.engine(name, *options, *memory, "--tensor-parallel", str(ranks), warm=False)
        self.link = await self.fleet.admin()
        await until_serving(self.link, self.fleet.engines)
        self.client: InferenceClient = await self.fleet.client()
        await self.start_trainer()

    async def start_trainer(self) -> None:
        """Start the trainer unless it runs."""
        if not self.trainer.running:
            assert await self.trainer.start() == self.epoch

    async def lose(self, *names: str) -> None:
        """Kill engines, and wait until they are back."""
        exits = len(self.fleet.exits)
        for name in names:
            await self.fleet.engines[name].kill()
        await until_status(
            self.link,
            lambda status: len(self.fleet.exits) == exits + len(names) and len(status.engines) == 2,
            what=f"{names} are back",
        )

    async def ask(
        self, *, tokens: int = TOKENS, on_tokens: Callable[[int], object] | None = None
    ) -> tuple[list[int], dict[str, Any]]:
        prompt = self.random.choices(range(3, LLAMA.vocab_size), k=6)
        params = SamplingParams(temperature=0.0, num_tokens_to_generate=tokens, termination_id=IGNORE_EOS)
        answer = self.client.add_request(prompt, params, on_tokens=on_tokens)
        return prompt, await asyncio.wait_for(answer, LONG_SECONDS)

    async def settle(self) -> StatusReply:
        """Wait until both engines serve the weights of the coordinator's epoch, and return the status.

        A heartbeat that an engine sent before it committed an epoch still has the epoch before.
        """

        def agrees(status: StatusReply) -> bool:
            weights = {(engine.epoch, engine.source, engine.digest) for engine in status.engines}
            is_idle = all(operation.phase != "InProgress" for operation in status.operations)
            serving = [engine.serving and bool(engine.digest) for engine in status.engines]
            is_current = len(weights) == 1 and status.engines[0].epoch == status.epoch
            return is_idle and status.state == "RUNNING" and serving == [True, True] and is_current

        return await until_status(self.link, agrees, what="both engines serve the weights of the epoch")

    async def update(self, fault: str) -> None:
        """Publish the next epoch with a fault, then without one if that did not commit it. Check every answer."""
        before, wanted = self.epoch, self.epoch + 1
        streams = [asyncio.create_task(self.ask()) for _ in range(4)]
        earlier = {operation.operation_id for operation in (await self.link.status()).operations}
        self.trainer.order(wanted)
        await self._break(fault, earlier)
        answer = await self.trainer.answer()
        status = await self.settle()
        assert status.epoch in (before, wanted)
        if "source" in answer:
            assert status.epoch == wanted, answer
        elif answer and answer["is_committed"] is not None:
            assert status.epoch == before, answer
        if fault.endswith("trainer"):
            assert await self.trainer.start() == status.epoch
        if fault != "none":  # the same epoch again: it is committed now, or was already
            answer = await self.trainer.publish(wanted)
            status = await self.settle()
        assert "source" in answer, answer
        assert {(engine.epoch, engine.source) for engine in status.engines} == {(wanted, answer["source"])}
        self.epoch = wanted
        for prompt, reply in await asyncio.gather(*streams):
            self.check(prompt, reply, epochs=(before, wanted))
        for prompt, reply in await asyncio.gather(*(self.ask() for _ in range(4))):
            self.check(prompt, reply, epochs=(wanted,))

    async def update_before_loss(self, lost: str) -> None:
        """Publish the next epoch while answers have some of their tokens, then kill an engine or the coordinator."""
        begun = [asyncio.Event() for _ in range(4)]
        streams = [
            asyncio.create_task(self.ask(tokens=LONG_ANSWER, on_tokens=lambda _, event=event: event.set()))
            for event in begun
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        assert (await self.link.control(Header.PAUSE, operation_id=f"pause at {self.epoch}", fence=1)).ok
        before, self.epoch = self.epoch, self.epoch + 1
        assert "source" in await self.trainer.publish(self.epoch)
        exits = len(self.fleet.exits)
        if lost == "engine":
            await self.fleet.engines["engine-0"].kill()
        else:
            await self.coordinator.kill()
            self.coordinator = await self.fleet.coordinator()
        await until_status(
            self.link,
            lambda status: (
                status.state == "PAUSED"
                and [engine.epoch for engine in status.engines if engine.serving] == [self.epoch] * 2
                and len(self.fleet.exits) == exits + (lost == "engine")
            ),
            what="both engines have the new weights",
        )
        assert (await self.link.control(Header.UNPAUSE, operation_id=f"go on at {self.epoch}", fence=1)).ok
        for prompt, reply in await asyncio.gather(*streams):
            self.check(prompt, reply, epochs=(before, self.epoch))
            assert [epoch for _, epoch in reply["policy_epoch"]] == [before, self.epoch]

    async def _break(self, fault: str, earlier: set[str]) -> None:
        """earlier: ids of the operations before the update."""
        target: Process | TrainerProcess | None = {
            "engine": self.fleet.engines["engine-0"],
            "coordinator": self.coordinator,
            "trainer": self.trainer,
        }.get(fault.rpartition(" ")[2])
        if target is None:
            return
        frozen = self.fleet.engines["engine-1"] if fault.startswith("staged") else None
        if frozen is not None:
            frozen.freeze()
            await until_status(
                self.link,
                # If engine-1 was quicker than SIGSTOP, the update is over.
                lambda status: any(
                    operation.ranks >= 1 for operation in status.operations if operation.operation_id not in earlier
                ),
                what="engine-0 has staged the weights",
            )
        else:
            await asyncio.sleep(self.random.uniform(0, scaled(0.1)))
        await target.kill()
        if target is self.coordinator:
            self.coordinator = await self.fleet.coordinator()
        if frozen is not None:
            frozen.thaw()

    def check(self, prompt: list[int], reply: dict[str, Any], *, epochs: tuple[int, ...]) -> None:
        """Each token is the one that the epoch samples that the answer names for it."""
        assert reply["status"] == "COMPLETED", reply
        tokens = [*prompt, *reply["generated_tokens"]]
        allowed = {epoch: self.oracle.allows(epoch, tokens, len(prompt)) for epoch in epochs}
        for index in range(len(reply["generated_tokens"])):
            said = [epoch for first, epoch in reply["policy_epoch"] if first < len(prompt) + index][-1]
            assert said in epochs
            assert allowed[said][index], (index, reply["policy_epoch"], allowed)


def new_pool(fleet: Fleet, directory: Path) -> Pool:
    config = replace(LLAMA, num_layers=2, num_heads=4)
    return Pool(fleet, str(write_model(directory / "model", config, random_tensors(config))))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pool]:
    directory = tmp_path_factory.mktemp("updates")
    pool = new_pool(Fleet(directory, warm_coordinators=not SOAK), directory)
    try:
        await pool.start()
        yield pool
    finally:
        await pool.trainer.kill()
        await pool.fleet.close()


@pytest_asyncio.fixture(loop_scope="module")
async def pool(shared: Pool, seed: int) -> Pool:
    """The pool of all tests, with a running trainer."""
    shared.random = random.Random(seed)
    await shared.start_trainer()
    return shared


in_one_loop = pytest.mark.asyncio(loop_scope="module")


@in_one_loop
@pytest.mark.long
@pytest.mark.timeout(size(600, soak=7200))
@repeated(soak=1)
async def test_updates_with_faults_in_every_phase(pool: Pool, seed: int) -> None:
    faults = [*ORDERLY[: size(2, soak=4)], *STAGED] * size(1, soak=142)
    faults += ["none"] * (size(0, soak=1000) - len(faults))
    random.Random(seed).shuffle(faults)
    for number, fault in enumerate(faults, start=1):
        await pool.update(fault)
        if number % 100 == 0:
            print(f"{number} updates, {len(pool.fleet.exits)} exits of processes")


@in_one_loop
@pytest.mark.timeout(600)
@repeated(soak=5)
async def test_a_continued_answer_names_the_weights_that_sampled_each_token(pool: Pool) -> None:
    for lost in ("engine", "coordinator"):
        await pool.update_before_loss(lost)


@in_one_loop
@pytest.mark.timeout(600)
@repeated(soak=5)
async def test_engines_that_start_without_their_trainer(pool: Pool) -> None:
    """One after the other, each gets the weights from the other engine, and a copy of a copy is served. Both at once
    serve nothing until the trainer returns, at another address."""
    await pool.update("none")
    await pool.trainer.kill()
    for name in ENGINES:
        await pool.lose(name)
        status = await pool.settle()
        assert {engine.epoch for engine in status.engines} == {pool.epoch}
    for prompt, reply in await asyncio.gather(*(pool.ask() for _ in range(4))):
        pool.check(prompt, reply, epochs=(pool.epoch,))

    await pool.lose(*ENGINES)
    exits = len(pool.fleet.exits)
    waiting = asyncio.create_task(pool.ask())
    status = await pool.link.status()
    assert [engine.serving for engine in status.engines] == [False, False]
    pool.trainer.move()
    await pool.start_trainer()
    source = (await pool.trainer.publish(pool.epoch))["source"]
    status = await pool.settle()
    assert {engine.source for engine in status.engines} == {source}
    prompt, reply = await waiting
    pool.check(prompt, reply, epochs=(pool.epoch,))
    assert len(pool.fleet.exits) == exits


@pytest.mark.skipif(not SOAK, reason="unit/trainer shows the part of each rank: run by make soak")
@pytest.mark.timeout(600)
async def test_each_rank_of_an_engine_receives_its_part(fleet: Fleet, tmp_path: Path) -> None:
    """The ranks receive at the same time, while they run steps."""
    pool = new_pool(fleet, tmp_path)
    try:
        await pool.start(ranks=2)
        streams = [asyncio.create_task(pool.ask()) for _ in range(4)]
        assert "source" in await pool.trainer.publish(1)
        assert (await pool.link.status()).engines[0].epoch == 1
        for prompt, reply in [*await asyncio.gather(*streams), await pool.ask()]:
            pool.check(prompt, reply, epochs=(0, 1))
        assert reply["policy_epoch"] == [[0, 1]]
    finally:
        await pool.trainer.kill()
