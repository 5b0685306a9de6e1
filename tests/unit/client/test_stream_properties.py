"""A stream gives the whole answer in any partition: stop texts, characters of several bytes, log-probs,
engines that die on the way.

The engine's output stage and the client are real. Instead of a socket, the test passes the messages on, and drops or
repeats some.
"""

import asyncio
from typing import Any

import pytest
from byte_tokenizer import ByteTokenizer
from hypothesis import given
from hypothesis import strategies as st
from scripted_pool import read

from megatron_runtime.client.coordinator_client import CoordinatorClient
from megatron_runtime.engine.engine_request import RequestOutput
from megatron_runtime.engine.output_stage import OutputStage
from megatron_runtime.protocol.messages import (
    Dispatch,
    Final,
    Partial,
    PartialEntry,
    Submit,
    decode,
    pack,
    tokens_to_bytes,
)
from megatron_runtime.requests.sampling_params import SamplingParams

ALPHABET = "abé€🙂"
TEXTS = st.text(ALPHABET, max_size=24)
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3)


class Engine:
    """Simulates one engine for a client: byte `b` of a text is token `b`."""

    def __init__(self, client: CoordinatorClient, submit: Submit, dispatch_id: int) -> None:
        self.finished_early = False
        self.generated = len(submit.generated) // 4
        params = SamplingParams.deserialize(client.requests[0].sampling_params.serialize())
        self.dispatch = Dispatch(
            dispatch_id, submit.uid, 1, submit.meta, submit.prompt, submit.generated, submit.params
        )
        self.stage = OutputStage(
            send=lambda frames: client._on_message(decode(frames)),
            finish_early=lambda _: setattr(self, "finished_early", True),
            tokenizer=ByteTokenizer,
        )
        self.stage.add(self.dispatch, params, list(submit.generated[::4]))

    def step(self, token: int, *, last: bool) -> None:
        self.stage.step([RequestOutput(self.dispatch.dispatch_id, [token], 1, "length" if last else None)])


def client_with_request(params: SamplingParams, submits: list[Submit]) -> tuple[CoordinatorClient, Any]:
    client = CoordinatorClient(1)
    client._link.send = lambda frames: submits.append(decode(frames))
    return client, client.add_request_streaming([1], params)


def answer(text: str, stops: list[str]) -> str:
    """Return the expected text, up to the first stop text that is complete."""
    for end in range(len(text) + 1):
        found = [text[:end].find(stop) for stop in stops if stop in text[:end]]
        if found:
            return text[: min(found)]
    return text


@pytest.mark.slow
@given(TEXTS.filter(bool), STOPS, st.integers(1, 5), st.data())
def test_partials_are_a_prefix_of_the_answer_after_any_engine_failures(text, stops, interval, data) -> None:
    async def play() -> None:
        params = SamplingParams(stop_words=stops, streaming_interval=interval, num_tokens_to_generate=200)
        submits: list[Submit] = []
        client, stream = client_with_request(params, submits)
        tokens = text.encode()
        engine = Engine(client, submits[0], 1)
        while client._open and engine.generated < len(tokens):
            if data.draw(st.booleans(), label="the engine dies"):
                engine = Engine(client, client.requests[0].submit(), engine.dispatch.dispatch_id + 1)
                continue
            engine.step(tokens[engine.generated], last=engine.generated + 1 == len(tokens))
            engine.generated += 1
        streamed, final = await read(stream)
        assert streamed == final["generated_tokens"][: len(streamed)]
        assert final["generated_tokens"] == list(tokens[: len(final["generated_tokens"])])
        whole = answer(text, stops)
        shown = bytes(streamed).decode(errors="ignore")
        assert whole.startswith(shown), "text was shown and then withdrawn"
        if final["finish_reason"] == "stop":
            assert final["generated_text"] == whole
        else:
            assert bytes(final["generated_tokens"]).decode() == whole == text
        assert client.requests == client._open == {}
        client.stop()

    asyncio.run(play())


@given(
    st.lists(st.integers(1, 4), min_size=1, max_size=8),
    st.lists(st.sampled_from(["take", "lose", "repeat", "bare"]), min_size=8, max_size=8),
    st.data(),
)
def test_lost_and_repeated_messages_neither_lose_nor_duplicate_tokens(parts, fates, data) -> None:
    """After a loss the coordinator sends again from where the client is; after a failover the last engine knows only
    the log-probabilities of its own tokens.
    """

    async def play() -> None:
        params = SamplingParams(return_log_probs=True, top_n_logprobs=1)
        client, stream = client_with_request(params, [])
        uid = next(iter(client._open))
        tokens = list(range(100, 100 + sum(parts)))
        log_probs = [-token / 8 for token in tokens]
        top_n = [[[token, -token / 8]] for token in tokens]

        def send(start: int, count: int, *, bare: bool) -> None:
            details = {"log_probs": log_probs[start : start + count], "top_n_logprobs": top_n[start : start + count]}
            if start == 0:
                details["prompt_log_probs"] = [-1.0]
            entry = PartialEntry(uid, 1, start, count)
            extras = b"" if bare else pack({uid: details})
            frames = Partial(1, [entry], tokens_to_bytes(tokens[start : start + count]), extras).to_frames()
            client._on_message(decode(frames))

        bares = False
        start = 0
        for count, fate in zip(parts, fates, strict=False):
            if fate != "lose":
                send(start, count, bare=fate == "bare")
                bares |= fate == "bare"
            if fate == "repeat":
                send(start, count, bare=False)
            if fate == "lose":
                held = client.requests[0].held
                send(held, start + count - held, bare=False)
            start += count
        known_from = data.draw(st.integers(0, len(tokens)), label="the last engine's first token")
        reply = {
            "generated_log_probs": log_probs[known_from:],
            "generated_top_n_logprobs": top_n[known_from:],
            "log_probs_from": known_from,
        }
        client._on_message(decode(Final(1, uid, tokens_to_bytes(tokens), pack(reply)).to_frames()))
        frames = [item async for item in stream]
        final = frames.pop()["final"]
        partials = [frame["partial"] for frame in frames]
        assert [token for partial in partials for token in partial["new_tokens"]] == tokens
        for partial in partials:
            for position, token in enumerate(partial["new_tokens"]):
                if "new_log_probs" in partial:
                    assert partial["new_log_probs"][position] == -token / 8
                    assert partial["new_top_n_logprobs"][position] == [[token, -token / 8]]
        assert [partial["prompt_log_probs"] for partial in partials if "prompt_log_probs" in partial] in ([[-1.0]], [])
        if "log_probs_from" in final:
            assert bares
            assert final["generated_log_probs"] == log_probs[final["log_probs_from"] :]
        else:
            assert final["generated_log_probs"] == log_probs
            assert final["generated_top_n_logprobs"] == top_n
        client.stop()

    asyncio.run(play())


@pytest.mark.parametrize("asked", [True, False])
async def test_prompt_log_probs_that_came_with_a_partial_are_in_the_final_answer(asked) -> None:
    client, stream = client_with_request(SamplingParams(return_log_probs=True), [])
    uid = next(iter(client._open))
    details = {"prompt_log_probs": [-0.5]} if asked else {}
    frames = Partial(1, [PartialEntry(uid, 1, 0, 1)], tokens_to_bytes([7]), pack({uid: details})).to_frames()
    client._on_message(decode(frames))
    client._on_message(decode(Final(1, uid, tokens_to_bytes([7]), pack({"status": "COMPLETED"})).to_frames()))
    final = [item async for item in stream][-1]["final"]
    assert final["prompt_log_probs"] == ([-0.5] if asked else None)
    client.stop()
