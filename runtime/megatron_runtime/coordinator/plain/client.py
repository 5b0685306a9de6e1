"""The translator for a client of Megatron-Core."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

from megatron_runtime.coordinator.plain.messages import (
    PER_TOKEN,
    Detokenize,
    FrameForm,
    OpenRequest,
    failed_frames,
    partial_frames,
    read_submit,
    reply_frames,
)
from megatron_runtime.protocol.codec import unpack_request
from megatron_runtime.protocol.extras import Extras
from megatron_runtime.protocol.headers import CONTROLS, ErrorCode, Header, Role
from megatron_runtime.protocol.messages import (
    PLAIN,
    Abort,
    Control,
    ControlAck,
    Disconnect,
    Error,
    Final,
    Frames,
    Heartbeat,
    Hello,
    HelloAck,
    MalformedMessageError,
    Message,
    NativeMessage,
    Outgoing,
    Partial,
    Submit,
    decode,
    header_of,
    pack,
    unpack,
)

logger = logging.getLogger(__name__)

_FINAL = int(Header.FINAL)


class ClientTranslator:
    """A translator that converts the messages of one client between Megatron-Core's and the native protocol.

    form:     how the client divides messages into frames; None until the client has submitted a request.
    accept:   passes a native message to the core.
    send:     sends all messages to the client, or none; returns False if its connection does not accept them.
    requests: the open requests of all plain clients by uid. The translators of Megatron-Core's engines do not change
              answers to these requests.
    """

    def __init__(
        self,
        name: str,
        *,
        accept: Callable[[NativeMessage], None],
        send: Callable[..., bool],
        requests: dict[bytes, OpenRequest],
        randbits: Callable[[int], int],
        detokenize: Detokenize,
    ) -> None:
        self.name = name
        self.form: FrameForm | None = None
        self._accept = accept
        self._send = send
        self._requests = requests
        self._randbits = randbits
        self._detokenize = detokenize
        self._incarnation = randbits(64)
        self._heartbeat = Heartbeat(incarnation=self._incarnation)
        self._uid_begin = randbits(64).to_bytes(8, "little")
        self._uid_ends = itertools.count()
        self._uids: dict[int, bytes] = {}
        self._log_probs: dict[bytes, dict[str, list[Any]]] = {}
        """Log-probabilities of the tokens sent in partials. An engine that continues the request does not have them."""
        self._is_registered = False

    # --- from the client ----------------------------------------------------------------------------------------

    def receive(self, frames: Frames) -> None:
        """Handle a message of the client. Raises MalformedMessageError if the message is invalid."""
        header = header_of(frames[0])
        if header == Header.SUBMIT_REQUEST:
            self._submit(frames)
        elif header == Header.CONNECT:
            self._accept(Hello(role=Role.CLIENT, name=self.name, incarnation=self._incarnation))
        elif header in CONTROLS or header == Header.DISCONNECT:
            message = decode(frames)
            assert isinstance(message, Control | Disconnect)
            self._accept(message)
        elif header == Header.RELEASE_KV:
            pass  # do nothing: the client expects no answer, and would fail if it received one
        elif header in (Header.ABORT_REQUEST, Header.SUBMIT_REQUEST_WITH_KV):
            match unpack(frames[0], PLAIN):
                case [Header.ABORT_REQUEST, int(number), *_]:
                    if number in self._uids:
                        self._accept(Abort(self._forget(self._uids[number])))
                case [_, int(number), *_]:
                    text = "UnsupportedByBackend: no engine reads the KV of another: send SUBMIT_REQUEST"
                    form = FrameForm.ONE_FRAME if len(frames) == 1 else FrameForm.BODIES
                    self._send(failed_frames(form, number, ErrorCode.UNSUPPORTED, text))
        else:
            raise MalformedMessageError(f"header {header}: want a message of a client of Megatron-Core")

    def _submit(self, frames: Frames) -> None:
        self.form = FrameForm.ONE_FRAME if len(frames) == 1 else FrameForm.BODIES
        try:
            request, prompt, meta = read_submit(frames, randbits=self._randbits)
        except MalformedMessageError as error:
            match unpack(frames[0], PLAIN):
                case [_, int(number), *_]:
                    self._send(failed_frames(self.form, number, ErrorCode.INVALID_REQUEST, str(error)))
            raise
        if request.params.keeps_blocks:
            text = "UnsupportedByBackend: no engine keeps KV for this protocol: leave out do_kv_handoff"
            self._send(failed_frames(self.form, request.number, ErrorCode.UNSUPPORTED, text))
            return
        # The first half of a uid is random, so that the uids of different clients differ.
        uid = self._uid_begin + next(self._uid_ends).to_bytes(8, "little")
        self._uids[request.number] = uid
        self._requests[uid] = request
        self._accept(Submit(uid, meta, prompt, b"", request.params.native))

    # --- to the client ------------------------------------------------------------------------------------------

    def send(self, sent: Outgoing) -> bool:
        """Send a message of the core to the client. Return False if the connection does not accept it."""
        message = _decoded(sent) if isinstance(sent, list) else sent
        if isinstance(message, Final):
            return self._end(message.uid, partial(self._reply, message))
        match message:
            case Heartbeat():
                self._accept(self._heartbeat)
            case Error(uid=bytes(uid), code=code, message=cause):
                return self._end(uid, lambda request: failed_frames(request.form, request.number, code, cause))
            case Partial():
                return self._send(*self._partials(message))
            case HelloAck():
                self._is_registered = True
                return self._send([pack([int(Header.CONNECT_ACK)])])
            case Error() if not self._is_registered:
                return self._send(message.to_frames())
            case Error(message=text) | ControlAck(ok=False, error=text):
                logger.warning("a message of client %s was rejected: %s", self.name, text)
        return True

    def _end(self, uid: bytes, answer: Callable[[OpenRequest], Frames]) -> bool:
        """Send the final answer to a request. Return False if the connection does not accept it."""
        request = self._requests.get(uid)
        if request is not None and not self._send(answer(request)):
            return False
        self._forget(uid)
        return True

    def _reply(self, final: Final, request: OpenRequest) -> Frames:
        before = self._log_probs.get(final.uid, {})
        return reply_frames(request, final.tokens, final.reply, before=before, detokenize=self._detokenize)

    def _partials(self, message: Partial) -> list[Frames]:
        extras, found, begin = Extras(message.extras), [], 0
        for uid, _, offset, count in message.entries:
            end = begin + 4 * count
            request = self._requests.get(uid)
            if request is not None:
                details = extras.of(uid) if message.extras else b""
                more = unpack(details, PLAIN) if details else {}
                self._keep_log_probs(uid, offset, more)
                found.append(partial_frames(request, message.tokens[begin:end], more))
            begin = end
        return found

    def _keep_log_probs(self, uid: bytes, offset: int, details: dict[str, Any]) -> None:
        """Store the log-probabilities of new tokens.

        offset: index, in the answer, of the first token in `details`. Log-probabilities that are already stored are
                skipped.
        """
        for name in PER_TOKEN & details.keys():
            kept = self._log_probs.setdefault(uid, {}).setdefault(name, [])
            if isinstance(details[name], list) and len(kept) >= offset:
                kept += details[name][len(kept) - offset :]

    def _forget(self, uid: bytes) -> bytes:
        self._log_probs.pop(uid, None)
        request = self._requests.pop(uid, None)
        if request is not None and self._uids.get(request.number) == uid:
            del self._uids[request.number]
        return uid

    def close(self) -> None:
        """Handle the end of the connection. The core aborts the client's requests."""
        for uid in list(self._uids.values()):
            self._forget(uid)
        self._accept(Disconnect(reason="its connection is gone"))


def _decoded(frames: Frames) -> Message:
    """Return the message that `frames` contain. The frames come from the core, so they are not validated again."""
    if header_of(frames[0]) == _FINAL:
        return Final._make(unpack_request(frames[0])[1:5])
    return decode(frames)
