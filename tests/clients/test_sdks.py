"""SDKs against `megatron serve`, and the command `llm`.

The programs of SDKs run in the environment of the client, by its own pytest (programs/).
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from .conftest import MODEL, URL, Client, Server, call
from .environments import HERE
from .programs.conversation import ARGUMENTS, FIRST, FIRST_ANSWER, NAME, RESULT, SECOND, SECOND_ANSWER

SCRIPT = {FIRST: call(NAME, **ARGUMENTS), RESULT: FIRST_ANSWER, SECOND: SECOND_ANSWER}


def run(client: Client, program: str, server: Server, **variables: str) -> None:
    """Run the tests of a program."""
    file = HERE / "programs" / f"{program}.py"
    variables[URL] = server.url
    client.run("python", "-m", "pytest", "-q", "-p", "no:cacheprovider", str(file), **variables)


REJECTIONS = {"anthropic": "thread is not offered by this server"}
"""The tool runner of Anthropic's SDK first asks the server to keep the conversation. Then it sends the conversation."""


@pytest.mark.parametrize("name", ["openai", "anthropic", "litellm"])
def test_an_sdk_holds_two_turns_with_a_call(client: Callable[[str], Client], server: Server, name: str) -> None:
    server.answers(SCRIPT)
    run(client(name), f"{name}_sdk", server, LITELLM_LOCAL_MODEL_COST_MAP="True")
    exchanges = server.exchanges(maximum=40, rejection=REJECTIONS.get(name, ""))
    with_result = [each.text for each in exchanges if each.status == 200 and RESULT in each.text]
    assert with_result
    assert all(FIRST in text for text in with_result), "each request has the whole conversation"
    server.check_shapes(name, exchanges)


def test_langchain_and_llamaindex(client: Callable[[str], Client], model_server: Server) -> None:
    """They chat, stream, call a tool, and get structured output and embeddings. See the program."""
    run(client("langchain-llamaindex"), "langchain_and_llamaindex", model_server)
    exchanges = model_server.exchanges(maximum=60, rejection="model_not_found")
    model_server.check_shapes("langchain-llamaindex", exchanges)


def test_llm_runs_a_function_and_continues(client: Callable[[str], Client], server: Server) -> None:
    llm = client("llm")
    server.answers(SCRIPT)
    llm.variables = {"LLM_USER_PATH": str(llm.home)}
    (llm.home / "extra-openai-models.yaml").write_text(
        f"- model_id: smol\n  model_name: {MODEL}\n  api_base: {server.url}/v1\n  supports_tools: true\n"
    )
    function = f"def {NAME}(city: str) -> str:\n    'Look up the weather.'\n    return {RESULT!r}\n"
    output = llm.run("llm", "-m", "smol", "--functions", function, "--td", FIRST)
    assert RESULT in output
    assert FIRST_ANSWER in output
    assert SECOND_ANSWER in llm.run("llm", "--continue", SECOND)
    exchanges = server.exchanges(maximum=3)
    first, second, third = exchanges
    assert RESULT not in first.text
    assert RESULT in second.text
    assert third.text.index(RESULT) < third.text.index(FIRST_ANSWER) < third.text.index(SECOND)
    server.check_shapes("llm", exchanges)
