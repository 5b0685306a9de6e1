"""Conversations that continue from the generated tokens instead of the tokens of their text."""

from __future__ import annotations

from typing import Any

import pytest

QUESTION = {"role": "user", "content": "Hi"}


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_carries_its_tokens_and_the_next_prompt_begins_with_them(
    running: Any, tokenizer: Any, stream: bool
) -> None:
    fields = {"model": "smollm2", "temperature": 0, "messages": [QUESTION]}
    extra = {"prevent_retokenization": True}
    reply = await running.openai.chat.completions.create(**fields, stream=stream, extra_body=extra)
    if stream:
        message: dict[str, Any] = {"role": "assistant", "content": ""}
        async for chunk in reply:
            delta = chunk.choices[0].delta.model_dump(exclude_none=True)
            message = {**message, **delta, "content": message["content"] + delta.get("content", "")}
    else:
        message = reply.choices[0].message.model_dump()
    prompt = running.backend.requests[0][0]
    assert message["prompt_token_ids"] == prompt
    assert message["generation_token_ids"] == [*tokenizer.encode(message["content"]), tokenizer.eos_ids[0]]

    # As the model might have written the same text: one token a character.
    written = [id_ for character in message["content"] for id_ in tokenizer.encode(character)]
    carried = {**message, "generation_token_ids": [*written, tokenizer.eos_ids[0]]}
    history = [QUESTION, carried, {"role": "user", "content": "And?"}]
    await running.openai.chat.completions.create(**{**fields, "messages": history}, extra_body=extra)
    spliced = running.backend.requests[1][0]
    plain = [QUESTION, {"role": "assistant", "content": message["content"]}, history[2]]
    again = tokenizer.encode_chat(plain)
    rest = again[len(prompt) + len(message["generation_token_ids"]) :]
    assert spliced == [*prompt, *written, tokenizer.eos_ids[0], *rest]
    assert tokenizer.decode(spliced, skip_special=False) == tokenizer.decode(again, skip_special=False)

    # An answer that was cut by its token limit has no end token of its own.
    carried["generation_token_ids"] = written
    await running.openai.chat.completions.create(**{**fields, "messages": history}, extra_body=extra)
    assert running.backend.requests[2][0] == spliced
    # Nothing of it without the field.
    await running.openai.chat.completions.create(**{**fields, "messages": history})
    assert running.backend.requests[3][0] == again


async def test_a_template_without_end_tokens_is_reported(start_with_template: Any) -> None:
    running = await start_with_template("{% for m in messages %}{{ m.content }};{% endfor %}")
    carried = {"role": "assistant", "content": "x", "prompt_token_ids": [5], "generation_token_ids": [6]}
    reply = await running.chat(messages=[QUESTION, carried, QUESTION], prevent_retokenization=True)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages[1].generation_token_ids")


@pytest.mark.parametrize("stream", [False, True])
async def test_a_message_carries_the_requested_token_data(
    running: Any, tokenizer: Any, backend_log_prob: Any, stream: bool
) -> None:
    extra = {"return_tokenized_data": True, "return_raw_text": True}
    fields = {"model": "smollm2", "temperature": 0, "messages": [QUESTION], "logprobs": True, "stream": stream}
    reply = await running.openai.chat.completions.create(**fields, extra_body=extra)
    if stream:
        *_, last = [chunk async for chunk in reply]
        message = last.choices[0].delta.model_dump()
    else:
        message = reply.choices[0].message.model_dump()
    prompt, tokens = running.backend.requests[0][0], message["generation_token_ids"]
    assert message["prompt_token_ids"] == prompt
    assert tokens[-1] == tokenizer.eos_ids[0]
    assert message["generation_log_probs"] == [backend_log_prob(token, at) for at, token in enumerate(tokens)]
    assert message["raw_text"] == tokenizer.decode([*prompt, *tokens], skip_special=False)
    assert tokenizer.decode([tokens[-1]], skip_special=False) in message["raw_text"]
    # It may be sent back as it came.
    history = [QUESTION, {**message, "role": "assistant", "content": "x"}, QUESTION]
    again = await running.openai.chat.completions.create(**{**fields, "messages": history, "stream": False})
    found = again.choices[0].message.model_dump()
    assert not {"prompt_token_ids", "generation_token_ids", "generation_log_probs", "raw_text"} & found.keys()


async def test_tokens_outside_the_vocabulary_are_rejected_as_history(running: Any, tokenizer: Any) -> None:
    carried = {"role": "assistant", "content": "x", "prompt_token_ids": [5], "generation_token_ids": [49152]}
    reply = await running.chat(messages=[QUESTION, carried, QUESTION], prevent_retokenization=True)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "messages[1].generation_token_ids")
    assert "49152" in reply.json()["error"]["message"]


async def test_log_probs_that_a_failover_left_incomplete_are_not_carried(running: Any, monkeypatch: Any) -> None:
    """The stream has them all; the final reply, which has only the last ones, must not put them beside other tokens."""
    whole = running.backend._reply

    def of_the_last_engine(*arguments: Any, **named: Any) -> dict[str, Any]:
        reply = whole(*arguments, **named)
        for name in ("generated_log_probs", "generated_top_n_logprobs"):
            reply[name] = reply[name][2:]
        return {**reply, "log_probs_from": 2}

    monkeypatch.setattr(running.backend, "_reply", of_the_last_engine)
    fields = {"model": "smollm2", "temperature": 0, "messages": [QUESTION], "logprobs": True, "stream": True}
    reply = await running.openai.chat.completions.create(**fields, extra_body={"return_tokenized_data": True})
    chunks = [chunk.choices[0] async for chunk in reply]
    carried = chunks[-1].delta.model_dump()
    assert len(carried["generation_token_ids"]) > 5
    assert "generation_log_probs" not in carried
    found = [entry for chunk in chunks if chunk.logprobs for entry in chunk.logprobs.content]
    assert len(found) == len(carried["generation_token_ids"]) - 1
    lacking = await running.chat(logprobs=True)
    assert lacking.status_code == 500
    assert "lacks log-probabilities" in lacking.json()["error"]["message"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_add_bos_puts_the_begin_of_sequence_token_first(running: Any, tokenizer: Any, path: str) -> None:
    body = {"model": "smollm2", "temperature": 0, "skip_prompt_log_probs": True, "add_BOS": True}
    own = {"prompt": "Hi"} if path == "completions" else {"messages": [QUESTION]}
    reply = await running.post(f"/v1/{path}", {**body, **own})
    assert reply.status_code == 200
    plain = tokenizer.encode("Hi") if path == "completions" else tokenizer.encode_chat([QUESTION])
    first = tokenizer.bos_id
    assert first is not None
    assert running.backend.requests[0][0] == (plain if plain[0] == first else [first, *plain])
    assert running.backend.requests[0][0].count(first) >= 1
    await running.post("/v1/completions", {**body, "prompt": [first, 7]})
    assert running.backend.requests[1][0] == [first, 7]
