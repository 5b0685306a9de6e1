"""LoRA adapters: one list for all engines in two phases, and each request only at engines that have its adapter."""

import asyncio

import pytest
from echo_executor import echo_answer

from megatron_runtime.client.rejection import AdapterNotFoundError, ModelChangedError, UnavailableError
from megatron_runtime.coordinator.core.settings import RoutingPolicy, Timing
from megatron_runtime.megatron_core.inference_client import InferenceClient
from megatron_runtime.protocol.adapters import Adapter, AdapterList
from megatron_runtime.protocol.headers import ErrorCode, Header
from megatron_runtime.requests.hashing import frame_hashes
from megatron_runtime.transport.control_calls import ControlRejectedError

SQL, CHAT = Adapter("sql", "/adapters/sql"), Adapter("chat", "hf:org/chat")
RECOVERS = Timing(heartbeat=0.05, suspect=30.0, dead=60.0, client_dead=60.0, recovery=5.0, recovery_settle=0.3)
WITHOUT_HEARTBEATS = Timing(heartbeat=600.0, suspect=2000.0, dead=6000.0, client_dead=6000.0, recovery=0.0)
HEALS = Timing(heartbeat=0.02, suspect=30.0, dead=60.0, client_dead=60.0, recovery=0.0)


@pytest.fixture
def set_adapters():
    count = iter(range(1000))

    def send(link, *adapters, **options):
        defaults = {"operation_id": f"op-{next(count)}", "fence": 1, "timeout_seconds": 10.0}
        return link.control(Header.SET_ADAPTERS, adapters=AdapterList(adapters), **{**defaults, **options})

    return send


def names(client: InferenceClient) -> list[str]:
    return [adapter.name for adapter in client.adapters.adapters]


async def test_the_list_replaces_the_one_before_on_every_engine_and_every_client(stage, set_adapters) -> None:
    coordinator = stage.coordinator()
    engines = [await stage.engine("engine-0"), await stage.engine("engine-1")]
    link, client = await stage.admin(), await stage.client()
    for number, adapters in enumerate([(SQL,), (SQL, CHAT), (CHAT,), ()], start=1):
        ack = await set_adapters(link, *adapters, expected_engines=2)
        assert all(outcome.ok for outcome in ack.engines.values())
        wanted = AdapterList(adapters, generation=number)
        for engine in engines:
            await engine.until(lambda engine=engine, wanted=wanted: engine.adapters == wanted)
        await stage.until(lambda wanted=wanted: client.adapters == wanted)
        await stage.until(lambda: all(entry.engines == 2 for entry in coordinator.core.verbs.adapter_report()))
        report = (await link.status()).adapters
        assert [(entry.name, entry.source, entry.engines, entry.error) for entry in report] == [
            (adapter.name, adapter.source, 2, None) for adapter in adapters
        ]


async def test_clients_learn_a_new_list_at_once_without_a_heartbeat(stage, set_adapters) -> None:
    stage.coordinator(timing=WITHOUT_HEARTBEATS)
    await stage.engine()
    link, client = await stage.admin(), await stage.client()
    await set_adapters(link, SQL)
    await stage.until(lambda: names(client) == ["sql"])


async def test_no_request_gets_an_adapter_before_every_engine_has_loaded_it(stage, params, set_adapters) -> None:
    stage.coordinator()
    quick, slow = await stage.engine("quick"), await stage.engine("slow", mute={Header.SET_ADAPTERS})
    link, client = await stage.admin(), await stage.client()
    answer = set_adapters(link, SQL, operation_id="set")
    await quick.until(lambda: quick.acted[Header.SET_ADAPTERS])
    with pytest.raises(AdapterNotFoundError):
        await client.add_request([1], params(2), adapter="sql")
    assert not quick.commits
    await slow.until(lambda: slow.controls)
    slow.mute.clear()
    slow._control(slow.controls[-1])
    await answer
    await stage.until(lambda: names(client) == ["sql"])
    assert (await client.add_request([1], params(2), adapter="sql"))["generated_tokens"] == echo_answer(
        [1], 2, adapter=SQL
    )


@pytest.mark.parametrize("way", ["fails", "is silent"])
async def test_an_engine_that_fails_changes_nothing_and_keeps_serving(stage, params, set_adapters, way) -> None:
    coordinator = stage.coordinator()
    good = await stage.engine("good")
    options = {"failing": {Header.SET_ADAPTERS}} if way == "fails" else {"mute": {Header.SET_ADAPTERS}}
    link, client = await stage.admin(), await stage.client()
    await set_adapters(link, SQL)
    bad = await stage.engine("bad", **options)
    await bad.until(lambda: bad.adapters.find("sql"))
    cause = "SET_ADAPTERS went wrong" if way == "fails" else "no answer within"
    with pytest.raises(ControlRejectedError, match=f"not every engine succeeded: bad: {cause}") as rejected:
        await set_adapters(link, CHAT, timeout_seconds=0.5)
    assert rejected.value.code == ErrorCode.ENGINE_FAILED
    assert rejected.value.ack.evicted == []
    assert [engine.name for engine in coordinator.core.engines.serving()] == ["good", "bad"]
    assert coordinator.core.verbs.adapters.adapters == (SQL,)
    await good.until(lambda: len(good.commits) == 2)
    assert [commit.discard for commit in good.commits] == [None, True]
    await stage.until(lambda: names(client) == ["sql"])
    answers = await asyncio.gather(*(client.add_request([n], params(4), adapter="sql") for n in range(1, 5)))
    assert [answer["generated_tokens"] for answer in answers] == [echo_answer([n], 4, adapter=SQL) for n in range(1, 5)]


async def test_an_engine_of_a_release_without_adapters_is_named_and_gets_no_such_request(
    stage, params, set_adapters
) -> None:
    stage.coordinator()
    link, client = await stage.admin(), await stage.client()
    await stage.engine("new")
    await set_adapters(link, SQL)
    old = await stage.engine("old", adapters=None)
    with pytest.raises(ControlRejectedError, match="old: it has no adapters: upgrade it") as rejected:
        await set_adapters(link, SQL, CHAT)
    assert rejected.value.code == ErrorCode.UNSUPPORTED
    await stage.until(lambda: names(client) == ["sql"])
    await asyncio.gather(*(client.add_request([n], params(4), adapter="sql") for n in range(1, 9)))
    assert not old.dispatches


async def test_the_same_operation_acts_once_and_a_stale_fence_is_rejected(stage, set_adapters) -> None:
    coordinator = stage.coordinator()
    engine = await stage.engine()
    link = await stage.admin()
    first = await set_adapters(link, SQL, operation_id="set", fence=5)
    assert await set_adapters(link, SQL, operation_id="set", fence=5) == first
    assert engine.acted[Header.SET_ADAPTERS] == 1
    with pytest.raises(ControlRejectedError) as rejected:
        await set_adapters(link, CHAT, fence=4)
    assert rejected.value.code == ErrorCode.STALE_FENCE
    assert coordinator.core.verbs.adapters == AdapterList((SQL,), generation=1)
    with pytest.raises(ControlRejectedError, match="SET_ADAPTERS needs adapters"):
        await link.control(Header.SET_ADAPTERS, operation_id="none", fence=5)


async def test_an_engine_that_joins_gets_the_list_and_requests_wait_until_it_has_it(
    stage, params, set_adapters
) -> None:
    stage.coordinator()
    first = await stage.engine("first")
    link, client = await stage.admin(), await stage.client()
    await set_adapters(link, SQL)
    await stage.until(lambda: names(client) == ["sql"])
    newcomer = await stage.engine("newcomer", follows_acks=False)  # it does not load the list yet
    assert newcomer.acks[0].adapters == AdapterList((SQL,), generation=1)
    first.leave()
    waiting = client.add_request([1], params(3), adapter="sql")
    base = await client.add_request([1], params(3))
    assert base["generated_tokens"] == echo_answer([1], 3), "a request without an adapter does not wait"
    assert not waiting.done()
    newcomer.adapters = newcomer.acks[0].adapters
    newcomer.say_hello()
    assert (await waiting)["generated_tokens"] == echo_answer([1], 3, adapter=SQL)


async def test_requests_of_an_adapter_that_no_engine_could_load_fail_with_the_cause(
    stage, params, set_adapters
) -> None:
    stage.coordinator()
    first = await stage.engine("first")
    link, client = await stage.admin(), await stage.client()
    await set_adapters(link, SQL)
    await stage.until(lambda: names(client) == ["sql"])
    await stage.engine("second", adapter_errors={"sql": "the directory does not exist"})
    first.leave()
    await stage.until(lambda: [engine.name for engine in stage.coordinators[-1].core.engines] == ["second"])
    with pytest.raises(UnavailableError, match="'sql': second: the directory does not exist"):
        await client.add_request([1], params(3), adapter="sql")
    [report] = (await link.status()).adapters
    assert (report.engines, report.error) == (0, "second: the directory does not exist")


async def test_a_removed_adapter_ends_waiting_requests_and_lets_those_at_engines_finish(
    stage, params, set_adapters
) -> None:
    coordinator = stage.coordinator()
    engine = await stage.engine(step_seconds=None, max_requests=1)
    link, client = await stage.admin(), await stage.client()
    await set_adapters(link, SQL, CHAT)
    await stage.until(lambda: len(names(client)) == 2)
    running = client.add_request([1], params(3), adapter="sql")
    await engine.until(lambda: engine.jobs)
    waiting = client.add_request([2], params(3), adapter="sql")
    await stage.until(lambda: coordinator.core.dispatcher.queue.length == 1)
    await set_adapters(link, CHAT)
    with pytest.raises(AdapterNotFoundError, match="no adapter 'sql': they have chat") as rejected:
        await client.add_request([3], params(3), adapter="sql")
    assert rejected.value.code == ErrorCode.ADAPTER_NOT_FOUND == 404
    for _ in range(3):
        engine.step()
    assert (await running)["generated_tokens"] == echo_answer([1], 3, adapter=SQL)
    with pytest.raises(AdapterNotFoundError):
        await waiting


async def test_tokens_of_one_source_are_not_continued_by_another(stage, params, set_adapters) -> None:
    stage.coordinator()
    old = await stage.engine("old", step_seconds=None)
    link, client = await stage.admin(), await stage.client()
    await set_adapters(link, SQL)
    await stage.until(lambda: names(client) == ["sql"])
    begun = client.add_request_streaming([1], params(5), adapter="sql")
    fresh = client.add_request([2], params(5), adapter="sql")
    await old.until(lambda: len(old.jobs) == 2)
    other = Adapter("sql", "/adapters/sql-2")
    await set_adapters(link, other)
    old.jobs = {number: job for number, job in old.jobs.items() if job.dispatch.meta.streaming}
    old.step()
    items = aiter(begun)
    await anext(items)
    await stage.engine("new")
    old.leave()
    with pytest.raises(ModelChangedError, match="the source of the adapter 'sql' changed"):
        await anext(items)
    assert (await fresh)["generated_tokens"] == echo_answer([2], 5, adapter=other)


async def test_requests_of_a_lost_engine_continue_with_their_adapter(stage, params, collect, set_adapters) -> None:
    stage.coordinator()
    first = await stage.engine("first", step_seconds=None)
    link, client = await stage.admin(), await stage.client()
    await set_adapters(link, SQL)
    await stage.until(lambda: names(client) == ["sql"])
    streams = [client.add_request_streaming([n], params(6), adapter=name) for n, name in ((1, "sql"), (2, ""))]
    await first.until(lambda: len(first.jobs) == 2)
    first.step()
    await stage.engine("second")
    first.close()
    (_, sql), (_, base) = await asyncio.gather(*map(collect, streams))
    assert sql["generated_tokens"] == echo_answer([1], 6, adapter=SQL)
    assert base["generated_tokens"] == echo_answer([2], 6)


async def test_a_restarted_coordinator_takes_the_newest_list_from_its_engines(stage, params, set_adapters) -> None:
    stage.coordinator(timing=RECOVERS)
    newer = AdapterList((SQL, CHAT), generation=7)
    behind = await stage.engine("behind", adapters=AdapterList((SQL,), generation=6))
    current = await stage.engine("current", adapters=newer)
    client, link = await stage.client(), await stage.admin()
    waiting = client.add_request([1], params(3), adapter="chat")  # the coordinator does not know the list yet
    await behind.until(lambda: behind.adapters == newer)
    assert current.adapters == newer
    assert (await waiting)["generated_tokens"] == echo_answer([1], 3, adapter=CHAT)
    await set_adapters(link, CHAT)
    await current.until(lambda: current.adapters == AdapterList((CHAT,), generation=8))


async def test_a_client_that_knows_no_list_rejects_at_once(stage, params) -> None:
    _, _, client = await stage.all()
    with pytest.raises(AdapterNotFoundError, match="SET_ADAPTERS was never sent"):
        await client.add_request([1], params(3), adapter="sql")


async def test_an_engine_that_missed_the_commit_gets_the_list_again(stage, set_adapters) -> None:
    stage.coordinator(timing=HEALS)
    engine = await stage.engine()
    link = await stage.admin()
    commit, engine._commit = engine._commit, lambda _: None
    await set_adapters(link, SQL)
    assert engine.adapters == AdapterList()
    engine._commit = commit
    await engine.until(lambda: engine.adapters == AdapterList((SQL,), generation=1))


async def test_requests_of_one_adapter_share_prefixes_with_no_others(stage, params, set_adapters) -> None:
    coordinator = stage.coordinator(routing_policy=RoutingPolicy.LONGEST_PREFIX)
    await stage.engine("engine-0", block_size_tokens=4)
    await stage.engine("engine-1", block_size_tokens=4)
    link, client = await stage.admin(), await stage.client()
    await set_adapters(link, SQL)
    await stage.until(lambda: names(client) == ["sql"])
    prompt = list(range(1, 9))
    router = coordinator.core.router
    await client.add_request(prompt, params(1))
    [base] = [set(held) for held in router.blocks._held.values()]
    await client.add_request(prompt, params(1), adapter="sql")
    known = set().union(*router.blocks._held.values())
    frame = b"".join(token.to_bytes(4, "little") for token in prompt)
    assert base == set(frame_hashes(frame, 4))
    assert known - base == set(frame_hashes(frame, 4, adapter=SQL.key))
    assert len(known) == 4
