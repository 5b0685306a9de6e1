"""Conversations that go on from the very tokens that were generated.

Text of an answer, tokenized again, may give other tokens than those that the model wrote. For training they must be the
same, so a message may carry its tokens, and the next prompt begins with them.
"""

from __future__ import annotations

from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.schema import ChatRequest
from megatron_runtime.server.service import Service


async def with_earlier_tokens(service: Service, request: ChatRequest, prompt: list[int]) -> list[int]:
    """Return the prompt with the tokens that the last answer carries in place of those its text would have.

    prompt: the whole conversation, tokenized from its text.
    Raises ApiError 400 for an answer whose end cannot be found in the prompt.
    """
    messages = request.messages
    last = next((at for at in reversed(range(len(messages))) if messages[at].role == "assistant"), None)
    if last is None or messages[last].prompt_token_ids is None or messages[last].generation_token_ids is None:
        return prompt
    param = f"messages[{last}].generation_token_ids"
    earlier = [*(messages[last].prompt_token_ids or ()), *(messages[last].generation_token_ids or ())]
    variables = {**(request.chat_template_kwargs or {}), "add_generation_prompt": False}
    upto = await service.encode_chat(messages[: last + 1], tools=request.offered_tools, variables=variables)
    ends = [at for at, token in enumerate(upto) if token in service.tokenizer.eos_ids]
    # Special tokens are never merged with text, so up to the end of the answer both are tokenized alike.
    if not ends or prompt[: ends[-1] + 1] != upto[: ends[-1] + 1]:
        message = (
            f"Invalid value for {param}: the chat template puts no end token after an answer, so its tokens cannot be "
            "told from those of the next message. Leave prevent_retokenization out."
        )
        raise ApiError(400, message, param=param, code="invalid_value")
    service.check_tokens(earlier, param=param)
    is_ended = earlier[-1] in service.tokenizer.eos_ids
    return [*earlier, *(() if is_ended else (prompt[ends[-1]],)), *prompt[ends[-1] + 1 :]]
