"""A stand-in for kubectl, so that tests of the plugin need no Go: `config view` and `proxy`, without login.

`install(folder)` creates the program.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from pathlib import Path
from urllib.parse import urlsplit

import yaml


def install(folder: Path) -> str:
    """Write an executable file `kubectl` that runs this module. Return a PATH that begins with its folder."""
    program = folder / "kubectl"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} {__file__} "$@"\n')
    program.chmod(0o755)
    return f"{folder}{os.pathsep}{os.environ['PATH']}"


def _fail(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    raise SystemExit(1)


def _copy(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        pass


def _serve(path: str, server: str) -> None:
    """Forward each connection to the server of the kubeconfig."""
    address = urlsplit(server)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen()
    print(f"Starting to serve on {path}", flush=True)
    while True:
        accepted, _ = listener.accept()
        forward = socket.create_connection((address.hostname, address.port))
        for source, target in ((accepted, forward), (forward, accepted)):
            threading.Thread(target=_copy, args=(source, target), daemon=True).start()


def main(arguments: list[str]) -> None:
    context = None
    if arguments[:1] == ["--context"]:
        context, arguments = arguments[1], arguments[2:]
    try:
        config = yaml.safe_load(Path(os.environ["KUBECONFIG"]).read_text())
    except (KeyError, FileNotFoundError):
        _fail("current-context must exist in order to minify")
    if arguments == ["config", "get-contexts", "-o", "name"]:
        print("\n".join(each["name"] for each in config["contexts"]))
        return
    name = context or config["current-context"]
    found = next((each for each in config["contexts"] if each["name"] == name), None)
    if found is None:
        _fail(f'context "{name}" does not exist')
    if arguments[0] == "proxy":
        _serve(arguments[1].removeprefix("--unix-socket="), config["clusters"][0]["cluster"]["server"])
    else:
        assert arguments == ["config", "view", "--minify", "-o", "json"], arguments
        print(json.dumps({"contexts": [found]}))


if __name__ == "__main__":
    main(sys.argv[1:])
