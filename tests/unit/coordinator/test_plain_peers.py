"""Clients and engines that speak the plain protocol only."""

import asyncio
from dataclasses import dataclass
from typing import Self

import numpy as np
import pytest
import zmq
from echo_executor import echo_answer
from eventually import LONG_SECONDS

from megatron_runtime.coordinator.core.settings import Timing
from megatron_runtime.coordinator.core.verbs import MAX_DEFERRED
from megatron_runtime.megatron_core._event_socket import EventSocket
from megatron_runtime.protocol.headers import PROTOCOL_VERSION, Header, Role
from megatron_runtime.protocol.messages import Disconnect, pack, unpack
from megatron_runtime.requests.config import RoutingPolicy
from megatron_runtime.requests.request import pack_array
from megatron_runtime.requests.sampling_params import SamplingParams

RECONNECTS_AT_ONCE = Timing(heartbeat=0.05, suspect=30.0, dead=60.0, recovery=0.0, plain_reconnect=0.2)
PARAMS = {"temperature": 0.0, "num_tokens_to_generate": 4}


class PlainPeer:
    """A DEALER that keeps what it hears: of a message of several frames the list of them."""

    def __init__(self, address: str, *, identity: bytes | None = None) -> None:
        self.context = zmq.Context()
        dealer = self.context.socket(zmq.DEALER)
        if identity is not None:
            dealer.setsockopt(zmq.IDENTITY, identity)
        dealer.connect(address)
        self.heard: asyncio.Queue[list] = asyncio.Queue()
        self.socket = EventSocket(dealer, self._hear)

    def _hear(self, frames: list[bytes]) -> None:
        values = [unpack(frame) for frame in frames]
        self.heard.put_nowait(values if len(values) > 1 else values[0])

    def say(self, *items) -> None:
        self.say_frames(pack(list(items)) if items else b"")

    def say_frames(self, *frames: bytes) -> None:
        self.socket.send(list(frames))

    def registered(self) -> Self:
        """Register as an engine."""
        self.say()
        return self

    async def connected(self) -> Self:
        """Register as a client."""
        self.say(Header.CONNECT)
        assert await self.hear() == [Header.CONNECT_ACK]
        return self

    async def hear(self) -> list:
        return await asyncio.wait_for(self.heard.get(), LONG_SECONDS)

    def close(self) -> None:
        self.socket.close()
        self.context.term()


@pytest.fixture
def plain(stage):
    def connect(role: Role, **options) -> PlainPeer:
        peer = PlainPeer(stage.address(role), **options)
        stage.closers.append(peer.close)
        return peer

    return connect


@pytest.fixture
async def client(stage, plain) -> PlainPeer:
    stage.coordinator(single_port=True)
    return await plain(Role.CLIENT).connected()


def answer_as_engine(message: list, *, tokens: list[int]) -> list:
    return [Header.ENGINE_REPLY, [{"request_id": message[1], "generated_tokens": tokens, "status": "COMPLETED"}]]


@pytest.mark.parametrize("single_port", [True, False])
async def test_a_connect_with_a_version_registers_nothing(stage, plain, single_port) -> None:
    """Such a client continues with HELLO."""
    coordinator = stage.coordinator(single_port=single_port)
    client = plain(Role.CLIENT)
    client.say(Header.CONNECT, PROTOCOL_VERSION)
    assert await client.hear() == [Header.CONNECT_ACK, PROTOCOL_VERSION]
    assert not len(coordinator.core.clients)


async def test_a_plain_client_is_served_by_an_engine_of_ours(stage, client) -> None:
    await stage.engine()
    client.say(Header.SUBMIT_REQUEST, 0, [1, 2], PARAMS, None)
    header, number, reply = await client.hear()
    assert (header, number) == (Header.ENGINE_REPLY, 0)
    assert reply["generated_tokens"] == echo_answer([1, 2], 4)
    assert reply["status"] == "COMPLETED"


async def test_the_parameters_of_a_plain_client_reach_the_engine(stage, client) -> None:
    engine = await stage.engine()
    asked = {"seed": 7, "priority": 3, "cache_salt": "s", "streaming": True}
    client.say(Header.SUBMIT_REQUEST, 0, [1], {**PARAMS, **asked}, None)
    await engine.until(lambda: engine.dispatches)
    meta = engine.dispatches[0].meta
    assert (meta.seed, meta.priority, meta.cache_salt, meta.streaming) == (7, 3, "s", True)
    client.say(Header.SUBMIT_REQUEST, 1, [1], {**PARAMS, "seed": -1, "priority": "high", "cache_salt": 5}, None)
    await engine.until(lambda: len(engine.dispatches) == 2)
    meta = engine.dispatches[1].meta
    assert 0 <= meta.seed < 1 << 64
    assert (meta.priority, meta.cache_salt, meta.streaming) == (0, "", False)


async def test_the_reply_fields_of_a_plain_engine_reach_the_client(stage, plain, params) -> None:
    stage.coordinator(single_port=True)
    engine = plain(Role.ENGINE, identity=b"mp-coord-0").registered()
    client = await stage.client()
    future = client.add_request([1, 2], params(2))
    number = (await engine.hear())[1]
    said = {"finish_reason": "length", "prompt_length": 2, "num_cached_tokens": 1, "generated_log_probs": [-0.5, -1.0]}
    output = {"request_id": number, "generated_tokens": [5, 6], "status": "COMPLETED", **said}
    engine.say(Header.ENGINE_REPLY, [output])
    reply = await future
    assert {key: reply[key] for key in said} == said
    assert (reply["status"], reply["generated_tokens"], reply["generated_length"]) == ("COMPLETED", [5, 6], 2)


async def test_nothing_is_lost_between_a_plain_client_and_a_plain_engine(stage, plain, client) -> None:
    """Parameters and fields of later releases included. Only the id changes, and the text is added if there is none."""
    engine = plain(Role.ENGINE, identity=b"mp-coord-0").registered()
    params = {**PARAMS, "of_a_later_release": {"deep": [1, {"a": b"\0"}]}, "stop_words": None, "top_p": 0.1}
    client.say(Header.SUBMIT_REQUEST, 7, [1, 2], params)
    header, number, prompt, received = await engine.hear()
    assert (header, prompt, received) == (Header.SUBMIT_REQUEST, [1, 2], params)
    fields = {
        "sampling_params": params,
        "events": [{"type": "FINISH", "timestamp": 1.5, "payload": None}],
        "prompt_tokens": ["tensor", [1, 2]],
        "of_a_later_release": [{"x": None}] * 20,
        "status": "COMPLETED",
        "generated_text": "its own",
        **{f"field_{n}": None for n in range(20)},
    }
    engine.say(Header.ENGINE_REPLY, [{"request_id": number, "generated_tokens": [5, 6], **fields}])
    assert await client.hear() == [
        Header.ENGINE_REPLY,
        7,
        {"request_id": 7, "generated_tokens": [5, 6], **fields},
    ]


OF_0_20 = {
    "submit": (
        "94140787ab74656d7065726174757265cb3ff0000000000000a5746f705f6b00a5746f705f70cb0000000000000000b66e756d5f746f6b656e"
        "735f746f5f67656e657261746502b472657475726e5f70726f6d70745f746f6b656e73c2ad646f5f6b765f68616e646f6666c2b66465746f6b"
        "656e697a655f67656e65726174696f6e73c3c0",
        "93030102",
        "90",
        "c0",
    ),
    "reply": (
        "86aa726571756573745f696400a6737461747573a9434f4d504c45544544b067656e6572617465645f746f6b656e73920506ae67656e657261"
        "7465645f74657874c0ad70726f6d70745f746f6b656e73c0a66576656e747390"
    ),
    "partial": "82aa726571756573745f696400aa6e65775f746f6b656e739105",
}
"""Recorded frames of 0.20: SUBMIT_REQUEST 7 of a client with the prompt [3, 1, 2], and the bodies of an engine."""
SUBMIT_OF_0_20 = [bytes.fromhex(frame) for frame in OF_0_20["submit"]]
PARAMS_OF_0_20 = unpack(SUBMIT_OF_0_20[0])[2]
REPLY_OF_0_20 = bytes.fromhex(OF_0_20["reply"])


async def test_frames_of_0_20_pass_between_a_client_and_an_engine_of_that_release(stage, plain, client) -> None:
    """The engine registers first, and tells nothing."""
    engine = plain(Role.ENGINE, identity=b"mp-coord-0").registered()
    await stage.until(lambda: len(stage.coordinators[-1].core.engines) == 1)
    client.say_frames(*SUBMIT_OF_0_20)
    (header, number, params, media), prompt, media_frame = await engine.hear()
    assert (header, params, media) == (Header.SUBMIT_REQUEST, PARAMS_OF_0_20, None)
    assert (prompt, media_frame) == ([3, 1, 2], None)
    engine.say_frames(pack([Header.ENGINE_REPLY_PARTIAL, [number]]), bytes.fromhex(OF_0_20["partial"]))
    engine.say_frames(pack([Header.ENGINE_REPLY, [[number, False]]]), REPLY_OF_0_20)
    metadata, reply = await client.hear()
    assert metadata == [Header.ENGINE_REPLY, 7]
    assert reply == {**unpack(REPLY_OF_0_20), "request_id": 7}


async def test_a_batch_of_many_bodies_reaches_their_clients(stage, plain, client) -> None:
    engine = plain(Role.ENGINE, identity=b"mp-coord-0").registered()
    numbers = []
    metadata = unpack(SUBMIT_OF_0_20[0])
    for number in range(100):
        client.say_frames(pack([metadata[0], number, *metadata[2:]]), *SUBMIT_OF_0_20[1:])
        numbers.append((await engine.hear())[0][1])
    engine.say_frames(pack([Header.ENGINE_REPLY, [[number, True] for number in numbers]]), *[REPLY_OF_0_20] * 100)
    assert [(await client.hear())[0][1] for _ in range(100)] == list(range(100))


@pytest.mark.parametrize("client_is_new", [True, False])
async def test_a_client_and_an_engine_may_have_different_releases(stage, plain, client_is_new) -> None:
    """The engine has registered, and been sent a request, before the client of the other release came."""
    stage.coordinator(single_port=True, plain_release="0.17" if client_is_new else "0.20")
    engine = plain(Role.ENGINE, identity=b"mp-coord-0").registered()
    native = (await stage.client()).add_request([1], SamplingParams(num_tokens_to_generate=2))
    message = await engine.hear()
    assert (len(message) == 3) is not client_is_new
    client = await plain(Role.CLIENT).connected()
    if client_is_new:
        engine.say(*answer_as_engine(message, tokens=[5, 6]))
        client.say_frames(*SUBMIT_OF_0_20)
        _, number, prompt, params = await engine.hear()
        assert (prompt, params) == ([3, 1, 2], PARAMS_OF_0_20)
        engine.say(*answer_as_engine([0, number], tokens=[5, 6]))
        metadata, reply = await client.hear()
        assert (metadata, reply["request_id"]) == ([Header.ENGINE_REPLY, 7], 7)
    else:
        engine.say_frames(pack([Header.ENGINE_REPLY, [[message[0][1], True]]]), REPLY_OF_0_20)
        client.say(Header.SUBMIT_REQUEST, 7, [3, 1, 2], PARAMS)
        (_, number, params, media), prompt, _ = await engine.hear()
        assert (prompt, params, media) == ([3, 1, 2], PARAMS, None)
        engine.say_frames(pack([Header.ENGINE_REPLY, [[number, True]]]), REPLY_OF_0_20)
        header, number, reply = await client.hear()
        assert (header, number, reply["request_id"]) == (Header.ENGINE_REPLY, 7, 7)
    assert reply["generated_tokens"] == [5, 6]
    assert (await native)["generated_tokens"] == [5, 6]


async def test_an_engine_of_ours_answers_a_client_of_0_20(stage, client) -> None:
    await stage.engine()
    client.say_frames(*SUBMIT_OF_0_20)
    metadata, reply = await client.hear()
    assert metadata == [Header.ENGINE_REPLY, 7]
    assert reply["generated_tokens"] == echo_answer([3, 1, 2], 2)
    assert reply["sampling_params"] == PARAMS_OF_0_20


async def test_frames_of_0_20_that_are_none_fail_their_request(stage, client) -> None:
    await stage.engine()
    metadata, prompt, hashes, media = SUBMIT_OF_0_20
    for frames, cause in (
        ((metadata, prompt, hashes), "3 frames"),
        ((metadata, pack([-1]), hashes, media), "token -1"),
        ((metadata, prompt, hashes, pack(b"image")), "multimodal"),
        ((metadata, prompt + prompt, hashes, media), "follow its list"),
        ((metadata, prompt[:-1], hashes, media), "not a msgpack list"),
        ((metadata, pack({}), hashes, media), "want a text or token ids"),
    ):
        client.say_frames(*frames)
        (header, number), reply = await client.hear()
        assert (header, number, reply["status"]) == (Header.ENGINE_REPLY, 7, "FAILED")
        assert cause in reply["events"][0]["payload"]["message"]


async def test_what_can_be_read_of_a_reply_can_be_packed(stage, plain, client) -> None:
    """As deep as msgpack reads. A deeper one is malformed."""
    engine = plain(Role.ENGINE, identity=b"mp-coord-0").registered()
    client.say(Header.SUBMIT_REQUEST, 0, [1], PARAMS)
    number = (await engine.hear())[1]
    begin = b"\x92" + pack(Header.ENGINE_REPLY) + b"\x91\x82" + pack("request_id") + pack(number) + pack("deep")
    core = stage.coordinators[-1].core
    for levels in range(1100, 900, -1):
        engine.say_frames(begin + b"\x91" * levels + b"\x90")
    await stage.until(lambda: core.counters.completed == 1)
    assert 0 < core.counters.rejected["malformed"] < 200
    assert not stage.coordinators[-1].transport.handler_errors


ROUTING = [[[0, 2], [3, 1]], [[1, 0], [2, 3]]]


async def test_a_plain_client_gets_routing_indices_as_a_tensor(stage, plain, client) -> None:
    """Of an engine of this project, which sends an array, and of a plain one."""
    ours = await stage.engine(reply_fields={"routing_indices": pack_array(np.array(ROUTING, np.uint8))})
    client.say(Header.SUBMIT_REQUEST, 0, [1, 2], PARAMS)
    assert (await client.hear())[2]["routing_indices"] == ["tensor", ROUTING]
    ours.send(Disconnect())
    await stage.until(lambda: not len(stage.coordinators[-1].core.engines))
    theirs = plain(Role.ENGINE, identity=b"mp-coord-0").registered()
    client.say(Header.SUBMIT_REQUEST, 1, [1, 2], PARAMS)
    message = await theirs.hear()
    header, (answer,) = answer_as_engine(message, tokens=[9])
    theirs.say(header, [{**answer, "routing_indices": ("tensor", ROUTING)}])
    assert (await client.hear())[2]["routing_indices"] == ["tensor", ROUTING]


async def test_plain_clients_are_bounded_in_number_like_others(stage, plain) -> None:
    coordinator = stage.coordinator(single_port=True, max_clients=1)
    first, second = plain(Role.CLIENT), plain(Role.CLIENT)
    first.say(Header.CONNECT)
    assert await first.hear() == [Header.CONNECT_ACK]
    second.say(Header.CONNECT)
    header, *told = await second.hear()
    assert header == Header.ERROR
    assert "1 clients are registered already" in str(told)
    assert coordinator.core.status().rejected_frames == 1
    first.say(Header.DISCONNECT)
    await stage.until(lambda: len(coordinator.core.clients) == 0)
    second.say(Header.CONNECT)
    assert await second.hear() == [Header.CONNECT_ACK]


async def test_a_plain_client_gets_partials_and_may_leave_the_last_field_out(stage, client) -> None:
    engine = await stage.engine(step_seconds=None)
    client.say(Header.SUBMIT_REQUEST, 7, [1], {**PARAMS, "streaming": True})
    await engine.until(lambda: engine.jobs)
    tokens = []
    for _ in range(4):
        engine.step()
        header, number, frame = await client.hear()
        assert (header, number, frame["request_id"]) == (Header.ENGINE_REPLY_PARTIAL, 7, 7)
        tokens += frame["new_tokens"]
    assert (await client.hear())[2]["generated_tokens"] == tokens == echo_answer([1], 4)


async def test_a_client_of_ours_is_served_by_a_plain_engine(stage, plain, params, collect) -> None:
    stage.coordinator(single_port=True)
    engine = plain(Role.ENGINE, identity=b"mp-coord-0").registered()
    client = await stage.client()
    stream = client.add_request_streaming([1, 2], params(3))
    message = await engine.hear()
    assert (message[0], message[2], message[3]["num_tokens_to_generate"]) == (Header.SUBMIT_REQUEST, [1, 2], 3)
    engine.say(Header.ENGINE_REPLY_PARTIAL, [{"request_id": message[1], "new_tokens": [5, 6]}])
    engine.say(*answer_as_engine(message, tokens=[5, 6, 7]))
    tokens, final = await collect(stream)
    assert tokens == [5, 6]
    assert final["generated_tokens"] == [5, 6, 7]
    assert (await client.status()).engines[0].name == "mp-coord-0"


async def test_a_plain_engine_continues_a_request_as_a_longer_prompt(stage, plain, params, collect) -> None:
    stage.coordinator(single_port=True)
    first = await stage.engine(step_seconds=None)
    client = await stage.client()
    stream = client.add_request_streaming([1], params(5))
    await first.until(lambda: first.jobs)
    first.step()
    first.step()
    for _ in range(2):
        await anext(stream)
    second = plain(Role.ENGINE).registered()
    first.leave()
    message = await second.hear()
    expected = echo_answer([1], 5)
    assert message[2] == [1, *expected[:2]]
    assert message[3]["num_tokens_to_generate"] == 3
    second.say(*answer_as_engine(message, tokens=expected[2:]))
    _, final = await collect(stream)
    assert final["generated_tokens"] == expected
    assert final["generated_length"] == 5


@pytest.mark.parametrize("continues", ["plain", "ours"])
async def test_a_plain_client_gets_all_log_probs_after_a_replay(stage, plain, client, continues) -> None:
    first = plain(Role.ENGINE, identity=b"mp-coord-0").registered()
    params = {**PARAMS, "num_tokens_to_generate": 5, "streaming": True, "return_log_probs": True}
    client.say(Header.SUBMIT_REQUEST, 7, [1], params)
    number = (await first.hear())[1]
    expected = echo_answer([1], 5)
    for token in expected[:2]:
        partial = {"request_id": number, "new_tokens": [token], "new_log_probs": [-0.5]}
        first.say(Header.ENGINE_REPLY_PARTIAL, [partial])
        assert (await client.hear())[2]["new_log_probs"] == [-0.5]
    first.say(Header.DISCONNECT)
    own = [-1.0, -2.0, -3.0]
    if continues == "plain":
        second = plain(Role.ENGINE).registered()
        header, (answer,) = answer_as_engine(await second.hear(), tokens=expected[2:])
        second.say(header, [{**answer, "generated_log_probs": own, "of_a_later_release": [1]}])
    else:
        await stage.engine(reply_fields={"generated_log_probs": own, "log_probs_from": 2})
    log_probs = [-0.5, -0.5, *own]
    reply = await client.hear()
    while reply[0] == Header.ENGINE_REPLY_PARTIAL:
        reply = await client.hear()
    assert reply[2]["generated_tokens"] == expected
    assert reply[2]["generated_log_probs"] == log_probs
    assert reply[2].get("of_a_later_release") == ([1] if continues == "plain" else None)


async def test_an_answer_that_a_plain_engine_continues_keeps_the_epochs_of_its_first_tokens(
    stage, plain, params, collect
) -> None:
    """Whether a client of this project asked for it or one of Megatron-Core."""
    coordinator = stage.coordinator(single_port=True)
    first = plain(Role.ENGINE, identity=b"mp-coord-0").registered()
    client, theirs = await stage.client(), await plain(Role.CLIENT).connected()
    await stage.until(lambda: len(coordinator.core.engines) == 1)
    stream = client.add_request_streaming([1], params(5))
    messages = [await first.hear()]
    theirs.say(Header.SUBMIT_REQUEST, 7, [1], {**PARAMS, "num_tokens_to_generate": 5, "streaming": True})
    messages.append(await first.hear())
    for epoch, token in ((3, 30), (4, 40)):
        theirs.say(Header.SET_GENERATION_EPOCH, epoch)
        assert await first.hear() == [Header.SET_GENERATION_EPOCH, epoch]
        await stage.until(lambda epoch=epoch: coordinator.core.verbs.epoch == epoch)
        partials = [{"request_id": message[1], "new_tokens": [token]} for message in messages]
        first.say(Header.ENGINE_REPLY_PARTIAL, partials)
        assert (await theirs.hear())[2]["new_tokens"] == [token]
    second = plain(Role.ENGINE, identity=b"mp-coord-1").registered()
    assert await second.hear() == [Header.SET_GENERATION_EPOCH, 4]
    first.say(Header.DISCONNECT)
    for _ in messages:
        message = await second.hear()
        assert message[2] == [1, 30, 40]
        header, (answer,) = answer_as_engine(message, tokens=[5, 6, 7])
        second.say(header, [{**answer, "policy_epoch": [[0, 4], [4, 5]]}])
    expected = [[0, 3], [1, 4], [4, 5]]
    assert (await theirs.hear())[2]["policy_epoch"] == expected
    assert (await collect(stream))[1]["policy_epoch"] == expected


async def test_the_final_of_a_plain_engine_that_is_lost_doubles_no_token(stage, plain, params, collect) -> None:
    """The final of a plain engine has every token of its dispatch, those of its partials included."""
    coordinator = stage.coordinator(single_port=True)
    first = await stage.engine(step_seconds=None)
    client = await stage.client()
    stream = client.add_request_streaming([1], params(5))
    await first.until(lambda: first.jobs)
    first.step()
    tokens = (await anext(stream))["partial"]["new_tokens"]
    second = plain(Role.ENGINE, identity=b"mp-coord-0").registered()
    first.leave()
    message = await second.hear()
    expected = echo_answer([1], 5)
    second.say(Header.ENGINE_REPLY_PARTIAL, [{"request_id": message[1], "new_tokens": expected[1:3]}])
    tokens += (await anext(stream))["partial"]["new_tokens"]
    second.say(Header.DISCONNECT)
    await stage.until(lambda: not coordinator.core.engines.named("mp-coord-0"))
    second.say(*answer_as_engine(message, tokens=expected[1:]))
    rest, final = await collect(stream)
    assert final["generated_tokens"] == expected
    assert tokens == expected[:3]
    assert tokens + rest == expected[: len(tokens + rest)]
    assert coordinator.core.counters.late == 1


async def test_a_plain_client_aborts_by_its_own_number(stage, client) -> None:
    engine = await stage.engine(step_seconds=None)
    client.say(Header.SUBMIT_REQUEST, 3, [1], PARAMS, None)
    await engine.until(lambda: engine.jobs)
    client.say(Header.ABORT_REQUEST, 99)
    client.say(Header.ABORT_REQUEST, 3)
    await engine.until(lambda: engine.aborted)


async def test_plain_control_reaches_plain_engines_and_waits_for_ours(stage, client, plain) -> None:
    ours = await stage.engine()
    theirs = plain(Role.ENGINE, identity=b"mp-coord-0").registered()
    coordinator = stage.coordinators[-1]
    await stage.until(lambda: len(coordinator.core.engines) == 2)
    client.say(Header.UNPAUSE)  # not legal now: reaches no engine
    client.say(Header.PAUSE)
    assert await theirs.hear() == [Header.PAUSE]
    await stage.until(lambda: coordinator.core.verbs.state == "PAUSED")
    # One after the other, and no answer in between: each waits for the end of the one before.
    client.say(Header.SET_GENERATION_EPOCH, 9)
    client.say(Header.START_CUDA_PROFILER)
    client.say(Header.UNPAUSE)
    assert await theirs.hear() == [Header.SET_GENERATION_EPOCH, 9]
    assert await theirs.hear() == [Header.START_CUDA_PROFILER]
    assert await theirs.hear() == [Header.UNPAUSE]
    once = dict.fromkeys((Header.PAUSE, Header.SET_GENERATION_EPOCH, Header.START_CUDA_PROFILER, Header.UNPAUSE), 1)
    await ours.until(lambda: ours.acted == once)
    assert ours.epoch == 9
    assert client.heard.empty()


async def test_plain_control_messages_wait_as_far_as_there_is_room(stage, client) -> None:
    ours = await stage.engine(mute={Header.PAUSE})
    coordinator = stage.coordinators[-1]
    client.say(Header.PAUSE)
    await stage.until(lambda: coordinator.core.verbs.current is not None)
    for epoch in range(1, MAX_DEFERRED + 4):
        client.say(Header.SET_GENERATION_EPOCH, epoch)
    client.say(Header.SUBMIT_REQUEST, 0, [1], "no parameters")
    await client.hear()  # all that was said before has been heard
    assert coordinator.core.verbs.epoch == 0
    ours.close()  # what is under way ends with it
    await stage.until(lambda: coordinator.core.verbs.current is None)
    assert coordinator.core.verbs.epoch == MAX_DEFERRED


async def test_errors_reach_a_plain_client_as_failed_replies(stage, client) -> None:
    await stage.engine()  # it has no tokenizer
    for number, items in enumerate(([[1], "params"], [[-1], PARAMS], ["text", PARAMS], [[1], PARAMS, {"image": 1}])):
        client.say(Header.SUBMIT_REQUEST, number, *items)
        header, answered, reply = await client.hear()
        assert (header, answered, reply["status"]) == (Header.ENGINE_REPLY, number, "FAILED")
        error, failed = reply["events"]
        assert (error["type"], failed["type"]) == ("ERROR_NONTRANSIENT", "FAIL")
        assert error["payload"]["is_transient"] is False
        assert error["payload"]["message"]


async def test_a_plain_engine_that_leaves_and_comes_back(stage, plain, params) -> None:
    coordinator = stage.coordinator(single_port=True)
    engine = plain(Role.ENGINE, identity=b"mp-coord-0").registered()
    await stage.until(lambda: len(coordinator.core.engines) == 1)
    engine.say(Header.DISCONNECT)
    await stage.until(lambda: len(coordinator.core.engines) == 0)
    engine.say()
    client = await stage.client()
    future = client.add_request([1], params(1))
    engine.say(*answer_as_engine(await engine.hear(), tokens=[9]))
    assert (await future)["generated_tokens"] == [9]


async def test_malformed_output_of_a_plain_engine_changes_nothing(stage, plain, params) -> None:
    coordinator = stage.coordinator(single_port=True)
    engine = plain(Role.ENGINE).registered()
    client = await stage.client()
    future = client.add_request([1], params(1))
    message = await engine.hear()
    tokens = [{"request_id": message[1], "generated_tokens": found} for found in (["a"], 7)]
    for broken in ("x", [1], [{"no": "id"}], *([output] for output in tokens)):
        engine.say(Header.ENGINE_REPLY, broken)
    await stage.until(lambda: coordinator.core.counters.rejected["malformed"] == 5)
    engine.say(*answer_as_engine([0, 12345], tokens=[1]))
    engine.say(*answer_as_engine(message, tokens=[9]))
    assert (await future)["generated_tokens"] == [9]
    assert coordinator.core.counters.stale == 1


async def test_shutdown_ends_the_coordinator_of_one_port_and_no_other(stage, client) -> None:
    client.say(Header.SHUTDOWN)
    await asyncio.wait_for(stage.coordinators[-1].ended.wait(), LONG_SECONDS)


async def test_a_plain_engine_that_reconnects_continues_with_its_identity(stage, plain) -> None:
    """It registers only once. An engine of this runtime would register again, and is lost with its connection."""
    coordinator = stage.coordinator(single_port=True)
    plain(Role.ENGINE, identity=b"mp-coord-0").registered()
    await stage.until(lambda: len(coordinator.core.engines) == 1)
    client = await plain(Role.CLIENT).connected()
    client.say(Header.SUBMIT_REQUEST, 0, [1, 2], PARAMS, None)
    await stage.until(lambda: coordinator.core.engines.in_flight() == 1)
    stage.closers.pop(-2)()
    await stage.until(lambda: len(coordinator.transport._connections) == 1)
    [number] = [number for number, _ in coordinator.core.engines.dispatched()]
    again = plain(Role.ENGINE, identity=b"mp-coord-0")
    again.say(Header.ENGINE_REPLY, [{"request_id": number, "generated_tokens": [5, 6, 7, 8], "status": "COMPLETED"}])
    header, _, reply = await client.hear()
    assert header == Header.ENGINE_REPLY
    assert reply["generated_tokens"] == [5, 6, 7, 8]
    assert coordinator.core.counters.engines_lost == 0


async def test_kv_handoff_is_answered_as_unsupported_and_its_release_not_at_all(client) -> None:
    """A client expects no answer to the release, and would end."""
    client.say(Header.RELEASE_KV, 2)
    client.say(Header.SUBMIT_REQUEST_WITH_KV, 3, [1, 2], PARAMS, {}, [0])
    client.say(Header.SUBMIT_REQUEST, 4, [1, 2], {**PARAMS, "do_kv_handoff": True})
    for expected in (3, 4):
        kind, number, reply = await client.hear()
        assert (kind, number, reply["status"]) == (Header.ENGINE_REPLY, expected, "FAILED")
        event = reply["events"][0]
        assert (event["type"], event["payload"]["is_transient"]) == ("ERROR_NONTRANSIENT", False)
        assert "UnsupportedByBackend" in event["payload"]["message"]


async def test_the_request_of_a_plain_engine_that_vanished_is_replayed(stage, plain) -> None:
    """No message is sent to it that could fail."""
    assert Timing().plain_reconnect < 10
    coordinator = stage.coordinator(single_port=True, timing=RECONNECTS_AT_ONCE)
    plain(Role.ENGINE, identity=b"mp-coord-0").registered()
    await stage.until(lambda: len(coordinator.core.engines) == 1)
    client = await plain(Role.CLIENT).connected()
    client.say(Header.SUBMIT_REQUEST, 0, [1, 2], PARAMS, None)
    await stage.until(lambda: coordinator.core.engines.in_flight() == 1)
    await stage.engine()
    stage.closers.pop(0)()
    assert (await client.hear())[2]["generated_tokens"] == echo_answer([1, 2], 4)


async def test_a_text_prompt_is_forwarded_to_an_engine_that_tokenizes(stage, plain, client) -> None:
    client.say(Header.SUBMIT_REQUEST, 0, "some text", PARAMS)
    engine = plain(Role.ENGINE, identity=b"mp-coord-0").registered()
    message = await engine.hear()
    assert message[2] == "some text"
    engine.say(*answer_as_engine(message, tokens=[9]))
    assert (await client.hear())[2]["generated_tokens"] == [9]


async def test_a_lost_text_prompt_with_tokens_is_not_continued_by_a_plain_engine(stage, plain, client) -> None:
    first, second = plain(Role.ENGINE, identity=b"mp-coord-0"), plain(Role.ENGINE, identity=b"mp-coord-1")
    first.say()
    client.say(Header.SUBMIT_REQUEST, 0, "some text", {**PARAMS, "streaming": True})
    message = await first.hear()
    first.say(Header.ENGINE_REPLY_PARTIAL, [{"request_id": message[1], "new_tokens": [5]}])
    assert (await client.hear())[2]["new_tokens"] == [5]
    second.say()
    await stage.until(lambda: len(stage.coordinators[-1].core.engines) == 2)
    first.say(Header.DISCONNECT)
    reply = (await client.hear())[2]
    assert reply["status"] == "FAILED"
    assert (
        "mp-coord-1 cannot tokenize the prompt, and this coordinator has no tokenizer"
        in (reply["events"][0]["payload"]["message"])
    )


async def test_a_coordinator_with_a_tokenizer_tokenizes_what_a_plain_engine_cannot_continue(stage, plain) -> None:
    stage.coordinator(single_port=True, tokenizer=Tokenizer(detokenizes=True))
    client = await plain(Role.CLIENT).connected()
    first, second = plain(Role.ENGINE, identity=b"mp-coord-0"), plain(Role.ENGINE, identity=b"mp-coord-1")
    first.say()
    client.say(Header.SUBMIT_REQUEST, 0, "some text", {**PARAMS, "streaming": True})
    message = await first.hear()
    assert message[2] == "some text"
    first.say(Header.ENGINE_REPLY_PARTIAL, [{"request_id": message[1], "new_tokens": [5]}])
    assert (await client.hear())[2]["new_tokens"] == [5]
    second.say()
    await stage.until(lambda: len(stage.coordinators[-1].core.engines) == 2)
    first.say(Header.DISCONNECT)
    continued = await second.hear()
    assert (continued[2], continued[3]["num_tokens_to_generate"]) == ([1, 2, 5], 3)
    second.say(*answer_as_engine(continued, tokens=[6]))
    assert (await client.hear())[2]["generated_tokens"] == [5, 6]


@pytest.mark.parametrize(
    ("policy", "prompt"),
    [(RoutingPolicy.LOAD_BALANCED, "some text"), (RoutingPolicy.LONGEST_PREFIX, [1, 2])],
)
async def test_only_a_choice_by_prefix_needs_the_tokens_of_a_text(stage, plain, params, policy, prompt) -> None:
    """Of a plain client and of a client of this project."""
    stage.coordinator(single_port=True, tokenizer=Tokenizer(detokenizes=True), routing_policy=policy)
    engine, client = plain(Role.ENGINE, identity=b"mp-coord-0"), plain(Role.CLIENT)
    engine.say()
    client.say(Header.CONNECT)
    await client.hear()
    client.say(Header.SUBMIT_REQUEST, 0, "some text", PARAMS)
    assert (await engine.hear())[2] == prompt
    future = (await stage.client()).add_request("some text", params(2))
    message = await engine.hear()
    assert message[2] == prompt
    engine.say(*answer_as_engine(message, tokens=[5, 6]))
    assert (await future)["generated_tokens"] == [5, 6]


@dataclass
class Tokenizer:
    """Raises, or returns no tokens, for some texts and answers."""

    detokenizes: bool = False

    def tokenize(self, text: str) -> list:
        if text == "raises":
            raise RuntimeError("no tokens for this text")
        return ["a"] if text == "wrong" else [1, 2]

    def detokenize(self, tokens: list[int]) -> str:
        if not self.detokenizes:
            raise RuntimeError("no text for these tokens")
        return " ".join(map(str, tokens))


@pytest.mark.parametrize("detokenizes", [True, False])
async def test_a_tokenizer_that_raises_answers_the_sender(stage, plain, detokenizes) -> None:
    stage.coordinator(single_port=True, tokenizer=Tokenizer(detokenizes))
    await stage.engine()
    client = await plain(Role.CLIENT).connected()
    for number, text in enumerate(("raises", "wrong")):
        client.say(Header.SUBMIT_REQUEST, number, text, PARAMS)
        _, answered, reply = await client.hear()
        assert (answered, reply["status"]) == (number, "FAILED")
        assert "cannot be tokenized" in reply["events"][0]["payload"]["message"]
    client.say(Header.SUBMIT_REQUEST, 2, "text", PARAMS)
    reply = (await client.hear())[2]
    assert reply["generated_tokens"] == echo_answer([1, 2], 4)
    assert reply.get("generated_text") == (" ".join(map(str, reply["generated_tokens"])) if detokenizes else None)
