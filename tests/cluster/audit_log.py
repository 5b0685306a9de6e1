"""The audit log of the API server: each request of one account and its response code."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Request:
    """One request of one account."""

    verb: str
    group: str
    version: str
    resource: str
    """With the subresource: `deployments/status`."""
    namespace: str
    name: str
    code: int
    denied: bool
    """Whether RBAC denied it."""

    @property
    def writes(self) -> bool:
        return self.verb not in ("get", "list", "watch")

    @property
    def permission(self) -> tuple[str, str, str]:
        """The API group, resource and verb that a role must grant."""
        return self.group, self.resource, self.verb

    def __str__(self) -> str:
        return f"{self.verb} {self.resource} {self.namespace}/{self.name} -> {self.code}"


class AuditLog:
    """The requests of one account since this object was created."""

    def __init__(self, path: Path, *, user: str) -> None:
        self._path, self._user = path, user
        found = path.stat() if path.exists() else None
        self._from = found.st_size if found else 0
        self._inode = found.st_ino if found else None

    def requests(self) -> list[Request]:
        return list(self._read())

    def writes(self) -> list[Request]:
        return [request for request in self._read() if request.writes]

    def _read(self) -> Iterator[Request]:
        for path, begin in self._files():
            with path.open("rb") as log:
                log.seek(begin)
                for line in log:
                    if line.endswith(b"\n") and (entry := json.loads(line))["user"]["username"] == self._user:
                        yield _request(entry)

    def _files(self) -> list[tuple[Path, int]]:
        """Return each log file with its first offset. The API server rotates a large log: name plus time."""
        aside = sorted(self._path.parent.glob(f"{self._path.stem}-*{self._path.suffix}"))
        files = [*aside, self._path]
        first = next((number for number, path in enumerate(files) if path.stat().st_ino == self._inode), len(aside))
        begin = self._from if files[first].stat().st_ino == self._inode else 0
        return [(path, begin if number == 0 else 0) for number, path in enumerate(files[first:])]


def _request(entry: dict[str, Any]) -> Request:
    asked = entry.get("objectRef") or {}
    parts = [asked.get("resource", entry["requestURI"]), *filter(None, [asked.get("subresource")])]
    return Request(
        verb=entry["verb"],
        group=asked.get("apiGroup", ""),
        version=asked.get("apiVersion", ""),
        resource="/".join(parts),
        namespace=asked.get("namespace", ""),
        name=asked.get("name", ""),
        code=(entry.get("responseStatus") or {}).get("code", 0),
        denied=(entry.get("annotations") or {}).get("authorization.k8s.io/decision") == "forbid",
    )
