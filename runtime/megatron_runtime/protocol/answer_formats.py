"""The names of the answer formats that the OpenAI server can parse. An answer format defines how a model writes tool
calls and marks reasoning.

This table is the only list of these names. The command line, the custom resource and the reference page use it, and the
server has a parser for each format (server/formats).
"""

from __future__ import annotations

from collections.abc import Mapping

TOOL_FORMATS: Mapping[str, str] = {
    "hermes": "Hermes, Qwen 2.5 and 3, QwQ, Granite 4, MiMo, Bielik",
    "qwen3_coder": "Qwen3-Coder, Qwen 3.5, Nemotron 3, Step 3.5",
    "glm45": "GLM 4.5 to 4.7, Laguna, Ling 3, Spark 2.5",
    "gpt_oss": "gpt-oss",
    "llama3_json": "Llama 3.1 to 3.3",
    "pythonic": "Llama 3.2 and 4, where the template describes calls as Python",
    "mistral": "Mistral, Ministral, Magistral, Devstral",
    "deepseek_v3": "DeepSeek V3 and R1",
    "deepseek_v31": "DeepSeek V3.1",
    "deepseek_v32": "DeepSeek V3.2",
    "deepseek_v4": "DeepSeek V4",
    "kimi_k2": "Kimi K2",
    "kimi_k3": "Kimi K3",
    "minimax": "MiniMax M1, Apriel, Hunyuan A13B, Jamba",
    "minimax_m2": "MiniMax M2",
    "minimax_m3": "MiniMax M3",
    "gemma4": "Gemma 4",
    "seed_oss": "Seed-OSS",
    "command_a": "Command A, Command R7B",
    "command_r_plus": "Command R+",
    "lfm2": "LFM2, LFM2.5",
    "granite": "Granite 3",
    "nemotron": "Nemotron Nano 2",
    "hunyuan_v3": "Hunyuan 3",
    "solar": "Solar Open",
    "apertus": "Apertus",
    "gigachat3": "GigaChat 3",
    "functionary_v31": "Functionary 3.1",
    "functionary_v32": "Functionary 3.2",
    "functools": "Firefunction 2, Phi-4-mini",
    "minicpm5": "MiniCPM 5",
    "muse": "Muse",
}
"""For each tool-call format, the models that use it."""

REASONING_FORMATS: Mapping[str, str] = {
    "think": "DeepSeek, Qwen, GLM, MiniMax M2, Nemotron, Granite 3 and most others",
    "gemma4": "Gemma 4",
    "gpt_oss": "gpt-oss",
    "seed_oss": "Seed-OSS",
    "command_a": "Command A, Command R7B",
    "mistral": "Magistral, Ministral",
    "minimax_m3": "MiniMax M3",
    "kimi_k3": "Kimi K3",
    "hunyuan_v3": "Hunyuan 3",
    "solar": "Solar Open",
    "apertus": "Apertus",
    "apriel": "Apriel",
    "muse": "Muse",
}
"""For each reasoning format, the models that use it."""

TOOL_CALL_PARSERS = ("auto", "none", *TOOL_FORMATS)
"""Values of `--tool-call-parser` and `spec.server.toolCallParser`."""
REASONING_PARSERS = ("auto", "none", *REASONING_FORMATS)
"""Values of `--reasoning-parser` and `spec.server.reasoningParser`."""
