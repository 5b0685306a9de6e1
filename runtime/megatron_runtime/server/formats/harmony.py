"""`HarmonyParser`, the parser for answers of gpt-oss."""

from __future__ import annotations

import re

from megatron_runtime.server.formats.parser import CallArguments, Event, Reading, Reasoning, Text, ToolParser


class HarmonyParser(ToolParser):
    """Parses answers of gpt-oss: messages of the form `<|channel|>channel [to=recipient] …<|message|>…<|end|>`.

    A message in the channel `analysis` is reasoning. A message to `functions.name` is a tool call if the request has
    tools. Any other message is text.
    """

    MARKERS = ("<|channel|>", "<|message|>", "<|start|>", "<|end|>")
    ENDS = ("<|end|>", "<|call|>")
    _MESSAGE = "<|message|>"
    _RECIPIENT = re.compile(r"to=functions\.([\w.-]{1,256})")
    _CHANNEL = re.compile(r"<\|channel\|>\s{0,8}(\w{1,64})")

    def finish(self) -> list[Event]:
        """End the answer, and return the remaining events.

        An incomplete message header is dropped unless it names a tool.
        """
        if self._kind is None:
            header = self._take_read() + self._buffer[self._at :]
            if not header.startswith(("<|start|>", "<|channel|>")) or self._RECIPIENT.search(header) is not None:
                self._held.append(header)
            self._start = self._at = len(self._buffer)
        return super().finish()

    def _read(self) -> Reading:
        while True:
            while (place := self._buffer.find(self._MESSAGE, self._at)) < 0:
                self._read_but(self._MESSAGE)
                yield
            self._at = place
            header = self._take_read()
            self._at += len(self._MESSAGE)
            recipient, channel = self._RECIPIENT.search(header), self._CHANNEL.search(header)
            if recipient is not None and self._tools:
                self._begin(recipient[1])
                self._kind = CallArguments
            else:
                self._flush()
                self._kind = Reasoning if channel is not None and channel[1] == "analysis" else Text
            end = yield from self._read_until(*self.ENDS)
            self._at += len(end)
            self._flush()
            self._in_call = False
