"""See the README."""

from __future__ import annotations

from typing import Any

from vllm.config import ModelConfig
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.parser import Parser, ParserManager, hurt
from vllm.renderers import Renderer


class OnlineRenderer:
    def __init__(
        self,
        model_config: ModelConfig,
        renderer: Renderer,
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
        lines = [f"{message['role']}: {message['content']}\n" for message in request.messages]
        text = "".join(lines) + ("assistant: " if request.add_generation_prompt else "")
        hurt(text)
        if "REJECT" in text:
            raise ValueError("the template rejects it")
        return [], [{"prompt": text, "prompt_token_ids": self.renderer.get_tokenizer().encode(text)}]
