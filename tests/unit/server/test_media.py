"""Images, audio and video of requests, up to what the coordinator gets. vLLM's renderer is a fake package here."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any, ClassVar

import pytest
from threaded_server import serving

from megatron_runtime.protocol.limits import MAX_MEDIA_BYTES
from megatron_runtime.protocol.media import media_digest
from megatron_runtime.server.formats.vllm_format import chat_format_of
from megatron_runtime.server.openai import media
from megatron_runtime.server.openai.media import MAX_PARTS
from megatron_runtime.tokenization import load_tokenizer

FAKE = Path(__file__).parents[1] / "vllm/fake_formats"
TOKEN = 26
"""Token of media in the prompts of the fake."""

Part = Mapping[str, Any]


def file_of(length: int, content: bytes = b"") -> bytes:
    """Return a file that has this number of tokens."""
    return b"MEDIA" + bytes([length]) + content


def url_of(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{base64.b64encode(data).decode()}"


def image(data: bytes) -> Part:
    return {"type": "image_url", "image_url": {"url": url_of(data), "detail": "low"}}


def of_url(url: str) -> list[Mapping[str, Any]]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


CAT, DOG = file_of(3, b"cat"), file_of(5, b"dog")


@pytest.fixture
async def start_with_media(
    start: Any, tmp_path: Path, tokenizer_files: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Callable[..., Awaitable[Any]]]:
    """Start a server whose model takes some of image, audio and video, and none in the results of some tools."""
    monkeypatch.syspath_prepend(str(FAKE))
    directory = shutil.copytree(tokenizer_files, tmp_path / "model")
    formats = []

    async def start_one(*takes: str, **settings: Any) -> Any:
        (directory / "config.json").write_text(json.dumps({"model_type": "fake", "takes": takes}))
        chat_format = await chat_format_of(
            load_tokenizer(str(directory)),
            backend="vllm",
            model=str(directory),
            tool_call_parser="fake_calls",
            reasoning_parser="fake_thoughts",
        )
        formats.append(chat_format)
        return await start(chat_format=chat_format, **settings)

    yield start_one
    for each in formats:
        each.close()


@pytest.fixture
async def running(start_with_media: Any) -> Any:
    return await start_with_media("image", "audio", "video")


async def ask(running: Any, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Any:
    body = {"model": "smollm2", "temperature": 0, "messages": messages, **fields}
    return await running.post("/v1/chat/completions", body)


def sent(running: Any) -> list[tuple[str, bytes, list[int]]]:
    """Return kind, file and tokens of the media of the last request, which must be consistent."""
    (prompt, _), found = running.backend.requests[-1], running.backend.media[-1]
    template = array("i")
    template.frombytes(found.template)
    expanded: list[int] = []
    items = list(found.items)
    for token in template:
        expanded += [TOKEN] * items.pop(0).length if token == TOKEN else [token]
    assert expanded == prompt
    assert all(item.digest == media_digest(item.kind, item.data) for item in found.items)
    return [(item.kind, item.data, prompt[item.offset : item.offset + item.length]) for item in found.items]


async def test_parts_of_a_message_become_tokens_and_files(running: Any) -> None:
    content = [
        {"type": "text", "text": "a"},
        image(CAT),
        {"type": "video_url", "video_url": {"url": url_of(file_of(2), "video/jpeg")}},
        {"type": "video_url", "video_url": {"url": url_of(file_of(6), "video/mp4")}},
        {"type": "text", "text": "b"},
        {"type": "input_audio", "input_audio": {"data": base64.b64encode(file_of(4)).decode(), "format": "wav"}},
        image(DOG),
    ]
    answer = await ask(running, [{"role": "user", "content": content}])
    assert answer.status_code == 200, answer.text
    assert sent(running) == [
        ("image", CAT, [TOKEN] * 3),
        ("video/jpeg", base64.b64encode(file_of(2)), [TOKEN] * 2),
        ("video", file_of(6), [TOKEN] * 6),
        ("audio", file_of(4), [TOKEN] * 4),
        ("image", DOG, [TOKEN] * 5),
    ]
    assert answer.json()["usage"]["prompt_tokens"] == len(running.backend.requests[-1][0])
    counted = await running.post("/v1/tokenize", {"messages": [{"role": "user", "content": content}]})
    assert counted.json()["tokens"] == running.backend.requests[-1][0]


async def test_an_answer_may_continue_the_last_message(running: Any) -> None:
    last = {"role": "assistant", "content": "It is"}
    answer = await ask(running, [{"role": "user", "content": [image(CAT)]}, last], continue_final_message=True)
    assert answer.status_code == 200, answer.text
    assert bytes(running.backend.requests[-1][0]).endswith(b"assistant: It is")
    assert sent(running) == [("image", CAT, [TOKEN] * 3)]


async def test_the_choices_of_a_request_share_their_files(running: Any) -> None:
    answer = await ask(running, [{"role": "user", "content": [image(CAT)]}], n=5)
    assert answer.status_code == 200, answer.text
    assert len({id(item.data) for found in running.backend.media for item in found.items}) == 1


async def test_images_of_the_other_routes_take_the_same_path(running: Any) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(CAT).decode()}
    shown = {"type": "image", "source": source}
    call = {"type": "tool_use", "id": "t1", "name": "look", "input": {}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "seen"}, shown]}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "What?"}, shown]},
        {"role": "assistant", "content": [call]},
        {"role": "user", "content": [result]},
    ]
    body = {"model": "smollm2", "max_tokens": 9, "temperature": 0, "messages": messages}
    assert (await running.post("/v1/messages", body)).status_code == 200
    assert sent(running) == [("image", CAT, [TOKEN] * 3)] * 2
    items = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "?"}, {"type": "input_image", "image_url": url_of(DOG)}],
        },
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {
            "type": "function_call_output",
            "call_id": "c1",
            "output": [{"type": "input_image", "image_url": url_of(CAT)}],
        },
    ]
    answer = await running.post("/v1/responses", {"model": "smollm2", "input": items, "temperature": 0})
    assert answer.status_code == 200, answer.text
    assert sent(running) == [("image", DOG, [TOKEN] * 5), ("image", CAT, [TOKEN] * 3)]
    rejecting = {**result, "content": [{"type": "text", "text": "NO_IMAGES_IN_RESULTS"}, shown]}
    body["messages"] = [messages[1], {"role": "user", "content": [rejecting]}]
    assert (await running.post("/v1/messages", body)).status_code == 200
    assert running.backend.media[-1] is None
    assert b"NO_IMAGES_IN_RESULTS\n[image]" in bytes(running.backend.requests[-1][0])


async def test_what_the_model_does_not_take_is_rejected_or_a_placeholder(start_with_media: Any) -> None:
    running = await start_with_media("image")
    audio = {"type": "audio_url", "audio_url": {"url": url_of(file_of(2), "audio/wav")}}
    answer = await ask(running, [{"role": "user", "content": "a"}, {"role": "user", "content": [audio]}])
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, "messages[1].content")
    assert "this model reads text, image: " in error["message"]
    text_only = await start_with_media()
    answer = await ask(text_only, [{"role": "user", "content": [image(CAT)]}])
    assert answer.status_code == 400
    assert "this model reads text only" in answer.json()["error"]["message"]
    source = {"type": "base64", "media_type": "image/png", "data": base64.b64encode(CAT).decode()}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [{"type": "image", "source": source}]}
    body = {"model": "smollm2", "max_tokens": 9, "messages": [{"role": "user", "content": [result]}]}
    assert (await text_only.post("/v1/messages", body)).status_code == 200
    assert b"\n[image]\n" in bytes(text_only.backend.requests[-1][0])


NO_MEDIA = (
    "data:",
    "data:image/png;base64,",
    "data:image/png;base64,?",
    "data:image/png;base64,AAA",
    "data:image/png;base64," + "A" * 41,
    "data:image/png,MEDIA",
    "data:" + ";a=b" * 100 + ";base64,AAAA",
    "data:image/png;base64,TUVESUE" + "\n" * 9,
    "file:///etc/passwd",
    "ftp://example.com/a.png",
    "//example.com/a.png",
    "http://user@example.com/a.png",
    "http://[::1/a.png",
    "http://example.com:99999/a.png",
    "x" * 10_000,
    url_of(b"no image"),
)


async def test_urls_that_are_no_media_are_rejected(running: Any, subtests: pytest.Subtests) -> None:
    for url in NO_MEDIA:
        with subtests.test(url=url[:40]):
            answer = await ask(running, of_url(url))
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["code"] == "invalid_value"
            assert not running.backend.requests


async def test_media_that_exhaust_a_renderer_fail_alone(running: Any) -> None:
    bomb, good = await asyncio.gather(
        ask(running, of_url(url_of(file_of(1, b"BOMB")))), ask(running, of_url(url_of(CAT)))
    )
    assert (bomb.status_code, good.status_code) == (400, 200)
    assert "cannot be read" in bomb.json()["error"]["message"]


async def test_number_and_bytes_of_media_are_bounded(start_with_media: Any) -> None:
    running = await start_with_media("image", max_body_bytes=64 << 20)
    many = await ask(running, [{"role": "user", "content": [image(CAT)] * (MAX_PARTS + 1)}])
    large = await ask(running, of_url(url_of(file_of(1, bytes(MAX_MEDIA_BYTES)))))
    half = image(file_of(1, bytes(MAX_MEDIA_BYTES // 2)))
    together = await ask(running, [{"role": "user", "content": [half]}] * 2)
    assert {each.status_code for each in (many, large, together)} == {413}
    assert (await ask(running, [{"role": "user", "content": [half]}])).status_code == 200
    assert running.service.bodies.total == 0


async def test_fields_that_change_the_prompt_are_rejected(running: Any) -> None:
    for field, value in {"add_BOS": True, "prevent_retokenization": True, "truncate_prompt_tokens": 5}.items():
        answer = await ask(running, of_url(url_of(CAT)), **{field: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field)


# --- fetched files ----------------------------------------------------------------------------------------------------


class Files(BaseHTTPRequestHandler):
    """Serves CAT at /cat, redirects from /to?URL, and counts its requests."""

    requests: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        self.requests.append(f"{self.headers['Host']} {self.path}")
        path, _, query = self.path.partition("?")
        body = CAT if path in ("/cat", "/") else bytes(MAX_MEDIA_BYTES + 1) if path == "/large" else b""
        self.send_response(302 if path == "/to" else 200 if body else 404)
        if path == "/to":
            self.send_header("Location", query)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if path == "/slow":
            return
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Write no log."""


@contextmanager
def files() -> Iterator[int]:
    """Serve files on loopback, and return the port."""
    Files.requests = []
    with serving(Files) as server:
        yield server.server_address[1]


async def test_files_come_from_allowed_hosts_only(start_with_media: Any) -> None:
    with files() as port:
        nothing = await start_with_media("image")
        rejected = await ask(nothing, of_url(f"http://127.0.0.1:{port}/cat"))
        assert rejected.status_code == 400
        assert "--allowed-media-host" in rejected.json()["error"]["message"]
        running = await start_with_media("image", allowed_media_hosts=("127.0.0.1", "localhost", "images.example"))
        for host in ("127.1", "2130706433", "0x7f000001", "[::1]", "[::ffff:127.0.0.1]", "127.0.0.1.", "0.0.0.0"):
            assert (await ask(running, of_url(f"http://{host}:{port}/cat"))).status_code == 400
        # A name may not lead to this host, whatever resolves it.
        private = await ask(running, of_url(f"http://localhost:{port}/cat"))
        assert private.status_code == 400
        assert "not public" in private.json()["error"]["message"]
        assert not Files.requests
        answer = await ask(running, of_url(f"http://127.0.0.1:{port}/cat"))
        assert answer.status_code == 200, answer.text
        assert sent(running) == [("image", CAT, [TOKEN] * 3)]
        assert Files.requests == [f"127.0.0.1:{port} /cat"]


async def test_a_name_that_changes_its_address_is_not_resolved_again(
    start_with_media: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    running = await start_with_media("image", allowed_media_hosts=("images.example",))
    resolved: list[str] = []
    loop = asyncio.get_running_loop()

    async def resolve(host: str, port: int, **options: Any) -> list[Any]:
        resolved.append(host)
        address = "192.0.2.7" if len(resolved) > 1 else "127.0.0.1"
        return [(2, 1, 6, "", (address, port))]

    with files() as port:
        monkeypatch.setattr(loop, "getaddrinfo", resolve)
        monkeypatch.setattr(media, "_is_public", lambda address: address == "127.0.0.1")
        answer = await ask(running, of_url(f"http://images.example:{port}/cat?size=1"))
    assert answer.status_code == 200, answer.text
    assert Files.requests == [f"images.example:{port} /cat?size=1"]
    assert resolved == ["images.example"]


async def test_redirects_are_followed_to_allowed_hosts(start_with_media: Any) -> None:
    running = await start_with_media("image", allowed_media_hosts=("127.0.0.1",))
    with files() as port:
        base = f"http://127.0.0.1:{port}"
        followed = await ask(running, of_url(f"{base}/to?/to?{base}/cat"))
        assert followed.status_code == 200, followed.text
        Files.requests.clear()
        for target in (f"http://localhost:{port}/cat", f"//[::1]:{port}/cat", "file:///etc/passwd", "data:,x"):
            assert (await ask(running, of_url(f"{base}/to?{target}"))).status_code == 400
        assert [line.split()[0] for line in Files.requests] == [f"127.0.0.1:{port}"] * 4
        endless = await ask(running, of_url(f"{base}/to?" * 9 + "/cat"))
        assert "redirects" in endless.json()["error"]["message"]


async def test_fetched_files_are_bounded(start_with_media: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    running = await start_with_media("image", allowed_media_hosts=("127.0.0.1",))
    with files() as port:
        base = f"http://127.0.0.1:{port}"
        assert (await ask(running, of_url(f"{base}/large"))).status_code == 413
        assert (await ask(running, of_url(f"{base}/missing"))).status_code == 400
    gone = await ask(running, of_url(f"{base}/cat"))
    assert (gone.status_code, gone.json()["error"]["code"]) == (400, "invalid_value")
    monkeypatch.setattr(media, "FETCH_SECONDS", 0.2)

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_server(accept, "127.0.0.1", 0) as silent:
        port = silent.sockets[0].getsockname()[1]
        late = await ask(running, of_url(f"http://127.0.0.1:{port}/"))
        assert late.status_code == 400, late.text


INNER = """
127.0.0.1 10.1.2.3 192.168.0.1 169.254.169.254 100.64.0.1 0.0.0.0 ::1 fe80::1%eth0 fd00::1 ::ffff:10.0.0.1
2002:0a00:0001:: ff02::1 64:ff9b::a00:1 2001:0:4136:e378:8000:63bf:f5ff:fffe
"""
PUBLIC = "8.8.8.8 2606:4700::1111 ::ffff:8.8.8.8 64:ff9b::808:808"


def test_names_lead_to_public_addresses() -> None:
    assert not [address for address in INNER.split() if media._is_public(address)]
    assert [address for address in PUBLIC.split() if media._is_public(address)] == PUBLIC.split()
