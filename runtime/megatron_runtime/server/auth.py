"""The server's API keys, each of which stands for one tenant, and its TLS certificate. Changed files are read again."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import ssl
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel
from starlette.datastructures import Headers

logger = logging.getLogger(__name__)

TENANT_CHARACTERS = 32
"""Number of characters in a tenant id: 32 hexadecimal digits, which are 128 bits."""
MAX_PER_MINUTE = 1_000_000_000
_UNNAMED_CHARACTERS = 8
_CERTIFICATE_CHECK_SECONDS = 10.0
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_CHECK_SECONDS = 1.0
"""Minimum number of seconds between two checks of the key file. A mounted Secret can change while the server runs."""


class ApiKeyFileError(ValueError):
    """The key file cannot be used. The message names the entry, the field and the remedy, and contains no key."""


class NoKeysError(ApiKeyFileError):
    """The key file contains no key. This is an error, because every client could otherwise use the server."""


class _Entry(BaseModel):
    """An entry of a YAML key file."""

    model_config = ConfigDict(extra="forbid", strict=True, alias_generator=to_camel)

    key: Annotated[str, Field(min_length=1, max_length=4096)]
    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
    requests_per_minute: Annotated[int, Field(ge=1, le=MAX_PER_MINUTE)] | None = None
    tokens_per_minute: Annotated[int, Field(ge=1, le=MAX_PER_MINUTE)] | None = None
    models: Annotated[list[Annotated[str, Field(min_length=1, max_length=256)]], Field(min_length=1)] | None = None
    metrics: bool = False


class _KeyFile(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    keys: list[_Entry]


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKey:
    """The tenant of a request, and the permissions of its API key.

    tenant: opaque id of the tenant, from which the key cannot be computed. Empty: the server has no API keys.
    name:   label of the key in metrics and logs. Without a name in the file, the beginning of the tenant id.
    requests_per_minute, tokens_per_minute: limits of the key's usage on all servers of a coordinator together; None: no
                                            limit.
    models: names of the models that the key can use; None: all models.
    metrics: whether the key can read /metrics, which cover the requests of all keys.
    """

    tenant: str = ""
    name: str = ""
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    models: frozenset[str] | None = None
    metrics: bool = False

    @property
    def is_limited(self) -> bool:
        return self.requests_per_minute is not None or self.tokens_per_minute is not None

    def allows(self, model: str) -> bool:
        return self.models is None or model in self.models


OPEN = ApiKey(metrics=True)
"""The key of every request if the server has no API keys."""


def read_keys(path: Path) -> dict[bytes, ApiKey]:
    """Return the API keys in a file, as a map from the SHA-256 digest of each key to its ApiKey.

    The file is YAML with a list `keys`, or has one key per line. Empty lines and lines that begin with # are ignored.
    Raises OSError if the file cannot be read, ApiKeyFileError if an entry is invalid, and NoKeysError if the file
    contains no key. No error message contains a key.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError:
        raise ApiKeyFileError(f"{str(path)!r} is not UTF-8 text: write one key per line") from None
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if lines and re.fullmatch(r"keys:\s*(\[.*)?|---", lines[0]):
        entries = _parse(text, path)
    else:
        entries = [_Entry.model_construct(key=line, name="") for line in lines]  # such a key has no name and no limits
    if not entries:
        raise NoKeysError(f"{str(path)!r} holds no key: write one key per line, or leave the option out")
    keys: dict[bytes, ApiKey] = {}
    names: set[str] = set()
    for place, entry in enumerate(entries):
        if _CONTROL.search(entry.key):
            raise ApiKeyFileError(f"{str(path)!r}, key {place + 1}: it has a control character, such as a line break")
        digest = _digest(entry.key.encode())
        if entry.name and (digest in keys or entry.name in names):
            field = "name" if entry.name in names else "key"
            raise ApiKeyFileError(f"{str(path)!r}, keys[{place}].{field}: an earlier entry has it, too: change one")
        names.add(entry.name)
        tenant = _digest(b"megatron tenant " + digest).hex()[:TENANT_CHARACTERS]
        keys[digest] = ApiKey(
            tenant=tenant,
            name=entry.name or f"key-{tenant[:_UNNAMED_CHARACTERS]}",
            requests_per_minute=entry.requests_per_minute,
            tokens_per_minute=entry.tokens_per_minute,
            models=None if entry.models is None else frozenset(entry.models),
            metrics=entry.metrics,
        )
    return keys


def _parse(text: str, path: Path) -> list[_Entry]:
    try:
        return _KeyFile.model_validate(yaml.safe_load(text)).keys
    except (yaml.YAMLError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)  # the original message can contain a key
        where = "" if mark is None else f" in line {mark.line + 1}"
        message = f"{str(path)!r} is not YAML{where}: write a list 'keys' of entries with name and key"
        raise ApiKeyFileError(message) from None
    except ValidationError as error:
        errors = error.errors(include_input=False, include_url=False)
        first = errors[0]
        # The name of an unknown field can be a key that was written in the wrong place.
        known = first["loc"]
        has_key = not any(each["type"] == "missing" and each["loc"][:-1] == known[:-1] for each in errors)
        if first["type"] == "extra_forbidden" and not (has_key and re.fullmatch("[A-Za-z]{1,24}", str(known[-1]))):
            known = known[:-1]
        place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in known).lstrip(".")
        fields = ", ".join(map(to_camel, _Entry.model_fields))
        message = f"{str(path)!r}, {place or 'the file'}: {first['msg']}; an entry of keys has {fields}"
        raise ApiKeyFileError(message) from None


class ApiKeys:
    """The valid API keys of a server, read from a file. Without a file, requests need no key.

    A changed file is read again. If the changed file cannot be used, the previous keys stay valid. The digest of a key
    is compared with all digests in constant time.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._keys: dict[bytes, ApiKey] = {}
        if file is not None:
            self._version = _version(file)
            self._keys = read_keys(file)
        self._checked = time.monotonic()

    def find(self, headers: Headers) -> ApiKey | None:
        """Return the ApiKey of a request with these headers.

        The key is in the header Authorization, x-api-key (Anthropic's clients) or api-key (Azure's clients). Returns
        None if the headers contain no valid key, and OPEN if the server has no API keys.
        """
        if self._file is None:
            return OPEN
        self._follow(self._file)
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer":
            given = headers.get("x-api-key") or headers.get("api-key", "")
        # ASGI decodes header bytes as Latin-1, but the client has sent the key as UTF-8.
        digest = _digest(given.strip().encode("latin-1", errors="replace"))
        match = None
        for known, key in self._keys.items():
            if hmac.compare_digest(digest, known):
                match = key
        return match

    def _follow(self, file: Path) -> None:
        """Read the file again if it has changed."""
        now = time.monotonic()
        if now - self._checked < _CHECK_SECONDS:
            return
        self._checked = now
        version = _version(file)
        if version == self._version:
            return
        self._version = version
        try:
            self._keys = read_keys(file)
        except (OSError, ValueError) as error:
            logger.error("the previous API keys stay in use: %s", error)
        else:
            logger.info("%d API keys read again", len(self._keys))


def tenant_salt(tenant: str, cache_salt: str | None) -> str | None:
    """Return the prefix cache salt of a request.

    The salt differs from the salts of all other tenants, whatever `cache_salt` their requests have. If `tenant` is
    empty, the result is `cache_salt` itself.
    """
    if not tenant:
        return cache_salt
    return _digest(f"megatron cache salt {tenant} {cache_salt or ''}".encode()).hex()[:TENANT_CHARACTERS]


def tenant_session(tenant: str, session: str) -> str:
    """Return the session name that the server sends to the coordinator; "" if `session` is empty.

    The name is a digest of tenant and session, so sessions of different tenants never have the same name.
    """
    return _digest(f"megatron session {tenant} {session}".encode()).hex()[:TENANT_CHARACTERS] if session else ""


class CertificateError(ValueError):
    """A TLS certificate and its key cannot be used, because a file is unreadable or the two do not belong together.

    The message names the files and the remedy.
    """


class Certificate:
    """A certificate chain and its private key in PEM format, and the TLS context for new connections.

    Changed files are read again, so a renewed certificate needs no restart.
    """

    def __init__(self, certificate_file: Path, key_file: Path) -> None:
        self._files = (certificate_file, key_file)
        self._version = _version(*self._files)
        self.context = self._new_context()

    def check(self) -> bool:
        """Read the files again if they have changed. Return whether a new certificate is now in use.

        If the files cannot be used, the previous certificate stays in use.
        """
        version = _version(*self._files)
        if version == self._version:
            return False
        self._version = version
        try:
            # Load the files into a new context, because a failure after the first file would leave a certificate
            # without its key.
            self._new_context()
            self._load_into(self.context)
        except CertificateError as error:
            logger.warning("the previous certificate stays in use: %s", error)
            return False
        logger.info("new connections use the changed certificate")
        return True

    async def watch(self) -> None:
        """Call check() repeatedly until the task is cancelled."""
        while True:
            await asyncio.sleep(_CERTIFICATE_CHECK_SECONDS)
            self.check()

    def _new_context(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        context.set_alpn_protocols(["http/1.1"])
        self._load_into(context)
        return context

    def _load_into(self, context: ssl.SSLContext) -> None:
        certificate, key = self._files
        try:
            context.load_cert_chain(certificate, key)
        except OSError as error:  # includes ssl.SSLError
            raise CertificateError(
                f"certificate {certificate} with key {key}: {error}; give a PEM chain and the key that belongs to it"
            ) from error


def _digest(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _version(*files: Path) -> list[tuple[int, ...] | None]:
    """Return a value that changes when one of the files is replaced or modified."""
    versions: list[tuple[int, ...] | None] = []
    for file in files:
        try:
            status = file.stat()
            versions.append((status.st_ino, status.st_mtime_ns, status.st_size))
        except OSError:
            versions.append(None)
    return versions
