"""serve(): an HTTP server in the process, on a given socket or its own."""

import asyncio
import json
import logging
import socket
import threading
import time
import urllib.error
import urllib.request

import psutil
import pytest
from eventually import LONG_SECONDS
from own_children import own_children

from megatron_runtime.cli.processes import free_ports
from megatron_runtime.megatron_core.apis import ServeConfig

BODY = {"model": "tiny", "prompt": "The capital of France is", "max_tokens": 4, "temperature": 0}


def ask(url: str, body: dict | None = None) -> dict:
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=LONG_SECONDS) as answer:
        return json.load(answer)


def test_it_answers_as_generate_does_until_shutdown(make, greedy) -> None:
    llm = make(use_coordinator=True)
    assert llm.url is None
    llm.serve(ServeConfig(host="127.0.0.1", port=0, model_name="tiny"), blocking=False)
    expected = llm.generate(BODY["prompt"], greedy(4)).generated_text
    answer = ask(f"{llm.url}/v1/completions", BODY)
    assert answer["choices"][0]["text"] == expected
    [model] = ask(f"{llm.url}/v1/models")["data"]
    assert (model["id"], model["max_model_len"]) == ("tiny", llm.context.max_sequence_length)
    with pytest.raises(RuntimeError, match="served already"):
        llm.serve(ServeConfig(host="127.0.0.1", port=0), blocking=False)
    url = llm.url
    llm.shutdown()
    with pytest.raises(urllib.error.URLError):
        ask(f"{url}/v1/models")


def test_a_given_socket_and_a_blocking_call(make) -> None:
    llm = make(use_coordinator=True)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    thread = threading.Thread(target=llm.serve, args=(ServeConfig(sock=listener, model_name="tiny"),))
    thread.start()
    assert ask(f"{url}/v1/completions", BODY)["choices"][0]["finish_reason"] == "length"
    assert thread.is_alive()
    llm.shutdown()
    thread.join(timeout=LONG_SECONDS)
    assert not thread.is_alive()


async def test_an_address_in_use_is_an_error_and_the_engine_keeps_running(make_async, greedy) -> None:
    async with make_async() as llm:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            with pytest.raises(OSError, match="choose another"):
                await llm.serve(ServeConfig(host="127.0.0.1", port=taken.getsockname()[1]), blocking=False)
        assert (await llm.generate([1, 2], greedy(1))).generated_length == 1
        await llm.serve(ServeConfig(host="127.0.0.1", port=0), blocking=False)
        assert "data" in await asyncio.to_thread(ask, f"{llm.url}/v1/models")


def test_the_front_end_uses_its_settings(make, caplog) -> None:
    llm = make(use_coordinator=True)
    children = own_children()
    (port,) = free_ports(1)
    with pytest.raises(ValueError, match="there is no tool-call parser 'semaphore'") as rejected:
        llm.serve(ServeConfig(host="127.0.0.1", port=port, parsers=["semaphore"]), blocking=False)
    assert rejected.tb is not None  # keeps alive what the call left behind
    caplog.set_level("INFO", logger="uvicorn.access")
    access = logging.getLogger("uvicorn.access")
    llm.serve(ServeConfig(host="127.0.0.1", port=port, verbose=True), blocking=False)
    access.addHandler(caplog.handler)
    try:
        ask(f"{llm.url}/v1/models")
    finally:
        access.removeHandler(caplog.handler)
    assert "GET /v1/models" in caplog.text
    # Only this process has the tokenizer, so there are no replicas: nothing but the process that renders templates.
    added = [psutil.Process(child).cmdline() for child in own_children() - children]
    assert all("megatron_runtime.tokenization.chat_sandbox" in command for command in added), added


def test_a_front_end_that_cannot_connect_closes_its_socket_and_may_be_restarted(make, monkeypatch) -> None:
    llm = make(use_coordinator=True)

    async def reject(client) -> None:
        raise TimeoutError("unreachable")

    with socket.create_server(("127.0.0.1", 0)) as listener, monkeypatch.context() as patched:
        patched.setattr("megatron_runtime.client.coordinator_client.CoordinatorClient.start", reject)
        with pytest.raises(TimeoutError, match="unreachable"):
            llm.serve(ServeConfig(sock=listener), blocking=False)
        assert listener.fileno() == -1
    assert llm.url is None
    llm.serve(ServeConfig(host="127.0.0.1", port=0), blocking=False)
    assert ask(f"{llm.url}/v1/models")["data"]


def test_a_stopped_front_end_disconnects_its_client(make) -> None:
    llm = make(use_coordinator=True)
    llm.serve(ServeConfig(host="127.0.0.1", port=0), blocking=False)
    front_end = llm._front_end
    llm.run_sync(front_end.stop())
    assert not front_end._client.connected
    llm.run_sync(front_end.stop())


def test_replicas_share_the_socket_log_requests_and_end_with_it(make, capfd) -> None:
    """The servers of connections are identified by the processes that hold them."""
    llm = make(use_coordinator=True, tokenizer="builtin:smollm2-135m")
    before = own_children()
    config = ServeConfig(host="127.0.0.1", port=0, model_name="tiny", frontend_replicas=3, verbose=True)
    llm.serve(config, blocking=False)
    replicas = [psutil.Process(pid) for pid in own_children() - before]
    assert len(replicas) == 2
    for replica in replicas:
        deadline = time.monotonic() + LONG_SECONDS
        while not replica.cmdline() and time.monotonic() < deadline:
            time.sleep(0.01)  # forked, and not yet another program
        assert {"--allowed-host=localhost", "--health-port=off"} <= set(replica.cmdline())
    port = int(llm.url.rpartition(":")[2])
    held: list[socket.socket] = []
    try:
        waiting = list(replicas)
        deadline = time.monotonic() + LONG_SECONDS
        while waiting and time.monotonic() < deadline:
            held.append(socket.create_connection(("127.0.0.1", port)))
            assert ask(f"{llm.url}/v1/completions", BODY)["choices"][0]["finish_reason"] == "length"
            waiting = [replica for replica in waiting if not _is_connected(replica, port)]
            time.sleep(0.1)  # it takes a moment to start
        assert not waiting, "a replica took no connection"
        for connection in held:
            connection.sendall(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert b"200 OK" in connection.recv(4096)
        assert "GET /v1/models" in capfd.readouterr().err
    finally:
        for connection in held:
            connection.close()
    llm.shutdown()
    assert not any(replica.is_running() for replica in replicas)


def _is_connected(replica: psutil.Process, port: int) -> bool:
    return any(
        connection.laddr.port == port and connection.status == psutil.CONN_ESTABLISHED
        for connection in replica.net_connections()
    )


def test_the_documented_defaults_and_rejected_values() -> None:
    config = ServeConfig()
    assert (config.host, config.port, config.parsers, config.verbose, config.sock) == ("0.0.0.0", 5000, [], False, None)
    assert config.frontend_replicas == 4
    with pytest.raises(ValueError, match="frontend_replicas=0"):
        ServeConfig(frontend_replicas=0)
    with pytest.raises(ValueError, match="port=70000"):
        ServeConfig(port=70000)
    with pytest.raises(ValueError, match="at most one"):
        ServeConfig(parsers=["a", "b"])
