"""Images, audio and video of requests: shared, bounded, kept for a replay, and part of the prefix."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from echo_executor import echo_answer

from megatron_runtime.client.rejection import InvalidRequestError, RequestRejectedError
from megatron_runtime.coordinator.core.settings import RoutingPolicy
from megatron_runtime.protocol.headers import ErrorCode, Role
from megatron_runtime.protocol.limits import MAX_MEDIA_BYTES
from megatron_runtime.protocol.media import MEDIA_NEED, Media, MediaItem, media_digest
from megatron_runtime.protocol.messages import Disconnect, Error, Hello, RequestMeta, Submit, tokens_to_bytes
from megatron_runtime.requests.capabilities import KNOWN_PARAMETERS

from .test_core import CLIENT, FIRST, PARAMS, SECOND, Scene

OTHER = (int(Role.CLIENT), b"other")
TAKES = {"parameters": (*KNOWN_PARAMETERS, MEDIA_NEED)}
PROMPT = list(range(1, 17))


def media_of(*files: bytes) -> Media:
    """Return media of which each has two tokens of PROMPT."""
    items = [MediaItem("image", media_digest("image", file), 2 * at, 2, file) for at, file in enumerate(files)]
    return Media(tokens_to_bytes([1, 2]), tuple(items))


class MediaScene(Scene):
    """A scene whose engine takes media."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.engine(FIRST, **TAKES)
        self.take()

    @property
    def bytes(self) -> int:
        return self.core.dispatcher.journal.bytes

    def show(self, number: int, media: Media, *, peer: Any = CLIENT) -> list[Any]:
        """Submit a request, and return what was sent for it."""
        meta = RequestMeta(True, 1, needs=MEDIA_NEED)
        self.say(peer, Submit(bytes([number]) * 16, meta, tokens_to_bytes(PROMPT), b"", PARAMS, media))
        return [message for _, message in self.take()]


def test_open_requests_of_a_client_share_their_files() -> None:
    scene, media = MediaScene(), media_of(bytes(10_000), b"b")
    [first] = scene.show(1, media)
    used = scene.bytes
    [second] = scene.show(2, media.without(item.digest for item in media.items))
    assert (first.media, second.media) == (media, media)
    assert scene.bytes - used < 5_000
    scene.final(FIRST, first, 5)
    scene.take()
    [third] = scene.show(3, media.without([media.items[0].digest]))
    for dispatch in (second, third):
        scene.final(FIRST, dispatch, 5)
    scene.take()
    assert scene.bytes == 0
    [missing] = scene.show(4, media.without([media.items[0].digest]))
    assert (missing.code, missing.uid) == (ErrorCode.MEDIA_MISSING, b"\4" * 16)
    assert scene.show(4, media)[0].media == media


def test_a_client_names_no_files_of_another() -> None:
    scene, media = MediaScene(), media_of(b"a")
    scene.say(OTHER, Hello(role=Role.CLIENT, name="other", incarnation=1))
    scene.take()
    scene.show(1, media)
    digests = [item.digest for item in media.items]
    assert [message.code for message in scene.show(2, media.without(digests), peer=OTHER)] == [ErrorCode.MEDIA_MISSING]
    forged = media._replace(items=(media.items[0]._replace(data=b"forged"),))
    scene.show(3, forged, peer=OTHER)
    assert scene.show(4, media.without(digests))[0].media == media


def test_a_replay_has_the_files() -> None:
    scene, media = MediaScene(), media_of(b"a", b"b")
    [dispatch] = scene.show(1, media)
    scene.partial(FIRST, dispatch, 5, 6)
    scene.say(FIRST, Disconnect(reason="engine failed"))
    scene.engine(SECOND, **TAKES)
    [again] = scene.dispatched()[SECOND]
    assert (again.media, again.generated) == (media, tokens_to_bytes([5, 6]))


def test_files_are_bounded() -> None:
    scene = MediaScene(journal_bytes=100_000)
    assert [message.code for message in scene.show(1, media_of(bytes(100_000)))] == [ErrorCode.QUEUE_FULL]
    half = bytes(60_000)
    assert not isinstance(scene.show(2, media_of(half))[0], Error)
    assert not isinstance(scene.show(3, media_of(half))[0], Error)
    assert [message.code for message in scene.show(4, media_of(half, half[:-1]))] == [ErrorCode.QUEUE_FULL]
    scene = MediaScene()
    assert [message.code for message in scene.show(1, media_of(bytes(MAX_MEDIA_BYTES + 1)))] == [ErrorCode.TOO_LARGE]
    assert scene.bytes == 0


def test_only_engines_that_take_media_get_them() -> None:
    scene = Scene()
    scene.engine(FIRST)
    scene.take()
    meta = RequestMeta(True, 1, needs=MEDIA_NEED)
    scene.say(CLIENT, Submit(b"\1" * 16, meta, tokens_to_bytes(PROMPT), b"", PARAMS, media_of(b"a")))
    [(_, error)] = scene.take()
    assert (error.code, error.field) == (ErrorCode.INVALID_REQUEST, None)
    assert "no engine that may answer takes" in error.message
    scene.engine(SECOND, **TAKES)
    scene.take()
    scene.say(CLIENT, Submit(b"\2" * 16, meta, tokens_to_bytes(PROMPT), b"", PARAMS, media_of(b"a")))
    assert list(scene.dispatched()) == [SECOND]


async def test_a_client_sends_the_files_of_several_choices_once(stage: Any, params: Any) -> None:
    stage.coordinator()
    engine = await stage.engine(**TAKES)
    client, media = await stage.client(), media_of(bytes(1 << 20))
    submitted: list[Submit] = []
    send = client.native._link.send
    client.native._link.send = lambda frames: (submitted.append(frames), send(frames))
    answers = await asyncio.gather(*(client.add_request(PROMPT, params(3), media=media) for _ in range(4)))
    assert [answer["generated_tokens"] for answer in answers] == [echo_answer(PROMPT, 3)] * 4
    assert [len(frames[0]) > 1 << 20 for frames in submitted[:4]] == [True, False, False, False]
    assert [dispatch.media for dispatch in engine.dispatches] == [media] * 4
    # The coordinator has forgotten the files of a request whose answer is on its way.
    client.native._sent_media[media.items[0].digest] = 1
    answer = await client.add_request(PROMPT, params(3), media=media)
    assert answer["generated_tokens"] == echo_answer(PROMPT, 3)
    assert engine.dispatches[-1].media == media


async def test_requests_are_rejected_where_no_engine_takes_media_or_they_are_too_large(stage: Any, params: Any) -> None:
    _, _, client = await stage.all()
    with pytest.raises(InvalidRequestError, match="no engine that may answer takes"):
        await client.add_request(PROMPT, params(1), media=media_of(b"a"))
    with pytest.raises(RequestRejectedError, match="at most 8388608"):
        await client.add_request(PROMPT, params(1), media=media_of(bytes(8 << 20)))


async def test_requests_with_other_files_share_no_prefix(stage: Any, params: Any) -> None:
    coordinator = stage.coordinator(routing_policy=RoutingPolicy.LONGEST_PREFIX)
    await stage.engine("engine-0", block_size_tokens=4, **TAKES)
    await stage.engine("engine-1", block_size_tokens=4, **TAKES)
    client, router = await stage.client(), coordinator.core.router
    known: list[int] = []
    for media in (None, media_of(b"cat"), media_of(b"dog"), media_of(b"cat")):
        await client.add_request(PROMPT, params(1), **({} if media is None else {"media": media}))
        known.append(len(set().union(*router.blocks._held.values())))
    assert known == [4, 8, 12, 12]
