"""The translator for an engine of Megatron-Core."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from megatron_runtime.coordinator.environment import PromptReader
from megatron_runtime.coordinator.plain.messages import (
    Detokenize,
    EngineOutput,
    FrameForm,
    OpenRequest,
    failed_reply,
    read_outputs,
    submit_frames,
)
from megatron_runtime.protocol.epochs import TokenEpochs
from megatron_runtime.protocol.headers import ErrorCode, Header, Role
from megatron_runtime.protocol.lifecycle import TRANSITIONS, EngineState, signals_to_join
from megatron_runtime.protocol.messages import (
    ENGINE_FAILED,
    PARAMETERS,
    Abort,
    Control,
    ControlAck,
    ControlCommit,
    Disconnect,
    Dispatch,
    Error,
    Final,
    Frames,
    Heartbeat,
    Hello,
    HelloAck,
    MalformedMessageError,
    NativeMessage,
    Outgoing,
    PackedTokens,
    Partial,
    PartialEntry,
    decode,
    header_of,
    pack,
    token_list_from_bytes,
    unpack,
)

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Running:
    """A dispatch that the engine runs.

    given:  int32 tokens that earlier dispatches generated. They were appended to the prompt.
    epochs: epochs of the weights that sampled the tokens in `given`.
    held:   number of answer tokens that the core has, from the dispatch or from partials.
    prompt_length: number of tokens of the prompt without `given`; 0 if `given` is empty.
    """

    uid: bytes
    route: int
    given: bytes
    held: int
    epochs: TokenEpochs
    prompt_length: int


class EngineTranslator:
    """A translator that converts the messages of one engine between Megatron-Core's and the native protocol.

    Megatron-Core's engines do not confirm signals, send no heartbeats and do not report their state. The translator
    sends these messages to the core for the engine. A signal counts as executed when it has been sent.

    accept:    passes a native message to the core.
    send:      sends all messages to the engine, or none; returns False if its connection does not accept them.
    is_connected: whether the engine has a connection now.
    now:       seconds on a monotonic clock.
    requests:  the open requests of plain clients. These clients get the engine's answers unchanged.
    detokenize: converts answers to plain clients to text if the engine omits the text.
    choose_form: returns how an engine that has not yet sent a message divides messages into frames.
    reconnect: seconds within which the engine must connect again.
    max_requests: maximum number of requests that the engine runs at the same time; 0 means no limit.
    """

    def __init__(
        self,
        name: str,
        *,
        accept: Callable[[NativeMessage], None],
        send: Callable[..., bool],
        is_connected: Callable[[], bool],
        now: Callable[[], float],
        requests: Mapping[bytes, OpenRequest],
        randbits: Callable[[int], int],
        prompts: PromptReader,
        detokenize: Detokenize,
        choose_form: Callable[[], FrameForm],
        reconnect: float,
        max_requests: int,
    ) -> None:
        self.name = name
        self._accept = accept
        self._send = send
        self._is_connected = is_connected
        self._now = now
        self._requests = requests
        self._randbits = randbits
        self._prompts = prompts
        self._detokenize = detokenize
        self._choose_form = choose_form
        self._form: FrameForm | None = None
        """How the engine divides messages into frames. None until it has sent an output or received a request."""
        self._reconnect = reconnect
        self._max_requests = max_requests
        self._running: dict[int, Running] = {}
        self._state = EngineState.RUNNING
        self._epoch = 0
        self._source: str | None = None
        self._incarnation = 0
        self._cut_at: float | None = None
        self._cut_by_peer = False
        self._has_aborts = False
        """Whether the engine supports aborts, which is known when it has sent a partial. Release 0.19.2 supports
        neither, and exits at an unknown message.
        """

    # --- from the engine ----------------------------------------------------------------------------------------

    def receive(self, frames: Frames) -> None:
        """Handle a message of the engine. Raises MalformedMessageError if the message is invalid."""
        header = header_of(frames[0]) if frames[0] else None
        if header == Header.ENGINE_REPLY:
            for output in read_outputs(frames, is_final=True):
                self._final(output)
        elif header == Header.ENGINE_REPLY_PARTIAL:
            self._has_aborts = True
            for output in read_outputs(frames, is_final=False):
                self._partial(output)
        elif not frames[0]:
            self._register()
        elif header == Header.DISCONNECT:
            self._accept(Disconnect())
        else:
            raise MalformedMessageError(f"header {header}: want a message of an engine of Megatron-Core")

    def _register(self) -> None:
        """Register an engine whose process has just started.

        The engine serves immediately, in the state that HELLO_ACK names.
        """
        self._incarnation = self._randbits(64)
        self._state, self._epoch, self._source, self._form = EngineState.RUNNING, 0, None, None
        self._running.clear()
        hello = Hello(
            role=Role.ENGINE,
            name=self.name,
            incarnation=self._incarnation,
            tokenizes=True,
            max_requests=self._max_requests,
        )
        self._accept(hello)
        self._accept(hello.model_copy(update={"serving": True, "state": EngineState.RUNNING}))

    def _final(self, output: EngineOutput) -> None:
        running = self._running.pop(output.number, None)
        if running is None:
            self._accept(Final(output.number, bytes(16), b"", b""))  # the core counts it as stale
            return
        reply: bytes | dict[str, Any]
        output.continue_epochs(running.epochs, prompt_length=running.prompt_length, num_given=len(running.given) // 4)
        if running.uid in self._requests:
            reply = output.plain_reply(given=running.given, detokenize=self._detokenize)
        else:
            reply = output.native_reply(num_given=len(running.given) // 4)
        self._accept(Final(output.number, running.uid, running.given + output.tokens, reply))

    def _partial(self, output: EngineOutput) -> None:
        running = self._running.get(output.number)
        if running is None:
            return
        count, details = len(output.tokens) // 4, output.details()
        entry = PartialEntry(running.uid, output.number, running.held, count)
        running.held += count
        extras = pack({running.uid: details}) if details else b""
        self._accept(Partial(running.route, [entry], output.tokens, extras, [(0, self._epoch)]))

    # --- to the engine ------------------------------------------------------------------------------------------

    def send(self, sent: Outgoing) -> bool:
        """Send a message of the core to the engine. Return False if the connection does not accept it."""
        match message := decode(sent) if isinstance(sent, list) else sent:
            case Dispatch():
                return self._dispatch(message)
            case Heartbeat():
                self._beat()
            case Abort(id=int(number)):
                if self._has_aborts and self._running.pop(number, None) is not None:
                    self._send([pack([int(Header.ABORT_REQUEST), number])])
            case Control():
                return self._control(message)
            case ControlCommit():
                self._enter(message.state, message.epoch)
            case HelloAck():
                self._join(message)
            case Error(code=code, message=text) if code is not ErrorCode.UNKNOWN_PEER:
                logger.warning("a message of engine %s was rejected: %s", self.name, text)
        return True

    def _dispatch(self, dispatch: Dispatch) -> bool:
        number, uid, route, given = dispatch.dispatch_id, dispatch.uid, dispatch.route, dispatch.generated
        form = self._form = self._form or self._choose_form()
        try:
            prompt, prompt_length = self._prompt_of(dispatch)
            frames = submit_frames(form, number, prompt, self._params_of(dispatch))
        except MalformedMessageError as error:
            self._accept(Final(number, uid, given, failed_reply(ErrorCode.INVALID_REQUEST, str(error))))
            return True
        self._running[number] = Running(uid, route, given, len(given) // 4, dispatch.epochs, prompt_length)
        if self._send(frames):
            return True
        del self._running[number]
        if not self._is_connected():
            self._leave()
        return False

    def _prompt_of(self, dispatch: Dispatch) -> tuple[bytes, int]:
        """Return the packed prompt, and Running.prompt_length.

        The prompt of a plain client is passed on unchanged, except that tokens from an earlier dispatch are appended.

        Raises MalformedMessageError if the prompt is malformed.
        """
        meta, prompt, generated = dispatch.meta, dispatch.prompt, dispatch.generated
        if not generated:
            if isinstance(prompt, PackedTokens):
                return prompt, 0
            return pack(prompt.decode("utf-8", "replace") if meta.text else token_list_from_bytes(prompt)), 0
        try:
            tokens = self._prompts.tokens_of(meta, prompt)
            return pack(token_list_from_bytes(tokens + generated)), len(tokens) // 4
        except MalformedMessageError as error:
            message = f"engine {self.name} cannot tokenize the prompt, and {error}"
            raise MalformedMessageError(message) from error

    def _params_of(self, dispatch: Dispatch) -> bytes:
        """Return the packed sampling parameters that the engine gets for `dispatch`.

        Tokens that earlier dispatches generated are subtracted from the maximum number of tokens. Without such tokens,
        the parameters of a plain client are unchanged.
        """
        request = self._requests.get(dispatch.uid)
        if request is not None and not dispatch.generated:
            return request.params.packed
        try:
            params: Any = unpack(dispatch.params, PARAMETERS)
        except MalformedMessageError as error:
            raise MalformedMessageError(f"sampling parameters: {error}") from error
        params = params if isinstance(params, dict) else {}
        params.pop("return_record", None)
        budget = params.get("num_tokens_to_generate")
        if isinstance(budget, int):
            params["num_tokens_to_generate"] = max(1, budget - len(dispatch.generated) // 4)
        return pack(params)

    def _control(self, control: Control) -> bool:
        error = None
        if control.kind is Header.UPDATE_WEIGHTS:
            error = "a plain engine cannot update its weights"
        elif not self._signal(control.kind, control.epoch):
            return False
        ack = ControlAck(
            operation_id=control.operation_id or "", ok=error is None, state=self._state, error=error, ranks=1
        )
        self._accept(ack)
        return True

    def _signal(self, kind: Header, epoch: int | None) -> bool:
        items = [int(kind), epoch] if kind is Header.SET_GENERATION_EPOCH and epoch is not None else [int(kind)]
        return self._send([pack(items)])

    def _enter(self, state: EngineState | None, epoch: int | None) -> None:
        self._state = self._state if state is None else state
        self._epoch = self._epoch if epoch is None else epoch

    def _join(self, ack: HelloAck) -> None:
        """Set the engine to the state and epoch of the other engines."""
        self._source = ack.source
        for signal in signals_to_join(self._state, ack.state):
            self._signal(signal, None)
            self._state = TRANSITIONS[signal].lands_in
        if ack.epoch != self._epoch:
            self._signal(Header.SET_GENERATION_EPOCH, ack.epoch)
            self._epoch = ack.epoch

    # --- the connection -----------------------------------------------------------------------------------------

    def cut(self, *, by_peer: bool) -> None:
        """Handle the end of the connection.

        The engine can reconnect without registering again, so it is lost only if it stays disconnected for `reconnect`
        seconds.
        """
        self._cut_at, self._cut_by_peer = self._now(), by_peer

    def _beat(self) -> None:
        if self._is_connected():
            self._cut_at = None
        elif self._cut_at is not None and self._now() - self._cut_at > self._reconnect:
            self._leave()
            return
        self._accept(
            Heartbeat(
                incarnation=self._incarnation,
                state=self._state,
                epoch=self._epoch,
                source=self._source,
                running=len(self._running),
            )
        )

    def _leave(self) -> None:
        self._accept(Disconnect(reason=ENGINE_FAILED if self._cut_by_peer else "its connection is gone"))
