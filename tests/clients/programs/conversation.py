"""Two turns, with a call in the first, that the programs hold and the engine's script answers."""

from __future__ import annotations

MODEL = "smollm2-135m"
NAME, DESCRIPTION = "weather", "Look up the weather."
PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ARGUMENTS = {"city": "Paris"}
FIRST, SECOND = "How is the weather in Paris?", "And tomorrow?"
RESULT = "sunny, 21 degrees"
FIRST_ANSWER, SECOND_ANSWER = "It is sunny in Paris.", "It rains tomorrow."
