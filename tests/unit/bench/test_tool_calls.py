"""Prompts and judgement of bench/tool_calls.py."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest
from tool_calls import EARLIER, TOOLS, judged, prompts


def called(*calls: tuple[str, str]) -> dict[str, Any]:
    return {"tool_calls": [{"function": {"name": name, "arguments": arguments}} for name, arguments in calls]}


def test_200_prompts_differ_and_show_the_call_of_another_tool() -> None:
    found = prompts(200)
    assert len({messages[-1]["content"] for messages in found}) == len(found) == 200
    for name, (_, arguments) in EARLIER.items():
        jsonschema.validate(arguments, TOOLS[name][1])
    tools = [messages[1]["tool_calls"][0]["function"]["name"] for messages in found[: len(TOOLS)]]
    assert all(earlier != tool for earlier, tool in zip(tools, TOOLS, strict=True))


@pytest.mark.parametrize(
    ("message", "figures"),
    [
        ({"content": "No."}, (False, False, False)),
        (called(("other", "{}")), (True, False, False)),
        (called(("convert_money", "[]")), (True, False, False)),
        (called(("convert_money", '{"amount": 3')), (True, False, False)),
        (called(("convert_money", '{"amount": 3}')), (True, True, False)),
        (called(("convert_money", '{"amount": 3, "source": "EUR", "target": "USD"}')), (True, True, True)),
        (
            called(("convert_money", '{"amount": 3, "source": "EUR", "target": "USD"}'), ("x", "{}")),
            (True, False, False),
        ),
    ],
)
def test_an_answer_is_judged_by_all_its_calls(message: dict[str, Any], figures: tuple[bool, bool, bool]) -> None:
    assert tuple(judged(message).values()) == figures
