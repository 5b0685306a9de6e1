"""See the README."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from vllm.config import ModelConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import Parser, ParserManager, hurt
from vllm.renderers import PLACEHOLDER, BaseRenderer


class OnlineRenderer:
    def __init__(
        self,
        model_config: ModelConfig,
        renderer: BaseRenderer,
        *,
        request_logger: None,
        chat_template: None,
        chat_template_content_format: str,
        enable_auto_tools: bool,
        tool_parser: str | None,
        reasoning_parser: str | None,
    ) -> None:
        self.renderer = renderer
        self.parser: type[Parser] | None = ParserManager.get_parser(
            tool_parser_name=tool_parser,
            reasoning_parser_name=reasoning_parser,
            enable_auto_tools=enable_auto_tools,
            tokenizer=renderer.get_tokenizer(),
        )

    async def render_chat(self, request: ChatCompletionRequest) -> Any:
        items: list[tuple[str, str]] = []
        lines = [f"{message['role']}: {_text(message, items)}\n" for message in request.messages]
        text = "".join(lines) + ("assistant: " if request.add_generation_prompt else "")
        text = text.removesuffix("\n") if request.continue_final_message else text
        hurt(text)
        if "REJECT" in text:
            raise ValueError("the template rejects it")
        prompt = {"prompt": text, "prompt_token_ids": self.renderer.get_tokenizer().encode(text), "items": items}
        return [], [await self.renderer.process_for_engine_async(prompt, 0.0)]


def _text(message: Mapping[str, Any], items: list[tuple[str, str]]) -> str:
    """Return the text of a message. items: gets its images, audio and video."""
    content = message["content"]
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        modality = part["type"].removesuffix("_url")
        if modality == "text":
            texts.append(part["text"])
        elif "NO_IMAGES_IN_RESULTS" in str(content):
            raise ValueError("the template rejects it")
        else:
            texts.append(chr(PLACEHOLDER))
            items.append((modality, part[part["type"]]["url"]))
    return "".join(texts)
