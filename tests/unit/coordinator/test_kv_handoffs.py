"""Blocks that an engine keeps for a later request of a client, until the request, the client, the engine or time ends
them.
"""

from __future__ import annotations

import base64
from typing import Any

import pytest

from megatron_runtime.coordinator.core.handoffs import HANDOFF_SECONDS
from megatron_runtime.coordinator.core.transfers import KEEPS_BLOCKS
from megatron_runtime.protocol.messages import (
    PLAIN,
    Disconnect,
    Dispatch,
    Exported,
    Final,
    ReleaseBlocks,
    RequestMeta,
    Submit,
    Transfer,
    pack,
    tokens_to_bytes,
    unpack,
)

from .test_transfer_model import ANSWER, HEARTBEAT, Engine, World

PROMPT = tokens_to_bytes(list(range(100)))
DIGESTS = bytes(32 * 6)


class Scene(World):
    """The first engine that prefills answers a request, and keeps its blocks."""

    def send(self, number: int, *, needs: str = "", token: bytes = b"") -> bytes:
        uid = number.to_bytes(16, "big")
        self.driver.say(self.client, Submit(uid, RequestMeta(needs=needs), PROMPT, b"", pack({}), handoff=token))
        self.read_all()
        return uid

    def kept(self) -> tuple[Engine, dict[str, Any]]:
        """Return the engine that keeps the blocks, and what the answer says about them."""
        uid = self.send(1, needs=KEEPS_BLOCKS)
        [engine] = [engine for engine in self.engines if engine.decodes]
        assert engine.stage == "prefill"
        [(number, dispatch)] = engine.decodes.items()
        assert isinstance(dispatch, Dispatch)
        self.driver.say(engine.peer, Exported(number, digests=DIGESTS, weights="0 d0"))
        engine.exports.add(number)
        self.answer(engine)
        final = self.ended[uid]
        assert isinstance(final, Final)
        assert final.tokens == ANSWER
        return engine, unpack(final.reply, PLAIN)["disaggregated_params"]

    def imports(self) -> list[Transfer]:
        return [message for _, message in self.sent if isinstance(message, Transfer) and message.address]

    def released(self) -> list[int]:
        return [message.dispatch_id for _, message in self.sent if isinstance(message, ReleaseBlocks)]


@pytest.fixture
def scene() -> Scene:
    scene = Scene()
    scene.beat_all()
    return scene


def token_of(offer: dict[str, Any]) -> bytes:
    return base64.b64decode(offer["kv_meta"]["handoff"])


def test_the_next_request_imports_the_blocks(scene: Scene) -> None:
    engine, offer = scene.kept()
    uid = scene.send(2, token=token_of(offer))
    [transfer] = scene.imports()
    assert (transfer.export_id, transfer.digests) == (offer["request_id"], DIGESTS)
    assert offer["block_ids"] == list(range(6))
    scene.settle()
    assert isinstance(scene.ended[uid], Final)
    assert not engine.exports
    scene.send(3, token=token_of(offer))
    assert len(scene.imports()) == 1, "it is used once"


@pytest.mark.parametrize("end", ["time", "release", "client", "verb"])
def test_blocks_that_no_request_uses_are_released(scene: Scene, end: str) -> None:
    engine, offer = scene.kept()
    match end:
        case "time":
            for _ in range(int(HANDOFF_SECONDS / HEARTBEAT) + 1):
                scene.beat_all()
        case "release":
            scene.driver.say(scene.admin, ReleaseBlocks(offer["request_id"]))
            assert not scene.released(), "another peer's"
            scene.driver.say(scene.client, ReleaseBlocks(offer["request_id"]))
        case "client":
            scene.driver.say(scene.client, Disconnect())
        case "verb":
            scene.verb()
    scene.read_all()
    assert scene.released() == [offer["request_id"]]
    assert not engine.exports
    if end != "client":
        scene.send(2, token=token_of(offer))
        assert not scene.imports()


def test_a_lost_engine_ends_its_handoffs(scene: Scene) -> None:
    engine, offer = scene.kept()
    scene.lose(engine)
    uid = scene.send(2, token=token_of(offer))
    scene.settle()
    assert isinstance(scene.ended[uid], Final)
    assert not scene.imports()


@pytest.mark.parametrize("token", [b"\0", bytes(40), b"\xff" * 64])
def test_a_token_of_another_coordinator_is_ignored(scene: Scene, token: bytes) -> None:
    uid = scene.send(2, token=token)
    scene.settle()
    assert isinstance(scene.ended[uid], Final)
    assert not scene.imports()


def test_blocks_that_no_request_asked_to_keep_are_released(scene: Scene) -> None:
    scene.send(1)
    [engine] = [engine for engine in scene.engines if engine.decodes]
    [number] = engine.decodes
    scene.driver.say(engine.peer, Exported(number, digests=DIGESTS, weights="0 d0"))
    assert scene.released() == [number]
