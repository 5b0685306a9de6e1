"""Sends requests to the API server through `kubectl proxy`, so that kubectl reads the kubeconfig and logs in.

The proxy listens on a Unix socket in a directory that only this user can read. The proxy exits when this process exits,
even if this process is killed. The module uses only the standard library, which keeps the plugin small.
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

# The shell waits for the end of its standard input, which this process holds open. Then it terminates kubectl, and
# removes the directory of the socket.
_GUARD = 'folder=$1; shift; "$@" & exec >&- 2>&-; read -r _; kill $!; rm -rf "$folder"'

_LOG_LINE = re.compile(r"[IWEF]\d{4} ")
"""Matches lines of kubectl's own log, for example about cancelled requests."""


class ClusterError(Exception):
    """The API server is unreachable or has rejected a request. The message names the object and the cause.

    code: HTTP status of the rejection; 0 if the API server is unreachable.
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
    """A query for the name and namespace of a kubeconfig context.

    The constructor starts kubectl in a child process, so that the caller can continue until it calls result().
    """

    def __init__(self, context: str | None) -> None:
        command = [*_kubectl(context), "config", "view", "--minify", "-o", "json"]
        self._context = context
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def result(self) -> tuple[str, str]:
        """Return the name and the namespace of the context.

        Raises:
            ClusterError: the context or the kubeconfig does not exist.
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
    """A running `kubectl proxy`. Thread-safe.

    Messages of kubectl's login plugins, such as the address of a dialog, are forwarded to the standard error of this
    process.

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
            start_new_session=True,  # Ctrl-C must not end kubectl before this process has ended its requests
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
        """Return the last lines that kubectl wrote to standard error.

        Call this method only after kubectl has exited.
        """
        self._reading.join(timeout=1)  # not forever, because a running login plugin keeps standard error open
        return " ".join(self._last_errors).strip().removeprefix("error: ") or "it wrote no error"

    @property
    def output(self) -> IO[bytes]:
        """The standard output of kubectl. It becomes readable when kubectl exits."""
        assert self._process.stdout is not None
        return self._process.stdout

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the proxy."""
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
        """Send one request, and return the object in the answer.

        about: name of the object for error messages; if it is empty, messages name the path.

        Raises:
            ClusterError: the API server is unreachable or has rejected the request.
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
        """Send one request, and yield the response as soon as its headers have arrived, whatever its status is.

        seconds: maximum time without a received byte; None means no limit.

        Raises:
            ClusterError: the API server does not answer, or the answer is incomplete.
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
    """Return the error for a response with an error status.

    The error's text comes from the API server's Status object, or from the proxy if the API server did not answer.

    about: name of the object for the message.
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
