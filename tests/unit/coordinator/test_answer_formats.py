"""The coordinator reports which formats of answers the OpenAI servers read."""

from __future__ import annotations

from typing import Any

from eventually import LONG_SECONDS

from megatron_runtime.client.coordinator_client import CoordinatorClient
from megatron_runtime.protocol.headers import Role
from megatron_runtime.protocol.messages import AnswerFormats


async def test_the_status_has_the_formats_of_the_server_that_registered_last(stage: Any) -> None:
    stage.coordinator()
    link = await stage.admin()
    await stage.native_client()
    assert (await link.status()).formats is None
    for formats in (AnswerFormats(tool_calls="hermes"), AnswerFormats(tool_calls="mistral", reasoning="think")):
        server = CoordinatorClient(stage.address(Role.CLIENT))
        server.formats = formats
        stage.closers.append(server.stop)
        await server.start(connect_timeout_seconds=LONG_SECONDS)
        assert (await link.status()).formats == formats
    server.stop()
    await stage.until(lambda: all(c.formats != formats for c in stage.coordinators[-1].core.clients))
    assert (await link.status()).formats == AnswerFormats(tool_calls="hermes")
