"""The framing rules of RFC 9112 over raw sockets: what is rejected ends the connection, and what is legal works."""

from __future__ import annotations

import asyncio
import json
import logging
from typing import Any

import pytest
from eventually import LONG_SECONDS

GET = b"GET /version HTTP/1.1\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
BODY = json.dumps({"model": "smollm2", "prompt": "x", "temperature": 0, "max_tokens": 1}).encode()
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"
SMUGGLED = b"GET /openapi.json HTTP/1.1\r\nHost: x\r\n\r\n"
"""Follows each malformed request, and must not be answered."""


def chunk(data: bytes, extension: bytes = b"") -> bytes:
    return b"%x%b\r\n%b\r\n" % (len(data), extension, data)


REJECTED: list[tuple[str, str, bytes, int]] = [
    ("2.2", "not HTTP: a TLS handshake", b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", 400),
    ("2.2", "bare CR in a header", GET + b"Host: x\r\nA: b\rContent-Length: 5\r\n\r\n", 400),
    ("2.2", "bare CR as the end of a line", b"GET /version HTTP/1.1\rHost: x\r\r", 400),
    ("2.2", "bare CR in the target", b"GET /ver\rsion HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    ("2.2", "white space before the first header", GET + b" Host: x\r\nHost: x\r\n\r\n", 400),
    ("2.2", "many empty lines before the request", b"\r\n" * 3 + GET + b"Host: x\r\n\r\n", 400),
    ("2.3", "no version", b"GET /version\r\n\r\n", 400),
    ("2.3", "a version that is no number", b"GET /version HTTP/x\r\nHost: x\r\n\r\n", 400),
    ("2.3", "a version in lower case", b"GET /version http/1.1\r\nHost: x\r\n\r\n", 400),
    ("2.3", "a version of three digits", b"GET /version HTTP/1.10\r\nHost: x\r\n\r\n", 400),
    ("2.3", "another major version", b"GET /version HTTP/3.0\r\nHost: x\r\n\r\n", 505),
    ("2.3", "the preface of HTTP/2", b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
    ("2.3", "major version 0", b"GET /version HTTP/0.9\r\nHost: x\r\n\r\n", 505),
    ("3", "two spaces", b"GET  /version HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    ("3", "a tab instead of a space", b"GET\t/version\tHTTP/1.1\r\nHost: x\r\n\r\n", 400),
    ("3", "a space at the end of the line", b"GET /version HTTP/1.1 \r\nHost: x\r\n\r\n", 400),
    ("3.1", "a method that is no token", b"GE(T /version HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    ("3.2", "a space in the target", b"GET /ver sion HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    ("3.2", "a target with bytes beyond ASCII", b"GET /\xc3\xa9 HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    ("3.2", "a fragment", b"GET /version#a HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    ("3.2", "a target that is no path", b"GET version HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    ("3.2", "no Host", GET + b"\r\n", 400),
    ("3.2", "no Host in a later minor version", b"GET /version HTTP/1.2\r\n\r\n", 400),
    ("3.2", "two Host headers", GET + b"Host: x\r\nHost: x\r\n\r\n", 400),
    ("3.2", "two Host headers in HTTP/1.0", b"GET /version HTTP/1.0\r\nHost: x\r\nHost: y\r\n\r\n", 400),
    ("3.2", "Host with a space", GET + b"Host: a b\r\n\r\n", 400),
    ("3.2", "Host with a path", GET + b"Host: x/y\r\n\r\n", 400),
    ("3.2", "Host with a user", GET + b"Host: a@x\r\n\r\n", 400),
    ("3.2", "Host with a port that is no number", GET + b"Host: x:http\r\n\r\n", 400),
    ("3.2", "Host with an open bracket", GET + b"Host: [::1\r\n\r\n", 400),
    ("3.2.2", "an absolute target with a user", b"GET http://a@x/version HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    ("3.2.2", "an absolute target without a host", b"GET http:///version HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    ("3.2.2", "an absolute target of another scheme", b"GET ftp://x/version HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    ("3.2.3", "CONNECT", b"CONNECT x:80 HTTP/1.1\r\nHost: x:80\r\n\r\n", 501),
    ("3.2.4", "an asterisk without OPTIONS", b"GET * HTTP/1.1\r\nHost: x\r\n\r\n", 400),
    ("5", "a line without a colon", GET + b"Host: x\r\nabc\r\n\r\n", 400),
    ("5", "a header name that is no token", GET + b"Host: x\r\nBad Name: y\r\n\r\n", 400),
    ("5", "an empty header name", GET + b"Host: x\r\n: y\r\n\r\n", 400),
    ("5", "NUL in a header", GET + b"Host: x\r\nA: \x00\r\n\r\n", 400),
    ("5", "a long header", GET + b"Host: x\r\nA: " + b"x" * 60_000 + b"\r\n\r\n", 431),
    ("5", "a long target", b"GET /" + b"x" * 60_000, 431),
    ("5", "many headers", GET + b"Host: x\r\n" + b"A: x\r\n" * 200 + b"Connection: close\r\n\r\n", 431),
    ("5.1", "a space before the colon", POST + b"Content-Length : 5\r\n\r\n", 400),
    ("5.1", "a tab before the colon", POST + b"Transfer-Encoding\t: chunked\r\n\r\n", 400),
    ("5.2", "a folded header", GET + b"Host: x\r\nA: b\r\n c\r\n\r\n", 400),
    ("5.2", "a folded header with a tab", GET + b"Host: x\r\nA: b\r\n\tContent-Length: 5\r\n\r\n", 400),
    ("5.2", "a folded coding", POST + b"Transfer-Encoding:\r\n chunked\r\n\r\n", 400),
    ("6.1", "both lengths", POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", 400),
    ("6.1", "both lengths, reversed", POST + b"Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n0\r\n\r\n", 400),
    (
        "6.1",
        "both lengths, without a body",
        GET + b"Host: x\r\nContent-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n",
        400,
    ),
    ("6.1", "a coding that is not implemented", POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n", 501),
    ("6.1", "the same in two headers", POST + b"Transfer-Encoding: gzip\r\nTransfer-Encoding: chunked\r\n\r\n", 501),
    ("6.1", "chunked in HTTP/1.0", CHUNKED.replace(b"1.1", b"1.0", 1) + b"0\r\n\r\n", 400),
    ("6.1", "chunked twice", POST + b"Transfer-Encoding: chunked, chunked\r\n\r\n0\r\n\r\n", 400),
    ("6.1", "chunked in two headers", POST + b"Transfer-Encoding: chunked\r\n" * 2 + b"\r\n0\r\n\r\n", 400),
    ("6.3", "chunked is not the last coding", POST + b"Transfer-Encoding: chunked, gzip\r\n\r\n", 400),
    ("6.3", "no chunked", POST + b"Transfer-Encoding: gzip\r\n\r\n", 400),
    ("6.3", "identity", POST + b"Transfer-Encoding: identity\r\n\r\n", 400),
    ("6.3", "an unknown coding alone", POST + b"Transfer-Encoding: xchunked\r\n\r\n", 400),
    ("6.3", "an empty Transfer-Encoding", POST + b"Transfer-Encoding:\r\n\r\n", 400),
    ("6.3", "a coding after a vertical tab", POST + b"Transfer-Encoding:\x0bchunked\r\n\r\n", 400),
    ("6.3", "different lengths", POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
    ("6.3", "a list of different lengths", POST + b"Content-Length: 1, 2\r\n\r\n", 400),
    *(
        ("6.3", f"length {value!r}", POST + b"Content-Length: %b\r\n\r\n" % value, 400)
        for value in (b"-1", b"+5", b"0x5", b"5 5", b"five", b"", b"5,", b"5.0", b"1" * 21, b"\xd9\xa5")
    ),
    ("7.1", "chunked has a parameter", POST + b"Transfer-Encoding: chunked;a=b\r\n\r\n0\r\n\r\n", 400),
    *(
        ("7.1", f"chunk size {value!r}", CHUNKED + value + b"\r\nabcde\r\n0\r\n\r\n", 400)
        for value in (b"zz", b"-5", b"+5", b"0x5", b" 5", b"5 5", b"", b"5_0", b"5;a\nb", b"0" * 40 + b"5")
    ),
    ("7.1", "data longer than its chunk", CHUNKED + b"3\r\nabcde\r\n0\r\n\r\n", 400),
    ("7.1", "a chunk that LF alone ends", CHUNKED + b"5\r\nabcde\n0\r\n\r\n", 400),
    ("7.1", "a size that LF alone ends", CHUNKED + b"5\nabcde\r\n0\r\n\r\n", 400),
    ("7.1.2", "a trailer with a space before the colon", CHUNKED + chunk(BODY) + b"0\r\nA : b\r\n\r\n", 400),
]


async def exchange(running: Any, sent: bytes) -> bytes:
    """Send everything, and return what comes until the server closes the connection, which it must."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rsplit(":", 1)[1]))
    try:
        writer.write(sent)
        async with asyncio.timeout(LONG_SECONDS):
            return await reader.read()
    finally:
        writer.close()


async def test_what_rfc_9112_rejects_ends_the_connection(
    running: Any, subtests: pytest.Subtests, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        for section, what, sent, status in REJECTED:
            with subtests.test(section=section, what=what):
                answer = await exchange(running, sent + SMUGGLED)
                head, _, body = answer.partition(b"\r\n\r\n")
                assert int(head.split()[1]) == status, answer
                assert b"\r\nconnection: close" in head.lower()
                assert set(json.loads(body)["error"]) == {"message", "type", "param", "code"}, "a second answer"
    assert [record.getMessage() for record in caplog.records if record.name != "httpx"] == []
    assert running.backend.requests == []


CLOSE = b"Connection: close\r\n"
LEGAL: list[tuple[str, bytes, list[int]]] = [
    ("2.2 an empty line before the request", b"\r\n" + GET + CLOSE + b"Host: x\r\n\r\n", [200]),
    ("2.2 LF alone ends the lines", b"GET /version HTTP/1.1\nHost: x\nConnection: close\n\n", [200]),
    (
        "2.2 an empty line after a body",
        POST + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY + b"\r\n" + GET + CLOSE + b"Host: x\r\n\r\n",
        [200, 200],
    ),
    ("2.3 HTTP/1.0", b"GET /version HTTP/1.0\r\n\r\n", [200]),
    ("2.3 a later minor version", b"GET /version HTTP/1.9\r\nHost: x\r\n" + CLOSE + b"\r\n", [200]),
    ("3.2 an empty Host", GET + CLOSE + b"Host:\r\n\r\n", [200]),
    ("3.2 Host with a port", GET + CLOSE + b"Host: [::1]:8000\r\n\r\n", [200]),
    ("3.2 a query", b"GET /version?a=%20[b]|{c} HTTP/1.1\r\nHost: x\r\n" + CLOSE + b"\r\n", [200]),
    ("3.2.2 an absolute target", b"GET http://x:80/version HTTP/1.1\r\nHost: y\r\n" + CLOSE + b"\r\n", [200]),
    ("3.2.4 OPTIONS *", b"OPTIONS * HTTP/1.1\r\nHost: x\r\n" + CLOSE + b"\r\n", [404]),
    ("5 white space around a value", GET + CLOSE + b"Host:\t x \t\r\nA: b\tc\r\n\r\n", [200]),
    ("6.3 a length twice", POST + CLOSE + b"Content-Length: %d\r\n" % len(BODY) * 2 + b"\r\n" + BODY, [200]),
    (
        "6.3 a list of one length",
        POST + CLOSE + b"Content-Length: %d, %d\r\n\r\n" % (len(BODY), len(BODY)) + BODY,
        [200],
    ),
    ("6.3 no body", POST + CLOSE + b"\r\n", [400]),
    (
        "7.1 chunks",
        POST + CLOSE + b"Transfer-Encoding: Chunked\r\n\r\n" + chunk(BODY[:9]) + chunk(BODY[9:]) + b"0\r\n\r\n",
        [200],
    ),
    (
        "7.1.1 chunk extensions",
        CHUNKED + chunk(BODY, b';a;b="c d"') + b"0;e\r\n\r\n" + GET + CLOSE + b"Host: x\r\n\r\n",
        [200, 200],
    ),
    ("7.1.2 trailers", CHUNKED + chunk(BODY) + b"0\r\nA: b\r\n\r\n" + GET + CLOSE + b"Host: x\r\n\r\n", [200, 200]),
    ("9.3.2 pipelining", (GET + b"Host: x\r\n\r\n") * 3 + GET + CLOSE + b"Host: x\r\n\r\n", [200] * 4),
    ("9.6 bytes after Connection: close", GET + CLOSE + b"Host: x\r\n\r\n" + SMUGGLED, [200]),
    (
        "9110 7.8 Upgrade is ignored",
        GET + b"Host: x\r\nConnection: Upgrade, close\r\nUpgrade: websocket\r\n\r\n",
        [200],
    ),
    (
        "9110 7.8 Upgrade to HTTP/2",
        GET
        + b"Host: x\r\nConnection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n\r\n"
        + GET
        + CLOSE
        + b"Host: x\r\n\r\n",
        [200, 200],
    ),
    (
        "9110 10.1.1 Expect",
        POST + CLOSE + b"Expect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(BODY) + BODY,
        [100, 200],
    ),
]


def statuses(answers: bytes) -> list[int]:
    return [int(part.split(b" ", 1)[0]) for part in answers.split(b"HTTP/1.1 ")[1:]]


async def test_what_is_legal_is_answered_without_a_warning(
    running: Any, subtests: pytest.Subtests, caplog: pytest.LogCaptureFixture
) -> None:
    for what, sent, expected in LEGAL:
        with subtests.test(what=what):
            found = statuses(await exchange(running, sent))
            assert [status for status in found if status != 100 or 100 in expected] == expected
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == []


async def test_an_absolute_target_replaces_the_host_that_is_checked(start: Any) -> None:
    running = await start(allowed_hosts=("localhost",))
    for target, host, status in [
        (b"/version", b"localhost", 200),
        (b"http://evil.example/version", b"localhost", 403),
        (b"http://localhost/version", b"evil.example", 200),
    ]:
        sent = b"GET %b HTTP/1.1\r\nHost: %b\r\n%b\r\n" % (target, host, CLOSE)
        assert statuses(await exchange(running, sent)) == [status], target


async def test_bytes_after_connection_close_do_not_end_the_answer(running: Any) -> None:
    running.backend.gate.clear()
    reader, writer = await asyncio.open_connection("127.0.0.1", int(running.url.rsplit(":", 1)[1]))
    writer.write(POST + CLOSE + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
    await running.backend.until(open_requests=1)
    writer.write(SMUGGLED)
    await writer.drain()
    assert (await running.http.get("/version")).status_code == 200, "the server has read the bytes by now"
    running.backend.gate.set()
    async with asyncio.timeout(LONG_SECONDS):
        assert statuses(await reader.read()) == [200]
    writer.close()
