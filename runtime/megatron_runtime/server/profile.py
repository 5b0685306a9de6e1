"""POST /start_profile and /stop_profile: the range that CUDA profilers around the engines record."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from megatron_runtime.protocol.headers import ErrorCode
from megatron_runtime.protocol.messages import ControlAck
from megatron_runtime.server.errors import ApiError
from megatron_runtime.server.service import Service
from megatron_runtime.transport.control_link import ControlRefusedError
from megatron_runtime.transport.peer_link import CoordinatorUnreachableError


async def start_profile(service: Service, request: Request) -> Response:
    """Answer when every rank of every engine has begun its range. Raises ApiError."""
    ack = await _confirmed(service.backend.start_cuda_profiler())
    return JSONResponse({"profiling": True, "ranks": ack.ranks})


async def stop_profile(service: Service, request: Request) -> Response:
    """Answer when every rank of every engine has ended its range. Raises ApiError."""
    ack = await _confirmed(service.backend.stop_cuda_profiler())
    return JSONResponse({"profiling": False, "ranks": ack.ranks})


async def _confirmed(answer: asyncio.Future[ControlAck]) -> ControlAck:
    try:
        return await answer
    except ControlRefusedError as error:
        if error.code == ErrorCode.WRONG_ROLE:
            message = "This server may not profile the engines: its coordinator takes that on its admin port only."
            raise ApiError(403, message, code="not_an_administrator") from error
        raise ApiError(error.code if error.code >= 400 else 500, error.message, code="profiler_failed") from error
    except CoordinatorUnreachableError as error:
        raise ApiError(503, f"{error}.", code="coordinator_unreachable", retry_after_seconds=5) from error
