"""Runs vLLM's renderer and parsers in separate processes: a parent process imports vLLM once, and forks workers.

The server (vllm_processes.py) runs this module. The parent process reports vLLM's parsers, and forks a worker for each
socket that it receives. A worker processes batches of operations until the server closes the socket. Each worker has
limits of memory and time. No other module of the server imports vLLM. Messages are msgpack.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_runtime.checkpoints.model_files import TOKENIZER_FILE
from megatron_runtime.process.children import be_child
from megatron_runtime.process.sacrificial_process import OUT_OF_MEMORY, limit_memory
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.protocol.answer_formats import REASONING_FORMATS, TOOL_FORMATS
from megatron_runtime.protocol.codec import UnpackLimits, pack, unpack
from megatron_runtime.protocol.media import data_url
from megatron_runtime.server.formats.parser import MAX_NAME_CHARACTERS, is_unicode
from megatron_runtime.server.formats.vllm_parsers import REASONING_PARSERS, TOOL_PARSERS, parsers_of

MESSAGE_LIMITS = UnpackLimits(frame_bytes=1 << 30, elements=1 << 27, containers=1 << 24, depth=300)
"""Limits against a corrupt stream. No other protection is needed, because both peers are this program."""
HEADER = struct.Struct("<dQ")
"""Header of a batch: timeout in seconds, and length in bytes."""
SIZE = struct.Struct("<Q")

_SMALL_IMAGE = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000040000000400802000000250be689000000224944415478daedc1010d000000"
    "c2a0f74f6d0f07140000000000000000000000f06e30400001ece1c8970000000049454e44ae426082"
)
"""A PNG image of 64 x 64 pixels."""
TEXT, REASONING, CALL, ARGUMENTS = range(4)
"""Kinds of events in replies. An event is [kind, text]. The beginning of a tool call is [CALL, name, id or None]."""

_HARMONY = "gpt_oss"
"""The `model_type` for which vLLM uses the package openai_harmony instead of the chat template."""


class Formats:
    """The renderer and the parsers of one model.

    setup: a map with these entries:
        directory: directory of the model.
        tools, reasoning: parser settings of the server.
        tool_format, reasoning_format: this server's names for the formats of the chat template, or None.
        is_open: whether prompts end within the reasoning.
        call, written: a sample tool call, and the texts that the chat template renders for it.

    The constructor raises UnknownParserError, and any exception of vLLM for a model that vLLM cannot read.
    """

    def __init__(self, setup: Mapping[str, Any]) -> None:
        from vllm.config import VllmConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.reasoning import ReasoningParserManager
        from vllm.renderers import renderer_from_config
        from vllm.renderers.chat_utils import get_tool_call_id_type
        from vllm.renderers.online_renderer import OnlineRenderer
        from vllm.tool_parsers import ToolParserManager

        directory = Path(setup["directory"])
        # vLLM detects Mistral's format by the names of weight files, which a server may not have.
        is_mistral = (directory / "tekken.json").exists() and not (directory / TOKENIZER_FILE).exists()
        mode = {"tokenizer_mode": "mistral"} if is_mistral else {}
        # Disable vLLM's cache of media features, which this process does not use.
        config = AsyncEngineArgs(model=str(directory), mm_processor_cache_gb=0, **mode).create_model_config()
        config.quantization = None  # do not read weights
        config.max_model_len = (1 << 31) - 1  # the server itself checks the length
        installed = (
            sorted(ToolParserManager.list_registered()),
            sorted(ReasoningParserManager.list_registered()),
        )
        chosen = parsers_of(
            config.hf_config.model_type,
            setup["tool_format"],
            setup["reasoning_format"],
            is_open=setup["is_open"],
            installed=installed,
        )
        self.tools = _chosen(setup["tools"], chosen.tools, installed[0], TOOL_PARSERS, option="--tool-call-parser")
        self.reasoning = _chosen(
            setup["reasoning"], chosen.reasoning, installed[1], REASONING_PARSERS, option="--reasoning-parser"
        )
        self._config = config
        self._is_harmony = config.hf_config.model_type == _HARMONY
        if self._is_harmony:
            _load_harmony()
        self.numbers_calls = get_tool_call_id_type(config) == "kimi_k2"
        renderer = renderer_from_config(VllmConfig(model_config=config))
        self._tokenizer = renderer.get_tokenizer()
        if setup["tools"] == "auto" and not self._reads(setup["written"], setup["call"]):
            self.tools = None
        if setup["reasoning"] == "auto" and not self._fits():
            self.reasoning = None
        self._renderer = OnlineRenderer(
            model_config=config,
            renderer=renderer,
            request_logger=None,
            chat_template=None,
            chat_template_content_format="auto",
            enable_auto_tools=self.tools is not None,
            tool_parser=self.tools,
            reasoning_parser=self.reasoning,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._template: Sequence[int] = ()
        """Tokens of the last conversation before its media placeholders were expanded."""
        self.takes = _modalities(renderer)
        if self.takes:
            self._observe(renderer)
        self.skips_special = [self._skips_special(has_tools=has_tools) for has_tools in (False, True)]
        self._warm_up(renderer, _QUESTION)
        if "image" in self.takes:
            image = {"type": "image_url", "image_url": {"url": data_url("image", _SMALL_IMAGE)}}
            self._warm_up(renderer, {"role": "user", "content": [image]})

    def _warm_up(self, renderer: Any, message: Mapping[str, Any]) -> None:
        """Render a message in the parent process, so that forked workers inherit imported modules and compiled
        templates.

        This method does not call render(), because no thread may start before the forks.
        """
        request = self.request([], {}, messages=[message])
        with contextlib.suppress(Exception):  # a template can reject the message, and a model can need a larger image
            renderer.render_chat([request.messages], request.build_chat_params(None, "auto"))

    def _observe(self, renderer: Any) -> None:
        """Wrap the renderer, so that it records the tokens of each conversation before it expands media placeholders.

        vLLM does not return these tokens.
        """
        process = renderer.process_for_engine_async

        async def observed(prompt: Any, *arguments: Any, **options: Any) -> Any:
            self._template = prompt["prompt_token_ids"]
            return await process(prompt, *arguments, **options)

        renderer.process_for_engine_async = observed

    def _fits(self) -> bool:
        """Return whether the reasoning parser can be created. Some parsers need tokens that the tokenizer may lack."""
        from vllm.parser import ParserManager

        try:
            ParserManager.get_parser(
                reasoning_parser_name=self.reasoning, is_harmony=self._is_harmony, tokenizer=self._tokenizer
            )
        except Exception:
            return False
        return True

    def _reads(self, written: Sequence[str], call: Sequence[Any]) -> bool:
        """Return whether the tool parser detects the tool call that the chat template has written.

        written: the rendered text for each form of the tool call; empty: the template writes no tool calls.
        call:    name and arguments of the tool call.
        """
        from vllm.parser import ParserManager

        try:
            make = ParserManager.get_parser(
                tool_parser_name=self.tools,
                enable_auto_tools=True,
                is_harmony=self._is_harmony,
                tokenizer=self._tokenizer,
            )
        except Exception:
            return False
        return make is not None and (not written or any(_finds(make, self._tokenizer, text, call) for text in written))

    def _skips_special(self, *, has_tools: bool) -> bool:
        """Return whether the parsers need answers whose text omits special tokens."""
        tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}] if has_tools else []
        request = self.request(tools, {})
        if self._renderer.parser is not None:
            request = self.parser(request, {}).adjust_request(request)
        return bool(request.skip_special_tokens)

    def request(self, tools: Sequence[Any], variables: Mapping[str, Any], **fields: Any) -> Any:
        """Return a chat request of vLLM's class. fields: additional fields of the request."""
        from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

        offered = {"tools": list(tools), "tool_choice": "auto"} if tools else {}
        values = {"messages": [_QUESTION], "chat_template_kwargs": dict(variables) or None, **offered, **fields}
        return ChatCompletionRequest.model_validate(values)

    def parser(self, request: Any, variables: Mapping[str, Any]) -> Any:
        """Return a new parser for one choice."""
        assert self._renderer.parser is not None
        return self._renderer.parser(
            self._tokenizer, request.tools, chat_template_kwargs=dict(variables), model_config=self._config
        )

    def render(self, operation: Mapping[str, Any]) -> dict[str, Any]:
        """Return the text and the tokens of a conversation. If vLLM rejects the conversation, return the reason as
        `rejected`.

        With media, the result also has `template` and `spans`. `template` has the tokens before media placeholders were
        expanded. `spans` has the offset and the number of tokens of each image, audio or video.
        """
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
        conversation = json.loads(operation["conversation"])
        tools, variables = conversation["tools"] or (), conversation["variables"]
        media = operation.get("media", ())
        fields = {
            "messages": [_with_media(message, media) for message in conversation["messages"]],
            "add_generation_prompt": variables.pop("add_generation_prompt", True) and not conversation["continues"],
            "continue_final_message": conversation["continues"],
        }
        if self._is_harmony:  # vLLM renders this model's conversations without a chat template
            fields["reasoning_effort"] = variables.get("reasoning_effort")
        try:
            # vLLM rejects an explicit tool_choice `auto` for a model without a parser.
            request = self.request(tools, variables, **fields)
            if self.tools is None and tools:
                request.tool_choice = "none"
            answer = self._loop.run_until_complete(self._renderer.render_chat(request))
        except MemoryError:
            raise
        except Exception as error:
            return {"rejected": str(error) or type(error).__name__}
        if not isinstance(answer, tuple):
            return {"rejected": answer.error.message}
        (prompt,) = answer[1]
        tokens = prompt["prompt_token_ids"]
        text = prompt.get("prompt")
        if not isinstance(text, str):
            text = self._tokenizer.decode(tokens, skip_special_tokens=False)
        reply = {"text": text, "tokens": array("i", tokens).tobytes()}
        if media:
            try:
                spans = _spans([kind for kind, _ in media], prompt.get("mm_placeholders") or {})
            except ValueError as error:
                return {"rejected": str(error)}
            reply |= {"template": array("i", self._template).tobytes(), "spans": spans}
        return reply


def _modalities(renderer: Any) -> list[str]:
    """Return the modalities that the model accepts, out of "image", "audio" and "video"."""
    mm_processor = getattr(renderer, "mm_processor", None)
    if mm_processor is None:
        return []
    limits = mm_processor.info.allowed_mm_limits
    return [modality for modality in ("image", "audio", "video") if limits.get(modality)]


def _with_media(message: Mapping[str, Any], media: Sequence[Sequence[Any]]) -> Mapping[str, Any]:
    """Return the message with a data URL in place of each reference to an image, audio or video.

    media: the media type and the data of each item. A reference is an index of this list.
    """
    content = message.get("content")
    if not isinstance(content, list):
        return message
    parts = []
    for part in content:
        if part["type"] == "media":
            kind, data = media[part["number"]]
            name = f"{kind.partition('/')[0]}_url"
            parts.append({"type": name, name: {"url": data_url(kind, data)}})
        else:
            parts.append(part)
    return {**message, "content": parts}


def _spans(kinds: Sequence[str], placeholders: Mapping[str, Sequence[Any]]) -> list[list[int]]:
    """Return [offset, number of tokens] for each image, audio or video.

    Raises ValueError if vLLM has processed other images, audio or video than the conversation contains.
    """
    left = {modality: list(ranges) for modality, ranges in placeholders.items()}
    spans = []
    for kind in kinds:
        ranges = left.get(kind.partition("/")[0])
        if not ranges:  # the model treats videos as images, or the chat template omitted the item
            ranges = next((each for name, each in left.items() if name not in ("image", "audio", "video")), None)
        if not ranges:
            raise ValueError(f"the model's chat template left the {kind} out")
        first = ranges.pop(0)
        spans.append([first.offset, first.length])
    if any(left.values()):
        raise ValueError("vLLM found more images, audio or video than the conversation has")
    return spans


def _load_harmony() -> None:
    """Load the vocabulary of openai_harmony, which all conversations of gpt-oss need. Raises RuntimeError."""
    from vllm.entrypoints.openai.parser.harmony_utils import get_encoding

    try:
        get_encoding()
    except Exception as error:
        raise RuntimeError(
            "openai_harmony has no vocabulary of gpt-oss: set TIKTOKEN_ENCODINGS_BASE to a directory with "
            f"o200k_base.tiktoken ({error})"
        ) from error


def _finds(make: Any, tokenizer: Any, text: str, call: Sequence[Any]) -> bool:
    """Return whether a parser detects exactly the tool call `call` in a text. make: returns the parser."""
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest

    name, arguments = call
    tool = {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}
    values = {"messages": [{"role": "user", "content": ""}], "tools": [tool], "tool_choice": "auto"}
    try:
        request = ChatCompletionRequest.model_validate(values)
        parser = make(tokenizer, request.tools)
        request = parser.adjust_request(request)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        _, _, calls = parser.parse(text, request, enable_auto_tools=True, model_output_token_ids=tokens)
        return [(parsed.name, json.loads(parsed.arguments)) for parsed in calls or ()] == [(name, arguments)]
    except Exception:
        return False


class UnknownParserError(ValueError):
    """A server setting names a parser that exists neither in vLLM nor in this server."""


def _chosen(
    setting: str, automatic: str | None, installed: Sequence[str], ours: Mapping[str, str], *, option: str
) -> str | None:
    """Return the name of the vLLM parser for the value of a server setting, or None for no parser.

    automatic: the parser for "auto".
    ours:      vLLM's parsers, by this server's names of the formats.

    Raises UnknownParserError if the value is not a known name.
    """
    if setting in ("auto", "none"):
        return automatic if setting == "auto" else None
    if setting in installed:
        return setting
    if setting in (TOOL_FORMATS if option == "--tool-call-parser" else REASONING_FORMATS):
        return None if ours.get(setting) not in installed else ours[setting]
    raise UnknownParserError(
        f"{option} {setting!r} is not a parser of the installed vLLM: use auto, none or one of {', '.join(installed)}"
    )


class ChoiceParser:
    """Parses the answer of one choice with vLLM's parsers."""

    def __init__(self, formats: Formats, opening: Mapping[str, Any]) -> None:
        opening_request = json.loads(opening["request"])
        messages = (
            [_QUESTION, _with_calls(opening_request["earlier_calls"]), _QUESTION]
            if opening_request["earlier_calls"]
            else [_QUESTION]
        )
        self._request = formats.request(opening_request["tools"], opening_request["variables"], messages=messages)
        self._parser = formats.parser(self._request, opening_request["variables"])
        self._request = self._parser.adjust_request(self._request)
        self._prompt = _tokens(opening["prompt"])
        self._has_begun = False

    def read(self, text: str, tokens: list[int], *, is_last: bool) -> list[list[Any]]:
        """Parse the next part of the answer, and return its events.

        If the first part is also the last part, it is parsed as a complete answer.
        """
        is_first, self._has_begun = not self._has_begun, True
        if is_first and is_last:
            self._parser.set_prompt_token_ids(self._prompt)
            reasoning, content, calls = self._parser.parse(
                text, self._request, enable_auto_tools=True, model_output_token_ids=tokens
            )
            events: list[list[Any]] = [[REASONING, reasoning]] if reasoning else []
            events += [[TEXT, content]] if content else []
            for call in calls or ():
                events += [[CALL, call.name, _id(call)], [ARGUMENTS, call.arguments]]
            return events
        delta = self._parser.parse_delta(text, tokens, self._request, self._prompt, finished=is_last)
        if delta is None:
            return []
        events = [[REASONING, delta.reasoning]] if delta.reasoning else []
        events += [[TEXT, delta.content]] if delta.content else []
        for call in delta.tool_calls or ():
            if call.function is not None and call.function.name:
                events.append([CALL, call.function.name, _id(call)])
            if call.function is not None and call.function.arguments:
                events.append([ARGUMENTS, call.function.arguments])
        return events


_QUESTION: Mapping[str, Any] = {"role": "user", "content": ""}


def _with_calls(number: int) -> dict[str, Any]:
    """Return a placeholder message of the assistant with `number` tool calls.

    It stands for earlier tool calls of a conversation, because some vLLM parsers number the calls of a conversation.
    """
    call = {"id": "0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    return {"role": "assistant", "content": "", "tool_calls": [call] * number}


def _id(call: Any) -> str | None:
    """Return the id that a parser assigned to a tool call.

    Return None if there is no id, or if the id is too long or not Unicode.
    """
    id_ = call.id
    return id_ if id_ and len(id_) <= MAX_NAME_CHARACTERS and is_unicode(id_) else None


def _tokens(packed: bytes) -> list[int]:
    tokens = array("i")
    tokens.frombytes(packed)
    return tokens.tolist()


class Worker:
    """The state of a worker process. It handles the operations that arrive on one socket."""

    def __init__(self, formats: Formats) -> None:
        self._formats = formats
        self._answers: dict[int, ChoiceParser] = {}

    def handle(self, operation: Mapping[str, Any]) -> dict[str, Any]:
        """Return the reply to an operation. If a parser raised an error, the reply has the error as `failed`."""
        for closed in operation.get("closed", ()):
            self._answers.pop(closed, None)
        if operation["do"] == "render":
            return self._formats.render(operation)
        key = operation["answer"]
        try:
            if "opening" in operation:
                self._answers[key] = ChoiceParser(self._formats, operation["opening"])
                for text, tokens in operation["earlier"]:
                    self._answers[key].read(text, _tokens(tokens), is_last=False)
            events = self._answers[key].read(
                operation["text"], _tokens(operation["tokens"]), is_last=operation["is_last"]
            )
        except MemoryError:
            raise
        except Exception as error:
            return {"failed": f"{type(error).__name__}: {error}"}
        return {"events": events}


def serve(channel: socket.socket, formats: Formats, *, memory_bytes: int) -> None:
    """Run as a worker process until the server closes the socket. Does not return."""
    status = 1
    try:
        be_child()
        limit_memory(memory_bytes)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        # Discard standard output, because a parser can print text of a client, which must not appear in the log.
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), sys.stdout.fileno())
            os.dup2(nothing.fileno(), sys.stderr.fileno())
        worker = Worker(formats)
        while True:
            seconds, size = HEADER.unpack(_received(channel, HEADER.size))
            signal.setitimer(signal.ITIMER_REAL, seconds)
            batch = unpack(_received(channel, size), MESSAGE_LIMITS)
            reply = pack([worker.handle(operation) for operation in batch])
            signal.setitimer(signal.ITIMER_REAL, 0)
            channel.sendall(SIZE.pack(len(reply)) + reply)
    except ConnectionError:
        status = 0
    except MemoryError:
        status = OUT_OF_MEMORY
    finally:
        os._exit(status)


def _received(channel: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        part = channel.recv(min(size - len(received), 1 << 20))
        if not part:
            raise ConnectionResetError("the server closed the connection")
        received += part
    return bytes(received)


def main() -> None:
    """Run as the parent process: report the parsers, then fork a worker for each socket that arrives."""
    control, setup = socket.socket(fileno=int(sys.argv[1])), json.loads(sys.argv[2])
    be_child()
    try:
        formats = Formats(setup)
    except Exception as error:
        is_setting = isinstance(error, UnknownParserError)
        reason = str(error) if is_setting else f"{type(error).__name__}: {error}"
        _send(control, {"unusable": reason, "is_setting": is_setting})
        return
    _send(
        control,
        {
            "tools": formats.tools,
            "reasoning": formats.reasoning,
            "skips_special": formats.skips_special,
            "takes": formats.takes,
            "numbers_calls": formats.numbers_calls,
        },
    )
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the kernel reaps workers that have exited
    while True:
        message, descriptors, _, _ = socket.recv_fds(control, 1, 1)
        if not message:
            return
        with socket.socket(fileno=descriptors[0]) as channel:
            pid = os.fork()
            if pid == 0:
                control.close()
                serve(channel, formats, memory_bytes=setup["memory_bytes"])
        with contextlib.suppress(ConnectionError):
            _send(control, {"pid": pid})


def _send(control: socket.socket, message: Mapping[str, Any]) -> None:
    data = pack(message)
    control.sendall(SIZE.pack(len(data)) + data)


if __name__ == "__main__":
    main()
