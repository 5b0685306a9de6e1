"""The work that LeastCost counts for each engine: from a dispatch to its first token, corrected by heartbeats."""

import pytest
from coordinator_tables import check_tables

from megatron_runtime.coordinator.core.context import RATE_SECONDS
from megatron_runtime.coordinator.core.settings import RoutingPolicy
from megatron_runtime.protocol.lifecycle import EngineState
from megatron_runtime.protocol.messages import (
    Dispatch,
    Final,
    Heartbeat,
    Partial,
    PartialEntry,
    RequestMeta,
    Submit,
    pack,
    tokens_to_bytes,
)

from .test_core import CLIENT, FIRST, PARAMS, SECOND, Scene

RATES = {"prefill_rate": 1000.0, "decode_rate": 10_000.0}


@pytest.fixture
def scene() -> Scene:
    scene = Scene(routing_policy=RoutingPolicy.LEAST_COST)
    for peer in (FIRST, SECOND):
        scene.engine(peer, block_size_tokens=4, tokenizes=True)
    return scene


def beat(scene: Scene, peer, **fields) -> None:
    scene.say(peer, Heartbeat(incarnation=1, state=EngineState.RUNNING, **fields))


def submit(scene: Scene, number: int, tokens: int) -> tuple[bytes, Dispatch]:
    """Submit a request, and return the name of its engine and its dispatch."""
    uid = number.to_bytes(16, "little")
    scene.take()
    scene.say(CLIENT, Submit(uid, RequestMeta(streaming=True), tokens_to_bytes([number] * tokens), b"", PARAMS))
    [(peer, dispatch)] = [sent for sent in scene.take() if isinstance(sent[1], Dispatch)]
    check_tables(scene.core)
    return peer[1], dispatch


def queued(scene: Scene) -> dict[str, int]:
    return {engine.name: engine.queued for engine in scene.core.engines}


def test_prompts_count_by_their_tokens_until_their_first_token(scene: Scene) -> None:
    for peer in (FIRST, SECOND):
        beat(scene, peer, **RATES)
    scene.driver.advance(1.0)
    engine, long = submit(scene, 1, 1000)
    assert engine == b"first"
    assert [submit(scene, number, 20)[0] for number in (2, 3, 4)] == [b"second"] * 3
    assert queued(scene) == {"first": 1000, "second": 60}
    entry = PartialEntry(long.uid, long.dispatch_id, 0, 1)
    scene.say(FIRST, Partial(long.route, [entry], tokens_to_bytes([7])))
    check_tables(scene.core)
    assert queued(scene) == {"first": 0, "second": 60}
    scene.say(FIRST, Final(long.dispatch_id, long.uid, tokens_to_bytes([7]), pack({"status": "COMPLETED"})))
    check_tables(scene.core)
    assert scene.core.engines.named("first").held == 0


def test_a_heartbeat_corrects_the_requests_that_it_includes(scene: Scene) -> None:
    for peer in (FIRST, SECOND):
        beat(scene, peer, **RATES)
    scene.driver.advance(1.0)
    first = submit(scene, 1, 1000)[1]
    submit(scene, 2, 700)
    third = submit(scene, 3, 500)
    assert third[0] == b"second"
    later = submit(scene, 4, 400)
    assert later[0] == b"first"
    beat(scene, FIRST, queued_tokens=300, last_dispatch=first.dispatch_id, **RATES)
    check_tables(scene.core)
    assert queued(scene) == {"first": 300 + 400, "second": 1200}, "the last dispatch is on its way"
    beat(scene, FIRST, queued_tokens=0, last_dispatch=later[1].dispatch_id, **RATES)
    check_tables(scene.core)
    assert queued(scene)["first"] == 0


def test_requests_are_counted_while_no_engine_reports_rates(scene: Scene) -> None:
    assert [submit(scene, number, 10 if number % 2 else 2000)[0] for number in range(1, 5)] == [
        b"first",
        b"second",
        b"first",
        b"second",
    ]


def test_an_engine_without_rates_has_the_median_and_a_faster_one_its_own(scene: Scene) -> None:
    beat(scene, FIRST, **RATES)
    scene.driver.advance(1.0)
    assert {engine.prefill_cost for engine in scene.core.engines} == {0.001}
    beat(scene, SECOND, prefill_rate=1100.0, decode_rate=10_000.0)
    scene.driver.advance(1.0)
    assert len({engine.prefill_cost for engine in scene.core.engines}) == 1, "noise"
    beat(scene, SECOND, prefill_rate=4000.0, decode_rate=10_000.0)
    scene.driver.advance(1.0)
    assert submit(scene, 1, 1000)[0] == b"second"
    assert submit(scene, 2, 1000)[0] == b"second"


def test_a_cached_prompt_and_a_text_count_what_is_left(scene: Scene) -> None:
    beat(scene, FIRST, **RATES)
    scene.driver.advance(1.0)
    engine, dispatch = submit(scene, 1, 40)
    reply = Final(dispatch.dispatch_id, dispatch.uid, tokens_to_bytes([7]), pack({"status": "COMPLETED"}))
    scene.say((FIRST if engine == b"first" else SECOND), reply)
    uid = b"u" * 16
    prompt = tokens_to_bytes([1] * 40 + [2] * 6)
    scene.say(CLIENT, Submit(uid, RequestMeta(streaming=True), prompt, b"", PARAMS))
    assert queued(scene) == {"first": 6, "second": 0}
    scene.say(CLIENT, Submit(b"t" * 16, RequestMeta(text=True), b"x" * 40, b"", PARAMS))
    assert queued(scene) == {"first": 6, "second": 10}


def test_an_engine_that_was_slow_gets_requests_again(scene: Scene) -> None:
    """Its own rate is used while it gets requests. Otherwise its rate would never be measured again."""
    slow = {**RATES, "prefill_rate": 10.0}

    def beats(seconds: float, **second) -> None:
        for _ in range(int(seconds)):
            beat(scene, FIRST, last_dispatch=1, queued_tokens=0, **RATES)
            beat(scene, SECOND, last_dispatch=2, queued_tokens=0, **second)
            scene.driver.advance(1.0)

    beats(2, **slow)
    assert [submit(scene, number, 100)[0] for number in (1, 2, 3)] == [b"first"] * 3
    beats(RATE_SECONDS, **slow)
    assert submit(scene, 4, 100)[0] == b"second"
