"""POST /tokenize and /detokenize: the vocabulary as prompts use it."""

from __future__ import annotations

from typing import Any


async def test_a_text_becomes_the_tokens_of_its_prompt(running: Any, tokenizer: Any) -> None:
    text = "naïve 🦙 river"
    reply = (await running.post("/tokenize", {"model": "smollm2", "prompt": text, "return_token_strs": True})).json()
    assert reply["tokens"] == tokenizer.encode(text)
    assert reply["count"] == len(reply["tokens"])
    assert reply["max_model_len"] == tokenizer.context_length
    assert reply["token_strs"][-1] == " river"
    await running.post("/v1/completions", {"model": "smollm2", "prompt": text})
    assert running.backend.requests[0][0] == reply["tokens"]
    back = await running.post("/v1/detokenize", {"tokens": reply["tokens"]})
    assert back.json() == {"prompt": text}


async def test_a_conversation_becomes_the_tokens_of_its_prompt(running: Any, tokenizer: Any) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    tools = [{"type": "function", "function": {"name": "f"}}]
    for extra in ({}, {"tools": tools}):
        reply = await running.post("/v1/tokenize", {"messages": messages, **extra})
        await running.chat(**extra)
        assert running.backend.requests[-1][0] == reply.json()["tokens"]
    without = await running.post("/tokenize", {"messages": messages, "add_generation_prompt": False})
    assert (
        "assistant\n" not in (await running.post("/detokenize", {"tokens": without.json()["tokens"]})).json()["prompt"]
    )


async def test_a_text_that_cannot_be_tokenized_names_its_field(running: Any) -> None:
    for path, body, param in (
        ("tokenize", {}, "messages"),
        ("tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "messages"),
        ("tokenize", {"prompt": 5}, "prompt"),
        ("tokenize", {"prompt": "a", "model": 5}, "model"),
        ("tokenize", {"prompt": "a", "wrong": 5}, "wrong"),
        ("detokenize", {"tokens": [49152]}, "tokens"),
        ("detokenize", {"tokens": ["a"]}, "tokens[0]"),
        ("detokenize", {"tokens": [-1]}, "tokens[0]"),
    ):
        reply = await running.post(f"/{path}", body)
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, param), body
    unknown = await running.post("/tokenize", {"prompt": "a", "model": "other"})
    assert unknown.status_code == 404
