"""Selects vLLM's parsers by the model's type and the format of its chat template, because vLLM has no setting "auto".

If recognition.py detects one of this server's formats in the chat template, this format takes precedence, because
models of one type are trained for several formats. The type in config.json decides between formats that render
identically, and selects the parser for formats that this server cannot parse.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import NamedTuple

TOOL_PARSERS: Mapping[str, str] = {
    "hermes": "hermes",
    "qwen3_coder": "qwen3_coder",
    "glm45": "glm45",
    "gpt_oss": "openai",
    "llama3_json": "llama3_json",
    "pythonic": "pythonic",
    "mistral": "mistral",
    "deepseek_v3": "deepseek_v3",
    "deepseek_v31": "deepseek_v31",
    "deepseek_v32": "deepseek_v32",
    "deepseek_v4": "deepseek_v4",
    "kimi_k2": "kimi_k2",
    "kimi_k3": "kimi_k3",
    "minimax_m2": "minimax_m2",
    "minimax_m3": "minimax_m3",
    "gemma4": "gemma4",
    "seed_oss": "seed_oss",
    "command_a": "cohere_command3",
    "lfm2": "lfm2",
    "granite": "granite",
    "hunyuan_v3": "hy_v3",
    "apertus": "apertus",
    "gigachat3": "gigachat3",
    "functools": "phi4_mini_json",
    "minicpm5": "minicpm5",
    "muse": "muse_glimmer",
}
"""For each tool-call format of `protocol.answer_formats` that vLLM can parse, the name of vLLM's parser."""

REASONING_PARSERS: Mapping[str, str] = {
    "gemma4": "gemma4",
    "gpt_oss": "openai_gptoss",
    "seed_oss": "seed_oss",
    "command_a": "cohere_command3",
    "mistral": "mistral",
    "minimax_m3": "minimax_m3",
    "kimi_k3": "kimi_k3",
    "hunyuan_v3": "hy_v3",
    "muse": "muse_glimmer",
}
"""For each reasoning format that vLLM can parse, the name of vLLM's parser. For `think`, the model's type decides."""
ALWAYS_THINKS = "deepseek_r1"
"""vLLM's parser for models that always reason.

The parser treats an answer without `</think>` as reasoning.
"""


class Parsers(NamedTuple):
    """The names of vLLM's parsers for one model.

    A name is None if vLLM has no such parser, or if answers need no parser.
    """

    tools: str | None
    reasoning: str | None


MODEL_TYPES: Mapping[str, Parsers] = {
    "cohere2_moe": Parsers("cohere_command4", "cohere_command4"),
    "deepseek_v32": Parsers("deepseek_v32", "deepseek_v3"),
    "deepseek_v4": Parsers("deepseek_v4", "deepseek_v4"),
    "deepseek_v41": Parsers("deepseek_v41", "deepseek_v41"),
    "dots1": Parsers("dots", None),
    "ernie4_5": Parsers("ernie45", "ernie45"),
    "ernie4_5_moe": Parsers("ernie45", "ernie45"),
    "glm4_moe": Parsers("glm45", "glm45"),
    "glm4_moe_lite": Parsers("glm47", "glm47"),
    "gpt_oss": Parsers("openai", "openai_gptoss"),
    "granitemoehybrid": Parsers("granite4", None),
    "hunyuan_v1_moe": Parsers("hunyuan_a13b", "hunyuan_a13b"),
    "hy_v3": Parsers("hy_v3", "hy_v3"),
    "hy_v4": Parsers("hy_v4", "hy_v4"),
    "inkling": Parsers("inkling", "inkling"),
    "internlm2": Parsers("internlm", None),
    "internlm3": Parsers("internlm", None),
    "jamba": Parsers("jamba", None),
    "k2_horizon": Parsers("k2_horizon", "k2_horizon"),
    "kimi_k2": Parsers("kimi_k2", "kimi_k2"),
    "kimi_k3": Parsers("kimi_k3", "kimi_k3"),
    "laguna": Parsers("poolside_v1", "poolside_v1"),
    "bailing_moe_v3": Parsers("ling3", "ling3"),
    "llama4": Parsers("llama4_pythonic", None),
    "longcat_flash": Parsers("longcat", None),
    "mimo_v2_flash": Parsers("mimo", "mimo"),
    "minimax_m2": Parsers("minimax_m2", "minimax_m2"),
    "nemotron_h": Parsers("qwen3_coder", "nemotron_v3"),
    "olmo3": Parsers("olmo3", "olmo3"),
    "phi3": Parsers("phi4_mini_json", None),
    "plamo3": Parsers("plamo3", "plamo3"),
    "qwen3": Parsers("hermes", "qwen3"),
    "qwen3_moe": Parsers("hermes", "qwen3"),
    "qwen3_next": Parsers("hermes", "qwen3"),
    "qwen3_5": Parsers("qwen3_coder", "qwen3"),
    "qwen3_5_moe": Parsers("qwen3_coder", "qwen3"),
    "step3_text": Parsers("step3", "step3"),
    "step3p5": Parsers("step3p5", "step3p5"),
}
"""vLLM's parsers, by the `model_type` in config.json."""

_READS_ALIKE: Mapping[str, frozenset[str]] = {
    "hermes": frozenset({"hermes", "granite4", "longcat"}),
    "glm45": frozenset({"glm45", "glm47", "poolside_v1", "ling3"}),
    "qwen3_coder": frozenset({"qwen3_coder", "step3p5", "mimo"}),
    "deepseek_v4": frozenset({"deepseek_v4", "deepseek_v41"}),
    "command_a": frozenset({"cohere_command3", "cohere_command4"}),
    "pythonic": frozenset({"pythonic", "llama4_pythonic", "olmo3"}),
    "minimax": frozenset({"hunyuan_a13b", "jamba"}),
}
"""vLLM parsers that can fit a tool-call format, by this server's name of the format. The model's type selects one."""


def parsers_of(
    model_type: str,
    tool_format: str | None,
    reasoning_format: str | None,
    *,
    is_open: bool,
    installed: tuple[Collection[str], Collection[str]],
) -> Parsers:
    """Return the names of vLLM's parsers for a model.

    model_type:       value of `model_type` in config.json; empty: unknown.
    tool_format:      this server's name for the tool-call format of the chat template; None: unknown.
    reasoning_format: this server's name for the reasoning format of the chat template; None: unknown.
    is_open:          whether a prompt from the chat template ends within the reasoning.
    installed:        names of the tool parsers and the reasoning parsers in the installed vLLM.
    """
    typed = MODEL_TYPES.get(model_type, Parsers(None, None))
    if tool_format is None:
        tools = typed.tools
    else:
        alike = _READS_ALIKE.get(tool_format, frozenset())
        tools = typed.tools if typed.tools in alike else TOOL_PARSERS.get(tool_format)
    reasoning = None
    if reasoning_format is not None:
        is_shared = reasoning_format in ("think", "command_a")
        reasoning = (typed.reasoning if is_shared else None) or REASONING_PARSERS.get(reasoning_format)
        if reasoning is None and reasoning_format == "think" and is_open:
            reasoning = ALWAYS_THINKS
    elif tool_format is None:
        reasoning = typed.reasoning
    return Parsers(tools if tools in installed[0] else None, reasoning if reasoning in installed[1] else None)
