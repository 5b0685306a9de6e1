"""Verbs whose acknowledgements and commits are lost, duplicated or late: each acts once, and no false success."""

import asyncio
import random
from collections import Counter

import pytest
from control_link import ControlLink
from echo_engine import EchoBackend
from echo_executor import echo_answer
from eventually import LONG_SECONDS
from fleet import until_status
from soak import FIRST_SEED, size

from megatron_runtime.backends.native.backend import Ranks
from megatron_runtime.coordinator.core.settings import CoordinatorSettings, Timing
from megatron_runtime.coordinator.service import Coordinator
from megatron_runtime.engine.backend import RankResults
from megatron_runtime.engine.lifecycle import Lifecycle
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.engine.worker import EngineWorker
from megatron_runtime.megatron_core.inference_client import InferenceClient
from megatron_runtime.protocol.adapters import Adapter, AdapterList
from megatron_runtime.protocol.headers import ErrorCode, Header, Role
from megatron_runtime.protocol.lifecycle import TRANSITIONS
from megatron_runtime.protocol.messages import Control, ControlAck, StatusReply
from megatron_runtime.requests.sampling_params import SamplingParams
from megatron_runtime.transport.control_calls import ControlRejectedError

from .fault_proxy import FaultProxy

RUNS = size(12, soak=1000)
AT_ONCE = 8
ENGINES = ("engine-0", "engine-1", "engine-2")
RANKS = 2
TIMING = Timing(heartbeat=0.1, suspect=2.0, dead=5.0, client_dead=20.0, recovery=0.0)
VERB_SECONDS = 0.3
PATH_TO_RUNNING = {"PAUSED": [Header.UNPAUSE], "SUSPENDED": [Header.RESUME, Header.UNPAUSE], "RUNNING": []}
LEGAL = {
    "RUNNING": [Header.PAUSE, Header.SET_GENERATION_EPOCH, Header.UPDATE_WEIGHTS, Header.SET_ADAPTERS],
    "PAUSED": [Header.UNPAUSE, Header.SUSPEND, Header.PAUSE, Header.UPDATE_WEIGHTS, Header.SET_ADAPTERS],
    "SUSPENDED": [Header.RESUME, Header.PAUSE, Header.SET_GENERATION_EPOCH],
}


class RecordingRanks(Ranks):
    """Counts how often each operation was executed. An engine that converges by itself has no operation id."""

    count = RANKS

    def __init__(self) -> None:
        self.operations: Counter[str] = Counter()
        self._operation_id: str | None = None

    def record(self, lifecycle: Lifecycle) -> None:
        """Record the operation of each control message that `lifecycle` handles, one at a time."""
        handle = lifecycle.handle

        async def recorded(control: Control) -> ControlAck:
            self._operation_id = control.operation_id
            try:
                return await handle(control)
            finally:
                self._operation_id = None

        lifecycle.handle = recorded

    async def confirm(self, signal: Header) -> RankResults:
        results = await super().confirm(signal)
        if self._operation_id is not None:
            self.operations[self._operation_id] += 1
        return results


class Scene:
    """Three echo engines behind one proxy, an administrator behind another, and an undisturbed witness."""

    def __init__(self, seed: int, *, share: float) -> None:
        self.random = random.Random(seed)
        self.coordinator = Coordinator(
            CoordinatorSettings(listen="127.0.0.1", client_port=0, engine_port=0, admin_port=0, timing=TIMING)
        )
        self.coordinator.start()
        addresses = self.coordinator.transport.addresses
        self.proxies = [
            FaultProxy(addresses[role], rng=random.Random(self.random.random()), share=share)
            for role in (Role.ENGINE, Role.ADMIN)
        ]
        self.ranks = {name: RecordingRanks() for name in ENGINES}
        self.workers = [self._worker(name) for name in ENGINES]
        self.runs = [asyncio.create_task(worker.run()) for worker in self.workers]
        self.admin = ControlLink(self.proxies[1].address)
        self.witness = ControlLink(addresses[Role.ADMIN])
        self.client = InferenceClient(addresses[Role.CLIENT], deserialize=False)
        self.asked = 0
        self.updated = False

    def _worker(self, name: str) -> EngineWorker:
        settings = EngineSettings(
            coordinator=self.proxies[0].address,
            name=name,
            kv_cache_memory=1 << 18,
            max_requests=8,
        )
        backend = EchoBackend(settings, ranks=self.ranks[name])
        worker = EngineWorker(settings, backend)
        self.ranks[name].record(worker.lifecycle)
        return worker

    async def __aenter__(self) -> "Scene":
        for link in (self.admin, self.witness):
            await link.start(connect_timeout_seconds=LONG_SECONDS)
        await self.client.start(connect_timeout_seconds=LONG_SECONDS)
        await self.settled()
        return self

    async def __aexit__(self, *_: object) -> None:
        for worker in self.workers:
            worker.ended.set()
        await asyncio.gather(*self.runs)
        self.client.stop()
        for link in (self.admin, self.witness):
            link.close()
        self.coordinator.stop()
        for proxy in self.proxies:
            proxy.close()

    async def settled(self) -> StatusReply:
        """Wait until all engines serve in the coordinator's state and epoch with the same weights and its adapters, as
        reported and in fact.
        """

        def fits(status: StatusReply) -> bool:
            where = (status.state, status.epoch)
            lives = [worker.lifecycle for worker in self.workers]
            return (
                len(status.engines) == len(ENGINES)
                and all(engine.serving and (engine.state, engine.epoch) == where for engine in status.engines)
                and all((life.state, life.epoch, life.source) == (*where, lives[0].source) for life in lives)
                and all(life.adapters.current == self.coordinator.core.verbs.adapters for life in lives)
                and all(
                    set(worker._backend.adapters) >= {adapter.key for adapter in lives[0].adapters.current.adapters}
                    for worker in self.workers
                )
                and all(entry.engines == len(ENGINES) for entry in status.adapters)
            )

        return await until_status(self.witness, fits, what="all engines have the coordinator's state")

    async def ask(self, kind: Header, *, timeout_seconds: float) -> ControlAck:
        """Repeat one operation with the same id until it is answered."""
        self.asked += 1
        operation_id = f"operation-{self.asked}"
        epoch = self.asked if kind in (Header.SET_GENERATION_EPOCH, Header.UPDATE_WEIGHTS) else None
        source = f"weights-{self.asked}" if kind is Header.UPDATE_WEIGHTS else None
        adapters = None
        if kind is Header.SET_ADAPTERS:
            numbers = self.random.sample(range(4), 2)
            adapters = AdapterList(tuple(Adapter(f"adapter-{number}", "hf:org/name") for number in numbers))
        self.updated = self.updated or source is not None
        while True:
            answer = self.admin.control(
                kind,
                operation_id=operation_id,
                fence=1,
                timeout_seconds=timeout_seconds,
                epoch=epoch,
                source=source,
                adapters=adapters,
            )
            try:
                return await asyncio.wait_for(answer, timeout_seconds + 0.3)
            except ControlRejectedError as error:
                if error.ack is None:
                    raise
                return error.ack
            except TimeoutError:
                continue

    def check(self, kind: Header, before: str, ack: ControlAck) -> None:
        """Check that each confirming engine executed the operation, and that no engine executed it twice."""
        moves = kind in TRANSITIONS and before not in TRANSITIONS[kind].idempotent_in
        if ack.ok:
            assert ack.state == (TRANSITIONS[kind].coordinator_after if moves else before)
        else:
            assert ack.state == before
            assert kind is Header.SET_ADAPTERS or not any(outcome.ok for outcome in ack.engines.values())
        confirmed = [name for name, outcome in ack.engines.items() if outcome.ok]
        assert ack.ranks == RANKS * len(confirmed)
        assert set(ack.evicted) == (set() if kind is Header.SET_ADAPTERS else set(ack.engines) - set(confirmed))
        if ack.ok and moves:
            for name in confirmed:
                # An engine that missed the commit of UNPAUSE is still paused and has nothing to execute.
                done = self.ranks[name].operations[ack.operation_id] == 1 or kind is Header.PAUSE
                assert done, "confirmed, but not executed"
        for name, ranks in self.ranks.items():
            assert ranks.operations[ack.operation_id] <= 1, f"{name} executed it twice"


async def one_run(seed: int, fates: Counter[str]) -> None:
    async with Scene(seed, share=0.3) as scene:
        requests = [scene.client.add_request([seed, n], SamplingParams(num_tokens_to_generate=50)) for n in range(8)]
        for _ in range(5):
            status = await scene.witness.status(timeout_seconds=LONG_SECONDS)
            kind = scene.random.choice(LEGAL[status.state])
            ack = await scene.ask(kind, timeout_seconds=VERB_SECONDS)
            scene.check(kind, status.state, ack)
            fates["confirmed" if ack.ok else "failed"] += 1
            fates["evicted"] += len(ack.evicted)
        for proxy in scene.proxies:
            fates.update(proxy.fates)
            proxy.share = 0.0
        status = await scene.settled()
        for kind in PATH_TO_RUNNING[status.state]:
            assert (await scene.ask(kind, timeout_seconds=LONG_SECONDS)).ranks == RANKS * len(ENGINES)
        answers = await asyncio.wait_for(asyncio.gather(*requests), LONG_SECONDS)
        assert [answer["generated_length"] for answer in answers] == [50] * len(requests)
        if not scene.updated:
            assert [answer["generated_tokens"] for answer in answers] == [echo_answer([seed, n], 50) for n in range(8)]
        assert all(count == 1 for ranks in scene.ranks.values() for count in ranks.operations.values())


@pytest.mark.timeout(3600)
async def test_verbs_act_once_with_lost_duplicated_and_late_acknowledgements(report) -> None:
    fates: Counter[str] = Counter()
    lanes = asyncio.Semaphore(AT_ONCE)

    async def run(seed: int) -> None:
        async with lanes:
            try:
                await one_run(seed, fates)
            except Exception as error:
                raise AssertionError(f"seed {seed}: {error}") from error

    # Let all runs complete: a cancelled run would leak sockets and threads.
    outcomes = await asyncio.gather(
        *(run(seed) for seed in range(FIRST_SEED, FIRST_SEED + RUNS)), return_exceptions=True
    )
    for outcome in outcomes:
        if outcome is not None:
            raise outcome
    report(f"{RUNS} runs from seed {FIRST_SEED}: {dict(fates)}")
    for fate in ("lost", "doubled", "late", "ControlAck", "ControlCommit", "confirmed", "evicted"):
        assert fates[fate] > 0


@pytest.mark.parametrize("state", ["RUNNING", "PAUSED", "SUSPENDED"])
async def test_an_illegal_signal_is_rejected_at_once_in_every_state_and_has_no_effect(state) -> None:
    async with Scene(1, share=0.0) as scene:
        for kind in {"RUNNING": [], "PAUSED": [Header.PAUSE], "SUSPENDED": [Header.PAUSE, Header.SUSPEND]}[state]:
            assert (await scene.ask(kind, timeout_seconds=LONG_SECONDS)).ok
        await scene.settled()
        acted = [ranks.operations.copy() for ranks in scene.ranks.values()]
        for kind in sorted(TRANSITIONS):
            if state in TRANSITIONS[kind].legal_from | TRANSITIONS[kind].idempotent_in:
                continue
            answer = scene.admin.control(kind, operation_id=f"illegal {kind.name}", fence=1, timeout_seconds=3600)
            with pytest.raises(ControlRejectedError) as rejected:
                await asyncio.wait_for(answer, LONG_SECONDS)
            assert rejected.value.code == ErrorCode.ILLEGAL_SIGNAL
            assert state in rejected.value.message
        assert [ranks.operations for ranks in scene.ranks.values()] == acted
        assert (await scene.settled()).state == state


async def test_a_verb_without_the_expected_engines_is_rejected() -> None:
    async with Scene(1, share=0.0) as scene:
        for worker in scene.workers:
            worker.ended.set()
        await until_status(scene.witness, lambda status: not status.engines, what="all engines left")
        answer = scene.admin.control(
            Header.PAUSE, operation_id="p", fence=1, expected_engines=3, timeout_seconds=LONG_SECONDS
        )
        with pytest.raises(ControlRejectedError) as rejected:
            await asyncio.wait_for(answer, LONG_SECONDS)
        assert rejected.value.code == ErrorCode.ENGINES_MISSING
        assert (await scene.witness.status()).state == "RUNNING"
