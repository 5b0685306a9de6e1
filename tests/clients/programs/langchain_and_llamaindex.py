"""OpenAI clients of LangChain and LlamaIndex against `megatron serve` with the built-in model."""

from __future__ import annotations

import json
from operator import mul
from typing import Any

import pytest
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.llms.openai_like import OpenAILike
from openai import APIStatusError
from openai import OpenAI as OpenAIClient

MODEL = "smollm2-135m"
HIDDEN_SIZE = 576
PERSON = {
    "title": "person",
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "Look it up.", "parameters": CITY},
}


@pytest.fixture
def langchain(url: str) -> ChatOpenAI:
    return ChatOpenAI(base_url=url, api_key="any", model=MODEL, temperature=0, max_tokens=40)


@pytest.fixture
def llama_index(url: str) -> OpenAILike:
    shared: dict[str, Any] = {"is_chat_model": True, "is_function_calling_model": True, "temperature": 0.0}
    return OpenAILike(model=MODEL, api_base=url, api_key="any", max_tokens=40, context_window=8192, **shared)


# --- LangChain --------------------------------------------------------------------------------------------------------


def test_langchain_invokes_and_streams_the_same_answer(langchain: ChatOpenAI) -> None:
    whole = langchain.invoke("What is the capital of France?")
    assert "Paris" in whole.content
    assert whole.usage_metadata["output_tokens"] > 0
    assert whole.response_metadata["finish_reason"] in ("stop", "length")
    chunks = list(langchain.stream("What is the capital of France?", stream_usage=True))
    assert len(chunks) > 2
    assert "".join(chunk.content for chunk in chunks) == whole.content
    usages = [chunk.usage_metadata for chunk in chunks if chunk.usage_metadata]
    assert usages[-1]["output_tokens"] == whole.usage_metadata["output_tokens"]


def test_langchain_calls_a_tool_and_continues_with_its_result(langchain: ChatOpenAI) -> None:
    forced = langchain.bind_tools([WEATHER], tool_choice="weather")
    question = HumanMessage("How is the weather in Paris?")
    answer = forced.invoke([question])
    (call,) = answer.tool_calls
    assert call["name"] == "weather"
    assert set(call["args"]) == {"city"}
    streamed = None
    for chunk in forced.stream([question]):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed is not None
    assert [(each["name"], each["args"]) for each in streamed.tool_calls] == [("weather", call["args"])]
    result = ToolMessage("It is sunny.", tool_call_id=call["id"])
    final = langchain.invoke([question, answer, result])
    assert isinstance(final, AIMessage)
    assert final.content


def test_langchain_gets_structured_output(langchain: ChatOpenAI) -> None:
    person = langchain.with_structured_output(PERSON, method="json_schema").invoke("Describe a person.")
    assert set(person) == {"name", "age"}
    assert isinstance(person["age"], int)
    tool = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    options: dict[str, Any] = {"tools": [tool], "include_raw": True, "strict": True, "max_tokens": 200}
    either = langchain.with_structured_output(PERSON, method="json_schema", **options).invoke("Describe a person.")
    calls = [call["args"] for call in either["raw"].tool_calls]
    assert all(set(arguments) == {"city"} for arguments in calls)
    assert calls or set(either["parsed"]) == {"name", "age"}


def test_langchain_uses_the_responses_api(url: str) -> None:
    model = ChatOpenAI(base_url=url, api_key="any", model=MODEL, temperature=0, max_tokens=40, use_responses_api=True)
    whole = model.invoke("What is the capital of France?")
    assert "Paris" in whole.text
    assert "".join(chunk.text for chunk in model.stream("What is the capital of France?")) == whole.text


def test_langchain_completes_a_text(url: str) -> None:
    model = OpenAI(base_url=url, api_key="any", model=MODEL, temperature=0, max_tokens=8)
    whole = model.invoke("The capital of France is")
    assert "Paris" in whole
    assert "".join(model.stream("The capital of France is")) == whole


def test_langchain_embeds_texts(url: str) -> None:
    """By default it sends token ids of OpenAI's vocabulary; check_embedding_ctx_length=False makes it send texts."""
    model = OpenAIEmbeddings(base_url=url, api_key="any", model=MODEL, check_embedding_ctx_length=False)
    texts = ["The cat sleeps.", "The cat sleeps.", "A stock exchange opened in Amsterdam."]
    vectors = model.embed_documents(texts)
    same, other = (sum(map(mul, vectors[0], vector)) for vector in vectors[1:])
    assert same == pytest.approx(1.0, abs=1e-4)
    assert other < same - 1e-3
    assert all(len(vector) == HIDDEN_SIZE for vector in vectors)


# --- LlamaIndex -------------------------------------------------------------------------------------------------------


def test_llamaindex_chats_and_streams_the_same_answer(llama_index: OpenAILike) -> None:
    messages = [ChatMessage(role="user", content="What is the capital of France?")]
    whole = llama_index.chat(messages).message.content
    assert "Paris" in whole
    parts = list(llama_index.stream_chat(messages))
    assert len(parts) > 2
    assert "".join(part.delta or "" for part in parts) == whole


async def test_llamaindex_chats_asynchronously(llama_index: OpenAILike) -> None:
    messages = [ChatMessage(role="user", content="What is the capital of France?")]
    whole = (await llama_index.achat(messages)).message.content
    parts = [part.delta or "" async for part in await llama_index.astream_chat(messages)]
    assert "".join(parts) == whole


def test_llamaindex_calls_a_tool(llama_index: OpenAILike) -> None:
    def weather(city: str) -> str:
        """Look it up."""
        return f"sunny in {city}"

    tool = FunctionTool.from_defaults(weather)
    reply = llama_index.chat_with_tools([tool], user_msg="How is the weather in Paris?", tool_required=True)
    calls = llama_index.get_tool_calls_from_response(reply)
    assert calls
    assert {call.tool_name for call in calls} == {"weather"}
    assert all(set(call.tool_kwargs) == {"city"} for call in calls)


def test_llamaindex_completes_a_text(url: str) -> None:
    model = OpenAILike(model=MODEL, api_base=url, api_key="any", max_tokens=8, temperature=0.0, is_chat_model=False)
    whole = model.complete("The capital of France is").text
    assert "Paris" in whole
    assert "".join(part.delta or "" for part in model.stream_complete("The capital of France is")) == whole


def test_llamaindex_gets_structured_output(url: str) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON}}
    model = OpenAILike(
        model=MODEL,
        api_base=url,
        api_key="any",
        max_tokens=60,
        temperature=0.0,
        is_chat_model=True,
        additional_kwargs={"response_format": schema},
    )
    reply = model.chat([ChatMessage(role="user", content="Describe a person.")])
    assert set(json.loads(reply.message.content)) == {"name", "age"}


# --- the version of openai that they share ----------------------------------------------------------------------------


def test_the_clients_own_openai_package_is_served(url: str) -> None:
    client = OpenAIClient(base_url=url, api_key="any", max_retries=0)
    assert MODEL in [model.id for model in client.models.list()]
    assert client.responses.create(model=MODEL, input="Hi", max_output_tokens=5).output_text
    (vector,) = (item.embedding for item in client.embeddings.create(model=MODEL, input="Hi").data)
    assert len(vector) == HIDDEN_SIZE
    with pytest.raises(APIStatusError) as raised:
        client.embeddings.create(model="other", input="Hi")
    assert (raised.value.status_code, raised.value.code) == (404, "model_not_found")
    assert raised.value.request_id.startswith("req_")
