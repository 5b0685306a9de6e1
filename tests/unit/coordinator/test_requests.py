"""What becomes of a request, from SUBMIT to its final answer."""

from megatron_runtime.engines.echo_executor import echo_answer

PROMPT = [1, 2, 3]


async def test_a_request_comes_back_with_the_engines_tokens(stage, params) -> None:
    stage.coordinator()
    await stage.engine()
    client = await stage.client()
    reply = await client.add_request(PROMPT, params(8))
    assert reply["generated_tokens"] == echo_answer(PROMPT, 8)
    assert (reply["status"], reply["finish_reason"], reply["prompt_length"]) == ("COMPLETED", "length", 3)
    assert client.completion_futures == {}


async def test_a_stream_gives_every_token_once_and_then_the_final_answer(stage, params, collect) -> None:
    stage.coordinator()
    await stage.engine()
    client = await stage.client()
    tokens, final = await collect(client.add_request_streaming(PROMPT, params(20)))
    assert tokens == final["generated_tokens"] == echo_answer(PROMPT, 20)
