"""Requests to the API server through `kubectl proxy`, so that kubectl reads the kubeconfig and logs in.

The proxy listens on a Unix socket in a directory that only this user may read. It ends with this process, also if this
process is killed. The modules for it are in the standard library, which keeps the plugin a small file.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import shutil
import socket
import subprocess
import tempfile
import threading
from collections import deque
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self
from urllib.parse import quote, urlencode

from megatron_operator.terminal import say
from megatron_runtime.protocol import strict_json as json

REQUEST_SECONDS = 15.0
MERGE_PATCH = "application/merge-patch+json"

# The shell waits for the end of its standard input, which this process holds open. Then it ends kubectl and removes the
# directory of the socket.
_GUARD = 'folder=$1; shift; "$@" & exec >&- 2>&-; read -r _; kill $!; rm -rf "$folder"'

_LOG_LINE = re.compile(r"[IWEF]\d{4} ")
"""kubectl's own log, such as of requests that were cancelled."""


class ClusterError(Exception):
    """The API server is unreachable or rejected a request. The message has the object and the cause.

    code: HTTP status of a rejection, or 0.
    """

    def __init__(self, message: str, *, code: int = 0) -> None:
        super().__init__(message)
        self.code = code


def _kubectl(context: str | None) -> list[str]:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        raise ClusterError(
            "kubectl, which logs in to the cluster, is not on PATH; install it or add its folder to PATH"
        )
    return [kubectl, *(["--context", context] if context is not None else [])]


class ContextQuery:
    """Reads the current context of the kubeconfig, or another one, while the caller continues."""

    def __init__(self, context: str | None) -> None:
        command = [*_kubectl(context), "config", "view", "--minify", "-o", "json"]
        self._context = context
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def result(self) -> tuple[str, str]:
        """Return name and namespace of the context.

        Raises:
            ClusterError: there is no such context, or no kubeconfig.
        """
        output, errors = self._process.communicate()
        if self._process.returncode:
            cause = errors.strip().removeprefix("error: ")
            if self._context is not None:
                listing = [*_kubectl(None), "config", "get-contexts", "-o", "name"]
                known = subprocess.run(listing, capture_output=True, text=True, check=False).stdout.split()
                names = ", ".join(known) or "none: set KUBECONFIG"
                raise ClusterError(f"--context: the kubeconfig has no context {self._context!r}; use one of {names}")
            raise ClusterError(f"no usable kubeconfig: {cause}; set KUBECONFIG")
        entry = json.loads(output)["contexts"][0]
        return entry["name"], (entry.get("context") or {}).get("namespace") or "default"


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: Path, *, timeout: float | None) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(str(self._path))


class KubectlProxy:
    """A running `kubectl proxy`. Its methods may be called by several threads.

    What a login plugin of kubectl writes to standard error, such as the address of a dialog, appears on this process's.

    Raises:
        ClusterError: kubectl is missing or cannot use the kubeconfig.
    """

    def __init__(self, *, context: str | None = None) -> None:
        command = [*_kubectl(context), "proxy"]
        folder = Path(tempfile.mkdtemp(prefix="kubectl-megatron-"))
        self.socket = folder / "api"
        self._process = subprocess.Popen(
            ["sh", "-c", _GUARD, "sh", str(folder), *command, f"--unix-socket={self.socket}"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C must not end it before the requests of this process
        )
        assert self._process.stdout is not None
        self._serves = False
        self._last_errors: deque[str] = deque(maxlen=20)
        self._reading = threading.Thread(target=self._read_errors, daemon=True)
        self._reading.start()
        self._serves = bool(self._process.stdout.readline())
        if not self._serves:
            self.close()
            raise ClusterError(f"kubectl cannot use the kubeconfig: {self.errors()}; set KUBECONFIG or --context")

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            text = line.decode(errors="replace").rstrip("\n")
            self._last_errors.append(text)
            if self._serves and not _LOG_LINE.match(text):
                say(text, err=True)

    def errors(self) -> str:
        """Return the last lines that kubectl wrote to standard error, after its end."""
        self._reading.join(timeout=1)  # a login plugin that still runs keeps standard error open
        return " ".join(self._last_errors).strip().removeprefix("error: ") or "it wrote no error"

    @property
    def output(self) -> IO[bytes]:
        """Standard output of kubectl, which is silent until kubectl exits."""
        assert self._process.stdout is not None
        return self._process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the proxy."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()

    def request(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: Mapping[str, Any] | None = None,
        content_type: str = "application/json",
        about: str = "",
    ) -> dict[str, Any]:
        """Send one request and return the object of the answer.

        about: the object in the message of an error; the path if empty.

        Raises:
            ClusterError
        """
        data = None if body is None else json.dumps(body).encode()
        with self.open(
            method, path, query=query, body=data, headers={"Content-Type": content_type}, seconds=REQUEST_SECONDS
        ) as answer:
            text = answer.read()
            if not 200 <= answer.status <= 299:
                raise rejection(answer.status, text, about=about or path)
            document: dict[str, Any] = json.loads(text)
            return document

    @contextlib.contextmanager
    def open(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, Any] | None = None,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        seconds: float | None = None,
    ) -> Iterator[http.client.HTTPResponse]:
        """Send one request; yield the answer, of any status, while it arrives.

        seconds: longest time without a byte; None: no limit.

        Raises:
            ClusterError: the API server does not answer, or the answer breaks off.
        """
        connection = _UnixConnection(self.socket, timeout=seconds)
        given = {key: value for key, value in (query or {}).items() if value is not None}
        url = quote(path, safe="/:") + (f"?{urlencode(given)}" if given else "")
        try:
            for tries in (1, 2):
                connection.request(method, url, body=body, headers={"Accept": "application/json", **(headers or {})})
                answer = connection.getresponse()
                if answer.status != 401 or tries == 2:  # after a 401, kubectl gets new credentials
                    break
                connection.close()
            yield answer
        except (OSError, http.client.HTTPException) as error:
            raise ClusterError(f"the API server does not answer: {error or type(error).__name__}") from error
        finally:
            connection.close()


def rejection(code: int, text: bytes, *, about: str) -> ClusterError:
    """Return the error of an answer: the API server's Status, or the error text of the proxy if the API server did not
    answer.
    """
    try:
        status = json.loads(text)
        message = str(status["message"])
        reason = str(status.get("reason") or "Error")
    except (ValueError, KeyError, TypeError):
        shown = text[:500].decode(errors="replace").strip()
        if code >= 500:
            return ClusterError(f"the API server does not answer: {shown}", code=code)
        return ClusterError(f"{about}: {code}: {shown}", code=code)
    return ClusterError(f"{about}: {code} {reason}: {message}", code=code)
