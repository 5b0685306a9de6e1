"""The table of tool-call formats: how families of models write tool calls, and which parser reads the tool calls."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_runtime.protocol import strict_json as json
from megatron_runtime.protocol.answer_formats import TOOL_FORMATS
from megatron_runtime.server.formats import call_grammars
from megatron_runtime.server.formats.call_grammars import CallGrammar, Schemas, Written
from megatron_runtime.server.formats.harmony import HarmonyParser
from megatron_runtime.server.formats.head import Head
from megatron_runtime.server.formats.json_calls import Functionary32Parser, JsonCalls, Llama3JsonParser
from megatron_runtime.server.formats.parser import CallArguments, CallBegin, CallsOrTextParser, ToolParser
from megatron_runtime.server.formats.pythonic import Lfm2Parser, PythonicParser
from megatron_runtime.server.formats.tagged_calls import TaggedCalls
from megatron_runtime.server.formats.whole_calls import Gemma4Parser, MiniMaxM3Parser

_SPECIAL = re.compile(r"<[^<>\s]*>|\[/?[A-Z_]+\]")
"""Matches texts in a format that can be special tokens of the vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat:
    """How a family of models writes tool calls.

    name:    name for `--tool-call-parser`.
    make:    returns a parser for one choice. The argument maps the name of each tool to the JSON schema of its
             arguments. Calling the ToolFormat calls `make`.
    starts:  texts that begin a tool call. Empty: tool calls have no marker, and are the whole answer.
    markers: special tokens of the vocabulary that the parser needs as text.
    texts:   all literal texts of the format, including `dropped`. The server searches these texts for special tokens.
    dropped: texts of the format outside of tool calls, which are not part of the answer.
    hints:   texts in a chat template that indicate the format even if the template writes no tool call.
    decides: whether the hints take precedence over the tool calls that the template writes.
    grammar: returns the grammar of an answer after the text that begins the first tool call; see call_grammars.
    """

    name: str
    make: Callable[[Mapping[str, Mapping[str, Any]]], ToolParser]
    grammar: Callable[[Schemas, Written, bool], CallGrammar]
    starts: tuple[str, ...] = ()
    markers: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()
    dropped: tuple[str, ...] = ()
    hints: tuple[str, ...] = ()
    decides: bool = False

    def __call__(self, tools: Mapping[str, Mapping[str, Any]]) -> ToolParser:
        return self.make(tools)

    def calls_or_json(self, tools: Mapping[str, Mapping[str, Any]]) -> ToolParser | CallsOrTextParser:
        """Return a parser for an answer that a grammar restricts to tool calls or JSON."""
        parser = self.make(tools)
        # The messages of gpt-oss begin with special tokens, which JSON cannot contain.
        return parser if isinstance(parser, HarmonyParser) else CallsOrTextParser(parser, self.starts)

    def reads(self, text: str, name: str, arguments: Mapping[str, Any]) -> bool:
        """Return whether the parser detects exactly one tool call in a text, with this name and these arguments."""
        parser = self.make({name: {"properties": {key: {} for key in arguments}}})
        events = [*parser.feed(text), *parser.finish()]
        names = [event.name for event in events if isinstance(event, CallBegin)]
        written = "".join(event.text for event in events if isinstance(event, CallArguments))
        try:
            return names == [name] and json.loads(written) == arguments
        except ValueError:
            return False


_DEEPSEEK_OPEN, _DEEPSEEK_CLOSE = "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"
_DSML = "｜DSML｜"

_FAMILIES: Mapping[str, JsonCalls | TaggedCalls] = {
    "qwen3_coder": TaggedCalls(
        open=("<tool_call>",),
        call=Head(" <function={name}>"),
        parameter=Head(" <parameter={key}>"),
        value_end="</parameter>",
        call_end="</function>",
        close="</tool_call>",
        is_padded=True,
    ),
    "glm45": TaggedCalls(
        open=("<tool_call>",),
        call=Head(" {name} {?<}"),
        parameter=Head(" <arg_key>{key}</arg_key> <arg_value>"),
        value_end="</arg_value>",
        close="</tool_call>",
    ),
    "hermes": JsonCalls(open=("<tool_call>",), bodies=("object", "list"), close="</tool_call>"),
    "seed_oss": TaggedCalls(
        open=("<seed:tool_call>",),
        call=Head(" <function={name}>"),
        parameter=Head(" <parameter={key}>"),
        value_end="</parameter>",
        call_end="</function>",
        close="</seed:tool_call>",
    ),
    "minimax_m2": TaggedCalls(
        open=("<minimax:tool_call>",),
        call=Head(' <invoke name="{name}">'),
        parameter=Head(' <parameter name="{key}">'),
        value_end="</parameter>",
        call_end="</invoke>",
        close="</minimax:tool_call>",
    ),
    "deepseek_v32": TaggedCalls(
        open=(f"<{_DSML}function_calls>",),
        call=Head(f' <{_DSML}invoke name="{{name}}">'),
        parameter=Head(f' <{_DSML}parameter name="{{key}}" string="{{type}}">'),
        value_end=f"</{_DSML}parameter>",
        call_end=f"</{_DSML}invoke>",
        close=f"</{_DSML}function_calls>",
    ),
    "deepseek_v4": TaggedCalls(
        open=(f"<{_DSML}tool_calls>",),
        call=Head(f' <{_DSML}invoke name="{{name}}">'),
        parameter=Head(f' <{_DSML}parameter name="{{key}}" string="{{type}}">'),
        value_end=f"</{_DSML}parameter>",
        call_end=f"</{_DSML}invoke>",
        close=f"</{_DSML}tool_calls>",
    ),
    "hunyuan_v3": TaggedCalls(
        open=("<tool_calls:opensource>",),
        call=Head(" <tool_call:opensource>{name}<tool_sep:opensource>"),
        parameter=Head(" <arg_key:opensource>{key}</arg_key:opensource> <arg_value:opensource>"),
        value_end="</arg_value:opensource>",
        call_end="</tool_call:opensource>",
        close="</tool_calls:opensource>",
    ),
    "kimi_k3": TaggedCalls(
        open=("<|open|>tools<|sep|>",),
        call=Head(' <|open|>call tool="{name}" index="{index}"<|sep|>'),
        parameter=Head(' <|open|>argument key="{key}" type="{type}"<|sep|>'),
        value_end="<|close|>argument<|sep|>",
        call_end="<|close|>call<|sep|>",
        close="<|close|>tools<|sep|>",
        dropped=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
    ),
    "muse": TaggedCalls(
        open=("<atem:function_calls>",),
        call=Head(' <atem:invoke name="{name}">'),
        parameter=Head(' <atem:parameter name="{key}">'),
        value_end="</atem:parameter>",
        call_end="</atem:invoke>",
        close="</atem:function_calls>",
        dropped=("<|eom|>", "<|start|>assistant"),
        headers=(Head(" to={recipient}<|message|>"), Head("<|message|>")),
    ),
    "minicpm5": TaggedCalls(
        open=('<function name="',),
        call=Head('{name}">'),
        parameter=Head(' <param name="{key}">'),
        value_end="</param>",
        close="</function>",
    ),
    "deepseek_v31": JsonCalls(
        open=(_DEEPSEEK_OPEN,),
        bodies=(),
        heads=(Head(" <｜tool▁call▁begin｜>{name}<｜tool▁sep｜> {?{}"),),
        end="<｜tool▁call▁end｜>",
        close=_DEEPSEEK_CLOSE,
    ),
    "deepseek_v3": JsonCalls(
        open=(_DEEPSEEK_OPEN,),
        bodies=(),
        heads=(Head(" <｜tool▁call▁begin｜>function<｜tool▁sep｜>{name} ```json "),),
        end="```<｜tool▁call▁end｜>",
        close=_DEEPSEEK_CLOSE,
    ),
    "kimi_k2": JsonCalls(
        open=("<|tool_calls_section_begin|>",),
        bodies=(),
        heads=(
            Head(" <|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>"),
            Head(" <|tool_call_begin|>{name}:{index}<|tool_call_argument_begin|>"),
        ),
        end="<|tool_call_end|>",
        close="<|tool_calls_section_end|>",
    ),
    "solar": JsonCalls(
        open=("<|begin|>assistant<|tool_calls|>", "<|tool_calls|>"),
        bodies=(),
        heads=(Head(" <|tool_call:begin|>{id}<|tool_call:name|>{name}<|tool_call:args|>"),),
        end="<|tool_call:end|>",
        close="<|calls|>",
        dropped=("<|begin|>assistant<|content|>", "<|content|>", "<|end|>"),
    ),
    "mistral": JsonCalls(
        open=("[TOOL_CALLS]",),
        keys=(("name", "name"), ("arguments", "arguments"), ("id", "id")),
        heads=(Head(" {name} [CALL_ID] {id}[ARGS]"), Head(" {name} [ARGS]"), Head(" {name} {?{}")),
    ),
    "minimax": JsonCalls(open=("<tool_calls>",), close="</tool_calls>"),
    "nemotron": JsonCalls(open=("<TOOLCALL>",), bodies=("list",), close="</TOOLCALL>"),
    "command_a": JsonCalls(
        open=("<|START_ACTION|>",),
        bodies=("list",),
        keys=(("tool_call_id", "id"), ("tool_name", "name"), ("parameters", "arguments")),
        close="<|END_ACTION|>",
    ),
    "command_r_plus": JsonCalls(
        open=("Action:\n```json\n", "Action: ```json\n", "Action:```json\n"),
        bodies=("list",),
        keys=(("tool_name", "name"), ("parameters", "arguments")),
        close="```",
    ),
    "apertus": JsonCalls(open=("<|tools_prefix|>",), bodies=("keyed",), close="<|tools_suffix|>"),
    "granite": JsonCalls(open=("<|tool_call|>",), bodies=("list",)),
    "gigachat3": JsonCalls(
        open=(
            "<|message_sep|>\n\nfunction call<|role_sep|>\n",
            "function call<|role_sep|>\n",
            "<|function_call|>",
        ),
        bodies=("object",),
        close="<|message_sep|>",
    ),
    "functools": JsonCalls(open=("functools",), bodies=("list",)),
    "functionary_v31": JsonCalls(open=("<function=",), bodies=(), heads=(Head("{name}>"),), end="</function>"),
}
"""Formats whose parser and grammar are derived from a table entry, by name."""

_HINTS: Mapping[str, tuple[str, ...]] = {
    "qwen3_coder": ("<function=",),
    "glm45": ("<arg_key>",),
    "lfm2": ("<|tool_list_start|>", "List of tools: ["),
    "pythonic": ("[func_name1(",),
    "llama3_json": ("<|python_tag|>", '{"name": function name, "parameters":'),
}
"""`ToolFormat.hints` by name of the format: texts in chat templates other than the texts that begin a tool call."""


def _of_family(name: str, calls: JsonCalls | TaggedCalls) -> ToolFormat:
    return ToolFormat(
        name=name,
        make=calls.parser,
        starts=calls.open,
        dropped=calls.dropped,
        markers=tuple(dict.fromkeys(_SPECIAL.findall(" ".join(calls.texts)))),
        texts=calls.texts,
        hints=_HINTS.get(name, ()),
        grammar=calls.grammar,
    )


_FORMATS = (
    *(_of_family(name, calls) for name, calls in _FAMILIES.items()),
    ToolFormat(
        name="gpt_oss",
        make=HarmonyParser,
        starts=("<|channel|>commentary to=functions.",),
        markers=(*HarmonyParser.MARKERS, *HarmonyParser.ENDS),
        texts=(*HarmonyParser.MARKERS, *HarmonyParser.ENDS, "<|constrain|>"),
        hints=("<|channel|>",),
        grammar=call_grammars.gpt_oss,
    ),
    ToolFormat(
        name="gemma4",
        make=Gemma4Parser,
        starts=(Gemma4Parser.OPEN,),
        markers=(Gemma4Parser.OPEN, Gemma4Parser.END, Gemma4Parser.QUOTE),
        texts=(Gemma4Parser.OPEN, Gemma4Parser.END, Gemma4Parser.QUOTE),
        grammar=call_grammars.gemma4,
    ),
    ToolFormat(
        name="minimax_m3",
        make=MiniMaxM3Parser,
        starts=(MiniMaxM3Parser.OPEN,),
        markers=(MiniMaxM3Parser.TAG,),
        texts=(MiniMaxM3Parser.OPEN, MiniMaxM3Parser.HEAD.spec, MiniMaxM3Parser.END, MiniMaxM3Parser.CLOSE),
        grammar=call_grammars.minimax_m3,
    ),
    ToolFormat(
        name="lfm2",
        make=Lfm2Parser,
        starts=(Lfm2Parser.OPEN,),
        markers=(Lfm2Parser.OPEN, Lfm2Parser.CLOSE),
        texts=(Lfm2Parser.OPEN, Lfm2Parser.CLOSE),
        hints=_HINTS["lfm2"],
        grammar=call_grammars.lfm2,
    ),
    ToolFormat(name="functionary_v32", make=Functionary32Parser, grammar=call_grammars.functionary_v32),
    ToolFormat(
        name="pythonic",
        make=PythonicParser,
        hints=_HINTS["pythonic"],
        decides=True,
        grammar=call_grammars.pythonic,
    ),
    ToolFormat(
        name="llama3_json",
        make=Llama3JsonParser,
        markers=(Llama3JsonParser.TAG,),
        texts=(Llama3JsonParser.TAG,),
        hints=_HINTS["llama3_json"],
        grammar=call_grammars.llama3_json,
    ),
)

PARSERS: Mapping[str, ToolFormat] = {
    name: next(format_ for format_ in _FORMATS if format_.name == name) for name in TOOL_FORMATS
}
"""All formats, by name."""
assert len(PARSERS) == len(_FORMATS)
