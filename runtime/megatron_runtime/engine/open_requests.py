"""The open requests of one engine. Passes dispatches, split requests and aborts from the coordinator to the backend.

Each dispatch is checked, and is then submitted to the backend or rejected. A submitted dispatch counts as running until
the backend has released it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from megatron_runtime.engine.adapters import AdapterSet
from megatron_runtime.engine.backend import Capability, EngineBackend, UnsupportedVerbError
from megatron_runtime.engine.engine_request import EngineRequest, RequestOutput
from megatron_runtime.engine.kv_exchange import KVExchange, params_of_prompt
from megatron_runtime.engine.output_stage import OutputStage
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.process.logs import of_request
from megatron_runtime.process.tracing import Tracer
from megatron_runtime.protocol.adapters import Adapter
from megatron_runtime.protocol.codec import Frames
from megatron_runtime.protocol.headers import ErrorCode
from megatron_runtime.protocol.media import MEDIA_NEED
from megatron_runtime.protocol.messages import (
    PARAMETERS,
    Abort,
    Dispatch,
    Prefill,
    ReleaseBlocks,
    Transfer,
    tokens_to_bytes,
    unpack,
)
from megatron_runtime.requests.sampling_params import InvalidSamplingParamsError, SamplingParams

logger = logging.getLogger(__name__)


class _AdapterMissingError(Exception):
    """The engine's list of adapters lacks the adapter of a request, or the engine could not load it."""


class OpenRequests:
    """The open requests of one engine. The object submits requests to the backend, sends their answers, and ends them.

    adapters: the adapters that requests may name.
    send:     sends a message to the coordinator.
    on_idle:  called when the last request has been released after an abort.
    tracer:   records spans of requests; None if requests are not traced.
    exchange: runs prefills, exports and imports of KV blocks; None if the engine is not a prefill or decode engine.
    """

    def __init__(
        self,
        settings: EngineSettings,
        backend: EngineBackend,
        *,
        adapters: AdapterSet,
        send: Callable[[Frames], bool | None],
        on_idle: Callable[[], object],
        tracer: Tracer | None,
    ) -> None:
        self._settings = settings
        self._backend = backend
        self._adapters = adapters
        self._on_idle = on_idle
        self._aborts_in_progress = 0
        self._adapters_in_use: dict[int, Adapter] = {}
        """Adapters in use, by dispatch id."""
        self._outputs = OutputStage(
            send=send,
            finish_early=backend.abort,
            tokenizer=backend.tokenizer,
            on_forget=self._release_adapter,
            tracer=tracer,
        )
        self.exchange: KVExchange | None = None
        if settings.role is not None:
            backend.info.require(f"--role {settings.role}", Capability.KV_TRANSFER)
            self.exchange = KVExchange(
                backend,
                keys_dir=settings.keys_dir,
                send=send,
                release=self._abort_in_backend,
                on_prefilled=self._release_adapter,
            )

    @property
    def num_running(self) -> int:
        """Number of requests that the backend has.

        The number includes prefills, imports, and aborted requests that the backend has not released.
        """
        split = self.exchange.num_running if self.exchange is not None else 0
        return len(self._outputs.open) + self._aborts_in_progress + split

    async def wait_idle(self) -> None:
        """Wait until every request has been answered."""
        await self._outputs.idle.wait()

    def close(self) -> None:
        """Stop all transfers of blocks. Requests are not changed."""
        if self.exchange is not None:
            self.exchange.close()

    def receive(self, message: Dispatch | Abort | ReleaseBlocks | Prefill | Transfer) -> None:
        """Execute a message about one request.

        An invalid request is answered with an error and never raises an exception.
        """
        match message:
            case Dispatch():
                self._dispatch(message)
            case Abort(id=int() as dispatch_id) | ReleaseBlocks(dispatch_id=dispatch_id):
                self.abort(dispatch_id)
            case Prefill() if self.exchange is not None:
                self._prefill(message.dispatch, self.exchange)
            case Transfer() if self.exchange is not None:
                self.exchange.transfer(message)
            case _:
                logger.warning("ignored an unexpected message: %.120r", message)

    def take(self, outputs: Iterable[RequestOutput]) -> None:
        """Send the outputs of one step."""
        self._outputs.step(outputs if self.exchange is None else self.exchange.take(outputs))

    # --- dispatches -----------------------------------------------------------------------------------------------

    def _dispatch(self, dispatch: Dispatch) -> None:
        try:
            request = self._accept(dispatch, self._begin_adapter(dispatch))
        except _AdapterMissingError as error:
            self._outputs.reject(dispatch, ErrorCode.ADAPTER_NOT_FOUND, str(error))
            return
        except Exception as error:  # a request must not crash the engine, whatever it contains
            is_invalid = isinstance(error, ValueError | TypeError | AttributeError | UnsupportedVerbError)
            code = ErrorCode.INVALID_REQUEST if is_invalid else ErrorCode.ENGINE_FAILED
            self._outputs.reject(dispatch, code, error)
            return
        if logger.isEnabledFor(logging.DEBUG):
            extra = of_request(dispatch.meta.request_id)
            logger.debug("request %s received", dispatch.uid.hex(), extra=extra)
        if dispatch.dispatch_id in self._outputs.open:  # the request was not rejected
            self._backend.submit(request)

    def _begin_adapter(self, dispatch: Dispatch) -> Adapter | None:
        """Return the adapter that a message names, and keep it loaded for this dispatch id. None if it names none.

        Raises _AdapterMissingError if the engine does not have the adapter, and UnsupportedVerbError if the backend
        supports no adapters.
        """
        name = dispatch.meta.adapter
        if not name:
            return None
        adapter = self._adapters.begin(name)
        if adapter is None:
            raise _AdapterMissingError(f"engine {self._settings.name} has no adapter {name!r}")
        self._adapters_in_use[dispatch.dispatch_id] = adapter
        return adapter

    def _accept(self, dispatch: Dispatch, adapter: Adapter | None) -> EngineRequest:
        """Check a dispatch, tokenize its prompt, and add it to the output stage. Return the request for the backend.

        Raises an error for an invalid request.
        """
        params = SamplingParams.deserialize(unpack(dispatch.params, PARAMETERS))
        self._backend.info.check_request(params)
        self._check_media(dispatch)
        self._check_handoff(params)
        text = None
        if dispatch.meta.text and params.pooling is not None:
            text = dispatch.prompt.decode("utf-8", "replace")
            dispatch = dispatch._replace(meta=dispatch.meta._replace(text=False), prompt=b"")
        elif dispatch.meta.text:
            tokens = self._backend.tokenize(dispatch.prompt.decode("utf-8", "replace"), add_bos=params.add_BOS)
            dispatch = dispatch._replace(meta=dispatch.meta._replace(text=False), prompt=tokens_to_bytes(tokens))
        bad_words = self._backend.bad_words(params.bad_words) if params.bad_words else None
        request = EngineRequest.of_dispatch(dispatch, params, bad_words=bad_words, adapter=adapter, text=text)
        request = replace(request, keeps_blocks=params.do_kv_handoff)
        self._outputs.add(dispatch, params, request.generated_tokens.tolist())
        return request

    def _prefill(self, dispatch: Dispatch, exchange: KVExchange) -> None:
        """Compute the complete blocks of a prompt for another engine.

        If the prefill fails, the other engine computes the blocks.
        """
        exchange.begin(dispatch.dispatch_id)
        try:
            params = params_of_prompt(SamplingParams.deserialize(unpack(dispatch.params, PARAMETERS)))
            request = EngineRequest.of_dispatch(dispatch, params, adapter=self._begin_adapter(dispatch))
            self._backend.submit(replace(request, prefill_only=True))
        except Exception as error:  # a request must not crash the engine, whatever it contains
            exchange.fail(dispatch.dispatch_id, error)

    def _check_handoff(self, params: SamplingParams) -> None:
        if params.do_kv_handoff and self.exchange is None:
            raise InvalidSamplingParamsError("do_kv_handoff", True, "False: only engines with a role keep blocks")

    def _check_media(self, dispatch: Dispatch) -> None:
        """Raise ValueError if the backend does not accept the request's images, audio or video, or if their data is
        missing.
        """
        if dispatch.media is not None and Capability.MEDIA not in self._backend.info.capabilities:
            raise ValueError(
                f"backend {self._backend.info.name!r} of this engine takes no images, audio or video: leave them out"
            )
        if dispatch.media is None and MEDIA_NEED in dispatch.meta.needs.split():
            raise ValueError(
                "the coordinator is of a release that does not forward images, audio and video: upgrade it"
            )

    # --- aborts ---------------------------------------------------------------------------------------------------

    def drop_all(self) -> None:
        """Drop every request. The coordinator or the client will send the requests again."""
        split = self.exchange.ids if self.exchange is not None else []
        for dispatch_id in [*self._outputs.open, *split]:
            self.abort(dispatch_id)

    def abort(self, dispatch_id: int) -> None:
        """Drop a request, an export or an import.

        A request counts as running, and keeps its adapter loaded, until the backend has released the request.
        """
        if self.exchange is not None:
            self.exchange.forget(dispatch_id)
        self._abort_in_backend(dispatch_id)

    def _abort_in_backend(self, dispatch_id: int) -> None:
        adapter = self._adapters_in_use.pop(dispatch_id, None)
        self._outputs.forget(dispatch_id)
        self._aborts_in_progress += 1
        aborting = self._backend.abort(dispatch_id)
        aborting.add_done_callback(self._aborted)
        if adapter is not None:
            aborting.add_done_callback(lambda _: self._adapters.end(adapter))

    def _release_adapter(self, dispatch_id: int) -> None:
        adapter = self._adapters_in_use.pop(dispatch_id, None)
        if adapter is not None:
            self._adapters.end(adapter)

    def _aborted(self, aborted: asyncio.Future[object]) -> None:
        """Handle the end of an abort. If the engine is now idle, report this immediately.

        The coordinator may wait for this report, so it is not delayed until the next heartbeat. A stopped backend
        counts as idle.
        """
        if not aborted.cancelled():
            aborted.exception()
        self._aborts_in_progress -= 1
        if not self.num_running:
            self._on_idle()
