"""Each log-probability reaches the client once, with its token, for all stop texts, intervals and replay offsets."""

from byte_tokenizer import ByteTokenizer
from hypothesis import given
from hypothesis import strategies as st

from megatron_runtime.engine.engine_request import RequestOutput
from megatron_runtime.engine.output_stage import OutputStage
from megatron_runtime.protocol.messages import Dispatch, Final, Frames, Partial, RequestMeta, decode, unpack
from megatron_runtime.requests.sampling_params import SamplingParams

UID = bytes(16)
PROMPT = [-1.5, -2.5]


def log_prob(token: int) -> float:
    return -token / 8


def likeliest(token: int) -> list[tuple[int, float]]:
    return [(token, log_prob(token)), (0, -100.0)]


@given(
    st.text(alphabet="ab·é€", min_size=1, max_size=40),
    st.lists(st.text(alphabet="ab·é€", min_size=1, max_size=4), max_size=3),
    st.integers(1, 5),
    st.integers(0, 12),
)
def test_partials_and_final_agree(text: str, stops: list[str], interval: int, begun: int) -> None:
    tokens = list(text.encode())
    begun = min(begun, len(tokens) - 1)
    params = SamplingParams(
        stop_words=stops,
        streaming_interval=interval,
        return_log_probs=True,
        top_n_logprobs=2,
        skip_prompt_log_probs=False,
    )
    partials: list[dict] = []
    finals: list[dict] = []

    def receive(frames: Frames) -> None:
        message = decode(frames)
        if isinstance(message, Partial):
            partials.append(unpack(message.extras)[UID])
            assert len(partials[-1]["log_probs"]) == message.entries[0].count
        elif isinstance(message, Final):
            finals.append(unpack(message.reply))

    stage = OutputStage(send=receive, finish_early=lambda _: None, tokenizer=ByteTokenizer)
    dispatch = Dispatch(1, UID, 0, RequestMeta(streaming=True), b"", b"", b"")
    stage.add(dispatch, params, tokens[:begun])
    for index, token in enumerate(tokens[begun:], start=begun):
        output = RequestOutput(1, [token], 3, "length" if index == len(tokens) - 1 else None)
        output.new_log_probs, output.new_top_n_logprobs = [log_prob(token)], [likeliest(token)]
        if index == begun and begun == 0:
            output.prompt_log_probs, output.prompt_top_n_logprobs = PROMPT, [likeliest(1), likeliest(2)]
        stage.step([output])
        if finals:
            break
    (final,) = finals
    produced = tokens[begun : final["generated_length"]]
    assert final["generated_log_probs"] == [log_prob(token) for token in produced]
    assert final["generated_top_n_logprobs"] == [[list(pair) for pair in likeliest(token)] for token in produced]
    assert final.get("log_probs_from", 0) == begun
    sent = [value for partial in partials for value in partial["log_probs"]]
    assert sent == final["generated_log_probs"][: len(sent)]
    top_sent = [value for partial in partials for value in partial["top_n_logprobs"]]
    assert top_sent == final["generated_top_n_logprobs"][: len(sent)]
    assert ("prompt_log_probs" in final) == (begun == 0)
    for number, partial in enumerate(partials):
        assert ("prompt_log_probs" in partial) == (begun == 0 and number == 0)
        assert partial.get("prompt_log_probs", PROMPT) == PROMPT
