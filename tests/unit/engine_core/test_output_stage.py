"""Output stage: sent tokens are final, and all tokens together are the answer."""

import pytest
from byte_tokenizer import ByteTokenizer
from hypothesis import given
from hypothesis import strategies as st

from megatron_runtime.engine.engine_request import RequestOutput
from megatron_runtime.engine.output_stage import OutputStage, error_map
from megatron_runtime.protocol.headers import ErrorCode
from megatron_runtime.protocol.messages import (
    Dispatch,
    Final,
    Frames,
    Partial,
    RequestMeta,
    decode,
    tokens_from_bytes,
    tokens_to_bytes,
    unpack,
)
from megatron_runtime.requests.sampling_params import SamplingParams

UID = bytes(16)


class Stage:
    def __init__(self, params: SamplingParams, generated: list[int] | None = None) -> None:
        self.partial: list[int] = list(generated or [])
        self.final: dict | None = None
        self.final_tokens: list[int] = []
        self.finished_early: list[int] = []
        self.stage = OutputStage(send=self._receive, finish_early=self.finished_early.append, tokenizer=ByteTokenizer)
        dispatch = Dispatch(1, UID, 0, RequestMeta(streaming=True), b"", b"", b"")
        self.stage.add(dispatch, params, generated or [])

    def _receive(self, frames: Frames) -> None:
        message = decode(frames)
        if isinstance(message, Partial):
            assert self.final is None, "no partial after the final"
            (entry,) = message.entries
            assert entry.offset == len(self.partial)
            self.partial += tokens_from_bytes(message.tokens).tolist()
        else:
            assert isinstance(message, Final)
            self.final = unpack(message.reply)
            self.final_tokens = tokens_from_bytes(message.tokens).tolist()

    def run(self, tokens: bytes) -> None:
        for index, token in enumerate(tokens):
            reason = "length" if index == len(tokens) - 1 else None
            self.stage.step([RequestOutput(1, [token], 3, reason)])
            if self.final is not None:
                return


texts = st.text(alphabet="ab·é€", min_size=1, max_size=40)


@given(texts, st.lists(st.text(alphabet="ab·é€", min_size=1, max_size=4), max_size=3), st.integers(1, 5))
def test_the_stream_is_a_prefix_of_the_answer_and_the_answer_ends_before_the_first_stop(
    text: str, stops: list[str], interval: int
) -> None:
    stage = Stage(SamplingParams(stop_words=stops, streaming_interval=interval))
    stage.run(text.encode())
    assert stage.final is not None
    sent = bytes(stage.partial).decode(errors="ignore")
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    if not ends:
        assert stage.final["finish_reason"] == "length"
        assert bytes(stage.final_tokens) == text.encode()
        assert text.startswith(sent)
        return
    # The engine stops at the first stop text to be completed, token by token.
    answer = stage.final["generated_text"]
    assert stage.final["finish_reason"] == "stop"
    assert stage.final["stop_reason"] in stops
    assert answer == text[: len(answer)]
    assert text[len(answer) :].startswith(stage.final["stop_reason"])
    assert answer.startswith(sent)
    assert not any(stop in answer for stop in stops)


@given(texts, st.lists(st.text(alphabet="ab·é€", min_size=1, max_size=6), min_size=1, max_size=3), st.integers(1, 8))
def test_a_stop_text_below_the_minimum_is_passed_over(text: str, stops: list[str], min_tokens: int) -> None:
    """Whatever the other stop texts are: one of many characters keeps no shorter one in the searched text."""
    stage = Stage(SamplingParams(stop_words=stops, min_tokens=min_tokens))
    stage.run(text.encode())
    assert stage.final is not None
    ends = [
        len(text[:end].encode())
        for end in range(1, len(text) + 1)
        if any(text[:end].endswith(stop) for stop in stops) and len(text[:end].encode()) >= min_tokens
    ]
    assert len(stage.final_tokens) == (ends[0] if ends else len(text.encode()))
    assert stage.final["finish_reason"] == ("stop" if ends else "length")


def test_the_stop_token_is_the_stop_reason() -> None:
    stage = Stage(SamplingParams(stop_words=["x"]))
    stage.stage.step([RequestOutput(1, [97], 3)])
    stage.stage.step([RequestOutput(1, [98], 3, "stop", stop_token=98)])
    assert stage.final is not None
    assert (stage.final["finish_reason"], stage.final["stop_reason"]) == ("stop", 98)
    assert "generated_text" not in stage.final


def test_each_token_of_a_partial_has_the_epoch_of_its_weights() -> None:
    """Some were sampled in earlier steps, or by another engine."""
    sent: list[Partial] = []
    stage = OutputStage(
        send=lambda frames: sent.append(decode(frames)),  # type: ignore[func-returns-value, arg-type]
        finish_early=lambda _: None,
        tokenizer=ByteTokenizer,
    )
    for number in (1, 2):
        meta = RequestMeta(streaming=True)
        dispatch = Dispatch(number, bytes([number] * 16), 7, meta, b"", bytes(4 * number), b"", epochs=[(0, 2)])
        stage.add(dispatch, SamplingParams(streaming_interval=number), [0] * number)
    stage.step([RequestOutput(1, [5], 3, epoch=2), RequestOutput(2, [15], 3, epoch=2)])
    stage.step([RequestOutput(1, [6], 3, epoch=3), RequestOutput(2, [16], 3, epoch=3)])
    assert [tokens_from_bytes(partial.tokens).tolist() for partial in sent] == [[5], [6, 15, 16]]
    assert [partial.epochs for partial in sent] == [((0, 2),), ((0, 3), (1, 2), (2, 3))]


def test_a_stop_text_aborts_the_request_in_the_backend() -> None:
    stage = Stage(SamplingParams(stop_words=["b"]))
    stage.run(b"aab..")
    assert stage.finished_early == [1]
    assert stage.stage.idle.is_set()


def test_only_tokens_that_may_be_part_of_a_stop_text_are_held_back() -> None:
    for stops, sent in ((["xyz"], b"abc"), (["x"], b"abcde"), (["x", "xyzxy"], b"a")):
        stage = Stage(SamplingParams(stop_words=stops))
        for token in b"abcde":
            stage.stage.step([RequestOutput(1, [token], 3)])
        assert bytes(stage.partial) == sent


def test_a_partial_has_no_fewer_tokens_than_the_interval() -> None:
    stage = Stage(SamplingParams(streaming_interval=3))
    sent = []
    for token in b"abcdefgh":
        stage.stage.step([RequestOutput(1, [token], 3)])
        sent.append(len(stage.partial))
    assert sent == [0, 0, 3, 3, 3, 6, 6, 6]


def test_each_destination_gets_one_partial_of_a_step_with_its_own_requests() -> None:
    sent: list[Partial] = []

    def send(frames: Frames) -> None:
        message = decode(frames)
        assert isinstance(message, Partial)
        sent.append(message)

    stage = OutputStage(send=send, finish_early=lambda _: None, tokenizer=ByteTokenizer)
    for number, route in ((1, 7), (2, 9), (3, 7)):
        dispatch = Dispatch(number, bytes([number] * 16), route, RequestMeta(streaming=True), b"", b"", b"")
        stage.add(dispatch, SamplingParams(), [])
    stage.step([RequestOutput(number, [10 + number], 3) for number in (1, 2, 3)])
    routes = {partial.route: [entry.dispatch_id for entry in partial.entries] for partial in sent}
    assert (len(sent), routes) == (2, {7: [1, 3], 9: [2]})
    assert [tokens_from_bytes(partial.tokens).tolist() for partial in sent] == [[11, 13], [12]]


def test_a_stop_text_counts_from_min_tokens_on() -> None:
    stage = Stage(SamplingParams(stop_words=["b"], min_tokens=4))
    stage.run(b"abacbd")
    assert stage.final is not None
    assert (stage.final["generated_text"], stage.final["finish_reason"]) == ("abac", "stop")


def test_of_stop_texts_with_the_same_end_the_longest_is_found() -> None:
    for stops in (["c", "bc"], ["bc", "c"]):
        stage = Stage(SamplingParams(stop_words=stops))
        stage.run(b"abcd")
        assert stage.final is not None
        assert (stage.final["generated_text"], stage.final["stop_reason"]) == ("a", "bc")


def test_the_stop_text_is_kept_on_request() -> None:
    stage = Stage(SamplingParams(stop_words=["END"], detokenize_stop_sequence=True))
    stage.run(b"the END of it")
    assert stage.final is not None
    assert stage.final["generated_text"] == "the END"


def test_an_answer_too_large_for_the_coordinator_fails_by_name() -> None:
    finals: list[Final] = []

    def send(frames: Frames) -> bool:
        if sum(map(len, frames)) > 1000:
            return False
        message = decode(frames)
        assert isinstance(message, Final)
        finals.append(message)
        return True

    stage = OutputStage(send=send, finish_early=lambda _: None, tokenizer=ByteTokenizer)
    stage.add(Dispatch(1, UID, 0, RequestMeta(), b"", b"", b""), SamplingParams(return_log_probs=True), [])
    for number in range(200):
        output = RequestOutput(1, [7], 3, "length" if number == 199 else None)
        output.new_log_probs = [-1.0]
        stage.step([output])
    (final,) = finals
    reply = unpack(final.reply)
    assert (reply["status"], reply["error"]["code"]) == ("FAILED", 413)
    assert "log-probabilities" in reply["error"]["message"]
    assert stage.idle.is_set()


def test_a_continued_request_includes_the_earlier_text() -> None:
    whole = b"one two three END"
    stage = Stage(SamplingParams(stop_words=["END"]), generated=list(whole[:6]))
    stage.run(whole[6:])
    assert stage.final is not None
    assert stage.final["generated_text"] == "one two three "
    assert stage.final_tokens == list(whole)


@pytest.mark.parametrize(
    ("code", "is_transient"), [(ErrorCode.INVALID_REQUEST, False), (ErrorCode.ENGINE_FAILED, True)]
)
def test_an_exception_of_an_invalid_request_is_permanent(code: ErrorCode, is_transient: bool) -> None:
    assert error_map(code, AttributeError("an object without this parameter"))["is_transient"] is is_transient


@pytest.mark.parametrize("return_record", [False, True])
def test_a_record_names_the_likeliest_tokens_by_their_text(return_record: bool) -> None:
    """Of tokens with equal text, here incomplete characters, the likeliest is kept."""
    params = SamplingParams(top_n_logprobs=3, return_record=return_record)
    stage = Stage(params)
    likeliest = [(0x61, -0.5), (0xE2, -1.0), (0xC3, -2.0)]
    output = RequestOutput(1, [0x61], 3, "length", new_log_probs=[-0.5], new_top_n_logprobs=[likeliest])
    output.prompt_log_probs, output.prompt_top_n_logprobs = [-3.0], [[(0x62, -3.0)]]
    stage.stage.step([output])
    assert stage.final is not None
    found = stage.final["generated_top_n_logprobs"], stage.final["prompt_top_n_logprobs"]
    if return_record:
        assert found == ([{"a": -0.5, "\ufffd": -1.0}], [{"b": -3.0}])
    else:
        assert found == ([[[0x61, -0.5], [0xE2, -1.0], [0xC3, -2.0]]], [[[0x62, -3.0]]])


SPECIAL = ["<|turn|>", "<|end|>"]


def run(tokens: list[int], params: SamplingParams, *, prompt: list[int] | None = None, stripped: str = "kept") -> dict:
    """Return the final reply to a request whose answer is `tokens`, without a limit."""
    finals: list[Final] = []
    stage = OutputStage(
        send=lambda frames: finals.append(decode(frames)),
        finish_early=lambda _: None,
        tokenizer=lambda: ByteTokenizer(*SPECIAL, stripped=stripped),
    )
    dispatch = Dispatch(1, UID, 0, RequestMeta(), tokens_to_bytes(prompt or []), b"", b"")
    stage.add(dispatch, params, [])
    for number, token in enumerate(tokens, start=1):
        stage.step([RequestOutput(1, [token], 3, "length" if number == len(tokens) else None)])
        if finals:
            break
    return {**unpack(finals[0].reply), "tokens": tokens_from_bytes(finals[0].tokens).tolist()}


@pytest.mark.parametrize(
    ("stop", "answer", "reason"),
    [
        ("<|turn|>", "one<|end|>two<|turn|>three", "onetwo"),
        ("two<|turn|>", "one<|end|>two<|turn|>three", "one"),
        ("<|turn|>three", "one<|turn|>two<|turn|>three", "onetwo"),
        ("<|turn|>three", "one<|turn|>", None),
        ("turn", "one<|turn|>", None),
    ],
)
@pytest.mark.parametrize("kept", [False, True])
def test_a_stop_text_with_special_tokens_stops(stop: str, answer: str, reason: str | None, kept: bool) -> None:
    """Special tokens are no part of the answer's text, but for those of a stop text that is kept."""
    tokens, rest = [], answer
    while rest:
        special = next((id_ for id_, text in enumerate(SPECIAL, start=256) if rest.startswith(text)), None)
        tokens.append(ord(rest[0]) if special is None else special)
        rest = rest[1 if special is None else len(SPECIAL[special - 256]) :]
    reply = run(tokens, SamplingParams(stop_words=[stop], detokenize_stop_sequence=kept))
    if reason is None:
        assert (reply["finish_reason"], reply["tokens"]) == ("length", tokens)
        return
    assert (reply["finish_reason"], reply["stop_reason"]) == ("stop", stop)
    assert reply["generated_text"] == (reason + stop if kept else reason)


def test_the_first_word_of_an_answer_keeps_its_space() -> None:
    for prompt, text in ((list(b"a"), " the"), ([], "the"), ([256, 257], "the")):
        params = SamplingParams(stop_words=["."], return_record=True)
        assert run(list(b" the."), params, prompt=prompt, stripped="one")["generated_text"] == text
    for prompt, reason in ((list(b"a"), "stop"), ([], "length")):
        reply = run(list(b" the"), SamplingParams(stop_words=[" the"]), prompt=prompt, stripped="one")
        assert reply["finish_reason"] == reason


def test_the_likeliest_tokens_of_a_record_keep_their_space() -> None:
    finals: list[Final] = []
    stage = OutputStage(
        send=lambda frames: finals.append(decode(frames)),
        finish_early=lambda _: None,
        tokenizer=lambda: ByteTokenizer("<|turn|>", " the", stripped="one"),
    )
    params = SamplingParams(return_log_probs=True, top_n_logprobs=2, return_record=True)
    stage.add(Dispatch(1, UID, 0, RequestMeta(), b"", b"", b""), params, [])
    output = RequestOutput(1, [97], 3, "length")
    output.new_log_probs, output.new_top_n_logprobs = [-1.0], [[(257, -0.5), (97, -1.0)]]
    stage.step([output])
    assert unpack(finals[0].reply)["generated_top_n_logprobs"] == [{" the": -0.5, "a": -1.0}]
