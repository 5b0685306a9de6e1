"""HTTPS of the server: verified by an ordinary client, renewed without a restart, rejected if unusable."""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import trustme
from eventually import LONG_SECONDS, eventually

from megatron_runtime.cli.processes import free_ports
from megatron_runtime.server.auth import Certificate, CertificateError


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


def issue(authority: trustme.CA, folder: Path) -> tuple[Path, Path]:
    leaf = authority.issue_cert("localhost", "127.0.0.1")
    certificate, key = folder / "tls.crt", folder / "tls.key"
    certificate.write_bytes(b"".join(blob.bytes() for blob in leaf.cert_chain_pems))
    key.write_bytes(leaf.private_key_pem.bytes())
    return certificate, key


def trusting(authority: trustme.CA) -> ssl.SSLContext:
    context = ssl.create_default_context()
    authority.configure_trust(context)
    return context


async def presented(port: int) -> bytes:
    """The certificate that a new connection is shown."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=context)
    shown: bytes = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return shown


@pytest.fixture
async def port(authority: trustme.CA, tmp_path: Path) -> AsyncIterator[int]:
    """`megatron server` with a certificate, and no coordinator to be found."""
    certificate, key = issue(authority, tmp_path)
    (number,) = free_ports(1)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "megatron_runtime.cli", "server", "--coordinator", "127.0.0.1:9"),
        *("--host", "127.0.0.1", "--port", str(number), "--health-port", "off", "--drain-seconds", "0"),
        *("--tls-certificate-file", str(certificate), "--tls-key-file", str(key)),
    )
    yield number
    process.terminate()
    await asyncio.wait_for(process.wait(), LONG_SECONDS)


async def test_an_ordinary_client_verifies_the_server(port: int, authority: trustme.CA) -> None:
    url = f"https://localhost:{port}"
    async with httpx.AsyncClient(verify=trusting(authority), base_url=url, timeout=LONG_SECONDS) as http:

        async def answers() -> bool:
            try:
                return (await http.get("/livez")).status_code == 200
            except httpx.TransportError:
                return False

        await eventually(answers, what="the server answers over TLS")
        assert (await http.get("/v1/models")).json()["data"][0]["id"]
    with pytest.raises(httpx.ConnectError, match="certificate verify failed"):
        async with httpx.AsyncClient(verify=trusting(trustme.CA()), timeout=LONG_SECONDS) as http:
            await http.get(f"https://localhost:{port}/livez")
    with pytest.raises(httpx.TransportError):
        async with httpx.AsyncClient(timeout=LONG_SECONDS) as http:
            await http.get(f"http://localhost:{port}/livez")


async def test_a_renewed_certificate_is_used_for_new_connections(authority: trustme.CA, tmp_path: Path) -> None:
    files = issue(authority, tmp_path)
    certificate = Certificate(*files)
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", 0, ssl=certificate.context)
    async with server:
        number = server.sockets[0].getsockname()[1]
        first = await presented(number)
        assert not certificate.check()
        files[1].write_text("half a key")
        assert not certificate.check()
        assert await presented(number) == first
        issue(authority, tmp_path)
        assert certificate.check()
        assert await presented(number) != first


def test_a_key_of_another_certificate_is_rejected_by_name(authority: trustme.CA, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    certificate, _ = issue(authority, tmp_path)
    _, key = issue(authority, tmp_path / "other")
    with pytest.raises(CertificateError, match=r"tls\.crt with key .*other/tls\.key"):
        Certificate(certificate, key)
