"""The translator of a client of Megatron-Core."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from megatron_runtime.coordinator.plain.messages import (
    PER_TOKEN,
    WANTS_RECORD,
    Detokenize,
    OpenRequest,
    PlainSubmit,
    failed_frames,
    joined_log_probs,
    partial_frames,
    reply_frames,
)
from megatron_runtime.protocol import limits
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
    Frames,
    Heartbeat,
    Hello,
    HelloAck,
    MalformedMessageError,
    Message,
    Partial,
    Submit,
    decode,
    extended_map,
    header_of,
    pack,
    unpack,
)

logger = logging.getLogger(__name__)

_FINAL, _HEARTBEAT = int(Header.FINAL), int(Header.HEARTBEAT)


class ClientTranslator:
    """Turns the frames of one client into native messages, and back.

    accept:   passes a native message to the core.
    send:     sends messages to the client, all or none; False if its connection does not accept them.
    requests: the open requests of all plain clients by uid. The engines' translators leave their answers as they are.
    """

    def __init__(
        self,
        name: str,
        *,
        accept: Callable[[Message], None],
        send: Callable[..., bool],
        requests: dict[bytes, OpenRequest],
        randbits: Callable[[int], int],
        detokenize: Detokenize,
    ) -> None:
        self.name = name
        self._accept = accept
        self._send = send
        self._requests = requests
        self._randbits = randbits
        self._detokenize = detokenize
        self._incarnation = randbits(64)
        self._heartbeat = Heartbeat(incarnation=self._incarnation)
        self._uids: dict[int, bytes] = {}
        self._log_probs: dict[bytes, dict[str, list[Any]]] = {}
        """Of the tokens that partials brought. An engine that continues the request does not have them."""
        self._is_registered = False

    # --- from the client ----------------------------------------------------------------------------------------

    def receive(self, frame: bytes) -> None:
        """Raises MalformedMessageError."""
        header = header_of(frame)
        if header == Header.SUBMIT_REQUEST:
            self._submit(frame)
        elif header == Header.CONNECT:
            self._accept(Hello(role=Role.CLIENT, name=self.name, incarnation=self._incarnation))
        elif header in CONTROLS or header == Header.DISCONNECT:
            message = decode([frame])
            assert isinstance(message, Control | Disconnect)
            self._accept(message)
        elif header == Header.RELEASE_KV:
            pass  # nothing is held, and an answer would end the client, which expects none
        elif header in (Header.ABORT_REQUEST, Header.SUBMIT_REQUEST_WITH_KV):
            match unpack(frame, PLAIN):
                case [Header.ABORT_REQUEST, int(number), *_]:
                    if number in self._uids:
                        self._accept(Abort(self._forget(self._uids[number])))
                case [_, int(number), *_]:
                    text = "UnsupportedByBackend: no engine reads the KV of another: send SUBMIT_REQUEST"
                    self._send(failed_frames(number, ErrorCode.UNSUPPORTED, text))
        else:
            raise MalformedMessageError(f"header {header}: want a message of a client of Megatron-Core")

    def _submit(self, frame: bytes) -> None:
        try:
            submit = PlainSubmit.read(frame, randbits=self._randbits)
        except MalformedMessageError as error:
            match unpack(frame, PLAIN):
                case [_, int(number), *_]:
                    self._send(failed_frames(number, ErrorCode.INVALID_REQUEST, str(error)))
            raise
        uid = self._randbits(8 * limits.UID_BYTES).to_bytes(limits.UID_BYTES, "little")
        request, prompt = submit.request, submit.prompt
        if isinstance(prompt, str):
            prompt = prompt.encode("utf-8", "replace")
        self._uids[request.number] = uid
        self._requests[uid] = request
        self._accept(Submit(uid, submit.meta, prompt, b"", extended_map(request.params, WANTS_RECORD, 1)))

    # --- to the client ------------------------------------------------------------------------------------------

    def send(self, frames: Frames) -> bool:
        """Send what the core sends. False if the connection does not accept it."""
        header = header_of(frames[0])
        if header == _FINAL:
            _, _, uid, tokens, reply = unpack_request(frames[0])  # the core has checked it
            return self._end(uid, lambda request: self._reply(request, tokens, reply))
        if header == _HEARTBEAT:
            self._accept(self._heartbeat)
            return True
        match message := decode(frames):
            case Error(uid=bytes(uid), code=code, message=cause):
                return self._end(uid, lambda request: failed_frames(request.number, code, cause))
            case Partial():
                return self._send(*self._partials(message))
            case HelloAck():
                self._is_registered = True
                return self._send([pack([int(Header.CONNECT_ACK)])])
            case Error() if not self._is_registered:
                return self._send(frames)
            case Error(message=text) | ControlAck(ok=False, error=text):
                logger.warning("a message of client %s was rejected: %s", self.name, text)
        return True

    def _end(self, uid: bytes, answer: Callable[[OpenRequest], Frames]) -> bool:
        """Send the answer of a request. False if the connection does not accept it."""
        request = self._requests.get(uid)
        if request is not None and not self._send(answer(request)):
            return False
        self._forget(uid)
        return True

    def _reply(self, request: OpenRequest, tokens: bytes, reply: bytes) -> Frames:
        log_probs = self._log_probs.get(self._uids.get(request.number, b""))
        if log_probs is not None:
            reply = joined_log_probs(reply, log_probs, count=len(tokens) // 4)
        return reply_frames(request, tokens, reply, detokenize=self._detokenize)

    def _partials(self, message: Partial) -> list[Frames]:
        extras, found, begin = Extras(message.extras), [], 0
        for uid, _, offset, count in message.entries:
            end = begin + 4 * count
            request = self._requests.get(uid)
            if request is not None:
                details = extras.of(uid) if message.extras else b""
                more = unpack(details, PLAIN) if details else {}
                self._keep_log_probs(uid, offset, more)
                found.append(partial_frames(request.number, message.tokens[begin:end], more))
            begin = end
        return found

    def _keep_log_probs(self, uid: bytes, offset: int, details: dict[str, Any]) -> None:
        """Keep those of new tokens. The first is number `offset`, and some may have been sent before."""
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
        """The connection has ended: the core aborts the client's requests."""
        for uid in list(self._uids.values()):
            self._forget(uid)
        self._accept(Disconnect(reason="its connection is gone"))
