"""Models in object stores: `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX`, `https://HOST/PATH`.

The library obstore signs and sends the requests. It reads credentials, region and endpoint from the environment
(`AWS_*`, `GOOGLE_*`, `AZURE_*`), or uses the machine's workload identity. This module checks all data from a store
before use: names, because they become paths, and sizes, because they limit the bytes to write. Every read requests the
listed version of an object.
"""

from __future__ import annotations

import builtins
import hashlib
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import obstore
from obstore import exceptions
from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

from megatron_runtime.checkpoints.model_files import ModelFileError, UnsafeNameError, parse_json, require_safe_name
from megatron_runtime.checkpoints.remote import OBJECT_PREFIXES
from megatron_runtime.checkpoints.remote.files import (
    MANIFEST_FILE,
    HubError,
    HubUnavailableError,
    Listing,
    RemoteFile,
    retried,
)
from megatron_runtime.process.secrets import HEADER, SWITCH, URL, SecretError
from megatron_runtime.protocol import strict_json as json
from megatron_runtime.protocol.text import escaped, shown

if TYPE_CHECKING:
    from obstore import GetOptions
    from obstore.store import ClientConfig, ObjectStore

MAX_FILE_BYTES, MAX_FILES, MAX_LISTING_BYTES = 1 << 50, 100_000, 64 << 20
"""Limits of a model: bytes per file, number of files, and bytes of an index or a manifest."""
_URL = re.compile(r"(s3|gs|az|https)://([A-Za-z0-9][A-Za-z0-9._-]*(?::[0-9]{1,5})?)((?:/[^?#%]*)?)")
_WANTED = (
    "s3://BUCKET/PREFIX, gs://BUCKET/PREFIX, az://CONTAINER/PREFIX or https://HOST/PATH, without a query and without "
    "percent-encoded characters"
)
_REQUEST_BYTES = 64 << 20
"""Maximum number of bytes of one request. With the timeout, it limits how long a stalled or slow request can last."""
_REQUEST_SECONDS, _READ_SECONDS, _CONNECT_SECONDS = "600s", "30s", "10s"
_PIECE_BYTES = 1 << 20
_FIRST_BYTES = 1 << 20
_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_HTTP_FILES = (
    *("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"),
    *("added_tokens.json", "tokenizer.model", "chat_template.jinja", "chat_template.json"),
    *("additional_chat_templates/tool_use.jinja", _INDEX),
)
"""Files that are requested from an HTTPS server in addition to the weights, because it does not list its files."""
_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9]{1,64})</Code>")
_CAUSE = re.compile(
    r"dns error[^\"\n]*|tcp connect error[^\"\n]*|connection refused|InvalidCertificate\(\s*\w+|timed ?out|"
    r"connection closed[^\"\n]*|Range request not supported[^\n]*",
    re.IGNORECASE,
)
_CREDENTIALS = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY",
    "gs": "GOOGLE_SERVICE_ACCOUNT_KEY",
    "az": "AZURE_STORAGE_ACCOUNT_NAME with AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_TOKEN",
}
_ENDPOINTS = {
    "s3": ("AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
"""Environment variables with which the user sets another server. Only such a server can be used without TLS."""
_PREFIXES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
_SWITCHES = ("_SKIP_SIGNATURE", "_ALLOW_HTTP", "_VIRTUAL_HOSTED_STYLE_REQUEST", "_UNSIGNED_PAYLOAD", "_EMULATOR")


class ObjectStoreError(HubError):
    """Raised if an object store does not provide what was requested, and a retry does not help.

    The message names the remedy.
    """


class ObjectStoreUnavailableError(HubUnavailableError):
    """Raised if an object store cannot be reached or is overloaded. A retry may help."""


@dataclass(frozen=True, slots=True)
class ObjectReference:
    """A model in an object store.

    scheme: `s3`, `gs`, `az` or `https`.
    bucket: bucket of the objects; for `https` the host and port.
    prefix: common prefix of the objects' keys, without leading and trailing slashes. For a single .gguf file, the key
            of the object.
    """

    scheme: str
    bucket: str
    prefix: str

    @classmethod
    def parse(cls, text: str) -> ObjectReference:
        """Return the reference in the URL of a model. Raises ObjectStoreError."""
        match = _URL.fullmatch(text)
        prefix = match[3].strip("/") if match else ""
        try:
            if match is None:
                raise UnsafeNameError("")
            if prefix:
                require_safe_name(prefix)
        except UnsafeNameError as error:
            reason = f" ({error})" if str(error) else ""
            raise ObjectStoreError(f"{shown(text)} is not the URL of a model{reason}: write {_WANTED}") from error
        return cls(match[1], match[2], prefix)

    @property
    def repository(self) -> str:
        return f"{self.scheme}://{self.bucket}/{self.prefix}".rstrip("/")

    @property
    def revision(self) -> str:
        """Name of the only branch that a cached model has."""
        return "main"

    @property
    def commit(self) -> None:
        """Always None. A store has no commits, because its objects can change."""
        return

    @property
    def directory(self) -> tuple[str, str]:
        """The common prefix of the objects, and the file name in the URL. The file name is "" if the URL has none."""
        if not self.prefix.endswith(".gguf"):
            return self.prefix, ""
        parent, _, name = self.prefix.rpartition("/")
        return parent, name

    @property
    def cache_name(self) -> str:
        """Name of the model's directory in a cache."""
        readable = re.sub(r"[^A-Za-z0-9._-]+", "-", f"{self.scheme}-{self.bucket}-{self.prefix}").strip("-.")[:80]
        return f"{readable}-{hashlib.sha256(self.repository.encode()).hexdigest()[:16]}"

    def __str__(self) -> str:
        return self.repository


def is_object_reference(model: str) -> bool:
    return model.startswith(OBJECT_PREFIXES)


class ObjectStoreApi:
    """A client of an object store, which lists and reads the objects of one ObjectReference."""

    def __init__(self, reference: ObjectReference) -> None:
        self._reference = reference
        self._etags: dict[str, str] = {}
        try:
            self._store = _store(reference)
        except (exceptions.BaseError, ValueError) as error:
            # Do not chain the library's error, because its message can quote credentials.
            raise ObjectStoreError(
                f"{reference}: the settings of the object store are not valid ({type(error).__name__}): correct the "
                f"variables of the environment, such as {_CREDENTIALS.get(reference.scheme, 'SSL_CERT_FILE')}"
            ) from None

    def list(self, *, wait: Callable[[float], object] = time.sleep) -> Listing:
        """Return the files of the model, as HubApi.list() does.

        Raises ObjectStoreError or ObjectStoreUnavailableError.
        """
        return retried(self._list, wait)

    def read(self, listing: Listing, file: RemoteFile, size: int) -> Iterator[bytes]:
        """Yield at least the first `size` bytes of a file. Raises ObjectStoreError or ObjectStoreUnavailableError."""
        return self._read(file, 0)

    def get(
        self, listing: Listing, file: RemoteFile, cache: Path, received: Callable[[int], None], *, again: bool
    ) -> Path:
        """Fetch a file, as HubApi.get() does, and return its path.

        The transfer continues after the bytes that an earlier attempt or process has written. Writes are unbuffered, so
        a killed process has written all bytes that it has received.
        """
        repository = cache / self._reference.cache_name
        content, path = repository / "blobs" / file.digest, repository / "snapshots" / listing.commit / file.path
        for parent in (content.parent, path.parent):
            parent.mkdir(parents=True, exist_ok=True)
        # The name also depends on the path, because two files with the same content can be transferred concurrently.
        name = hashlib.sha256(f"{file.path}\0{file.digest}".encode()).hexdigest()[:40]
        partial, link = content.with_name(f"{name}.incomplete"), content.with_name(f"{name}.link")
        if again or not content.is_file():
            with partial.open("ab", 0) as out:
                received(out.tell())
                for piece in self._read(file, out.tell()):
                    out.write(piece)
                    received(out.tell())
                if out.tell() < file.size:
                    raise ObjectStoreUnavailableError(f"{file.path} ended after {out.tell()} of {file.size} bytes")
            partial.replace(content)
        link.unlink(missing_ok=True)
        link.symlink_to(os.path.relpath(content, path.parent))
        link.replace(path)
        return path

    def cancel(self) -> None:
        """Cancel the running transfers. Each transfer stops when it next calls `received`."""

    def _read(self, file: RemoteFile, start: int) -> Iterator[bytes]:
        etag, length = self._etags.get(file.path), _FIRST_BYTES
        while start < file.size:
            end = min(file.size, start + length)
            options: GetOptions = {"range": (start, end)}
            if etag and not etag.startswith("W/"):  # If-Match never matches a weak ETag
                options["if_match"] = f'"{etag}"'
            received = 0
            with self._errors(file.path):
                response = obstore.get(self._store, file.path, options=options)
                if response.meta["size"] != file.size or _etag(response.meta) != (etag or ""):
                    raise self._changed(file.path)
                for piece in response.stream(min_chunk_size=_PIECE_BYTES):
                    received += len(piece)
                    yield bytes(piece)
            if received == 0:
                return
            start, length = start + received, min(2 * length, _REQUEST_BYTES)

    def _list(self) -> Listing:
        reference = self._reference
        _, only = reference.directory
        objects: Sequence[Mapping[str, Any]]
        if only:
            objects = [self._head(only)]
        elif reference.scheme == "https":
            objects = self._http_objects()
        else:
            objects = self._prefix_objects()
        manifest = next((entry for entry in objects if entry["path"] == MANIFEST_FILE), None)
        digests = {} if manifest is None else self._digests(manifest)
        files = tuple(self._file(entry, digests) for entry in objects)
        missing = sorted(digests.keys() - {file.path for file in files})
        if missing:
            raise ObjectStoreError(
                f"{reference} has no object {shown(missing[0])}, which its {MANIFEST_FILE} lists: upload the whole "
                "directory"
            )
        state = sorted((file.path, file.size, file.digest) for file in files)
        return Listing(reference.repository, hashlib.sha256(json.dumps(state).encode()).hexdigest(), files)

    def _prefix_objects(self) -> Sequence[Mapping[str, Any]]:
        objects: builtins.list[Mapping[str, Any]] = []
        with self._errors():
            for chunk in obstore.list(self._store):
                objects += [entry for entry in chunk if not (entry["size"] == 0 and entry["path"].endswith("/"))]
                if len(objects) > MAX_FILES:
                    raise ObjectStoreError(
                        f"{self._reference} has more than {MAX_FILES} objects: name the prefix of one model"
                    )
        if not objects:
            raise ObjectStoreError(
                f"no objects with the prefix {shown(self._reference.prefix)} in bucket {self._reference.bucket} "
                f"({self._reference}): the model does not exist there; correct the bucket or the prefix"
            )
        return objects

    def _http_objects(self) -> Sequence[Mapping[str, Any]]:
        heads = {name: self._head(name, optional=True) for name in (MANIFEST_FILE, *_HTTP_FILES)}
        objects = {name: entry for name, entry in heads.items() if entry is not None}
        if MANIFEST_FILE in objects:
            names: Iterable[str] = self._digests(objects[MANIFEST_FILE])
        elif _INDEX in objects:
            names = self._shards(objects[_INDEX])
        else:
            names = [_SINGLE]
        for name in names:
            if name not in objects:
                objects[name] = cast("Mapping[str, Any]", self._head(name))
        return tuple(objects.values())

    def _shards(self, index: Mapping[str, Any]) -> Sequence[str]:
        shards = self._json(index).get("weight_map")
        names = sorted(set(map(str, shards.values()))) if isinstance(shards, dict) else []
        if not names or len(names) > MAX_FILES:
            raise ObjectStoreError(
                f"{_INDEX} of {self._reference} has {len(names)} names in weight_map: want 1 to {MAX_FILES}"
            )
        return [self._safe(name) for name in names]

    def _head(self, name: str, *, optional: bool = False) -> Any:
        """Return the metadata of an object; None if it does not exist and `optional` is True."""
        try:
            with self._errors(name):
                return {**obstore.head(self._store, name), "path": name}
        except ObjectMissingError:
            if optional:
                return None
            raise

    def _digests(self, manifest: Mapping[str, Any]) -> dict[str, tuple[int, str]]:
        """Return the size and sha256 of each file, by path, from a manifest that `megatron fetch` has written."""
        files = self._json(manifest).get("files")
        digests = {}
        for name, entry in (files if isinstance(files, dict) else {}).items():
            size, sha256 = (entry.get("size"), entry.get("sha256")) if isinstance(entry, dict) else (None, None)
            if not isinstance(size, int) or not isinstance(sha256, str) or not re.fullmatch(r"[0-9a-f]{64}", sha256):
                raise ObjectStoreError(
                    f"{MANIFEST_FILE} of {self._reference} has no size and sha256 of {shown(name)}: upload the one "
                    "that `megatron fetch` wrote, or delete it"
                )
            digests[self._safe(name)] = size, sha256
        return digests

    def _json(self, entry: Mapping[str, Any]) -> dict[str, Any]:
        name, size = str(entry["path"]), int(entry["size"])
        if size > MAX_LISTING_BYTES:
            raise ObjectStoreError(
                f"{name} of {self._reference} has {size} bytes: at most {MAX_LISTING_BYTES} are read"
            )
        self._etags[name] = _etag(entry)
        data = b"".join(self._read(RemoteFile(name, size, None, None), 0))
        try:
            return parse_json(data, where=f"{name} of {self._reference}", elements=4 * MAX_FILES)
        except ModelFileError as error:
            raise ObjectStoreError(str(error)) from error

    def _file(self, entry: Mapping[str, Any], digests: Mapping[str, tuple[int, str]]) -> RemoteFile:
        name, size, etag = self._safe(entry["path"]), int(entry["size"]), _etag(entry)
        if size > MAX_FILE_BYTES:
            raise ObjectStoreError(f"{shown(name)} of {self._reference} has {size} bytes: at most {MAX_FILE_BYTES}")
        self._etags[name] = etag
        if name in digests:
            if digests[name][0] != size:
                raise ObjectStoreError(
                    f"{shown(name)} of {self._reference} has {size} bytes, its {MANIFEST_FILE} lists "
                    f"{digests[name][0]}: upload the directory again"
                )
            return RemoteFile(name, size, digests[name][1], None)
        state = f"{self._reference}\0{name}\0{size}\0{etag or entry['last_modified']}"
        return RemoteFile(name, size, None, None, version=hashlib.sha256(state.encode()).hexdigest())

    def _safe(self, name: str) -> str:
        try:
            return require_safe_name(name)
        except UnsafeNameError as error:
            raise ObjectStoreError(f"{self._reference} has an object with an unsafe name: {error}") from error

    def _changed(self, name: str) -> ObjectStoreError:
        return ObjectStoreError(
            f"{name} of {self._reference} changed while it was read: run this again, and put each revision of a model "
            "under a prefix of its own"
        )

    @contextmanager
    def _errors(self, name: str = "") -> Iterator[None]:
        """Return a context that converts the errors of obstore to ObjectStoreError or ObjectStoreUnavailableError.

        The messages of obstore are dropped, because they quote URLs that can contain signatures.
        """
        where = f"{self._reference}/{name}" if name and not self._reference.directory[1] else str(self._reference)
        try:
            yield
        except FileNotFoundError as error:
            raise ObjectMissingError(
                f"{where} does not exist (404): correct the bucket or the key, or upload the object"
            ) from error
        except exceptions.PreconditionError as error:
            raise self._changed(name) from error
        except (exceptions.BaseError, OSError) as error:
            raise self._translated(where, str(error)) from None

    def _translated(self, where: str, message: str) -> Exception:
        status, code = _STATUS.search(message), _CODE.search(message)
        named = f" {code[1]}" if code else ""
        if status is None:
            cause = _CAUSE.search(message)
            detail = escaped(" ".join(cause[0].split()))[:200] if cause else "the connection failed"
            return ObjectStoreUnavailableError(
                f"the server of {where} does not answer ({detail}): check the endpoint, and that the network allows it"
            )
        number = int(status[1])
        if number in (401, 403):
            names = _CREDENTIALS.get(self._reference.scheme)
            remedy = f"set {names}, or give the service account access" if names else "the server must allow access"
            return ObjectStoreError(f"access to {where} is denied ({number}{named}): {remedy}")
        if number == 404:
            return ObjectMissingError(f"{where} does not exist (404{named}): correct the bucket or the prefix")
        if number == 429 or number >= 500:
            return ObjectStoreUnavailableError(
                f"the server of {where} is overloaded ({number}{named})", retry_after=0.0
            )
        return ObjectStoreError(f"the server of {where} answers {number}{named}: correct the URL, region or endpoint")


class ObjectMissingError(ObjectStoreError):
    """Raised if an object or a bucket does not exist."""


def _etag(entry: Mapping[str, Any]) -> str:
    """Return the ETag without quotes, because some stores list ETags without quotes."""
    return (entry["e_tag"] or "").strip('"')


def _require_valid_variables(reference: ObjectReference) -> None:
    """Check the environment variables that obstore reads, because its error messages quote their values.

    Raises ObjectStoreError.
    """
    prefix = _PREFIXES.get(reference.scheme)
    for name in sorted(os.environ) if prefix else ():
        value = os.environ[name]
        if not name.startswith(str(prefix)) or not value or name == "GOOGLE_SERVICE_ACCOUNT_KEY":
            continue
        form = URL if name in _ENDPOINTS[reference.scheme] else SWITCH if name.endswith(_SWITCHES) else HEADER
        try:
            form.check(name, value)
        except SecretError as error:
            raise ObjectStoreError(f"{reference} cannot be read: {error}") from None


def _store(reference: ObjectReference) -> ObjectStore:
    """Return obstore's client for a reference.

    Raises ObjectStoreError, whose message never contains a credential.
    """
    _require_valid_variables(reference)
    try:
        return _library_store(reference)
    except exceptions.BaseError:
        prefix = _PREFIXES.get(reference.scheme, "SSL_CERT_FILE")
        raise ObjectStoreError(
            f"{reference} cannot be read: a variable {prefix}… does not have a valid value; set them as the provider "
            "of the store gave them"
        ) from None


def _library_store(reference: ObjectReference) -> ObjectStore:
    named = [os.environ.get(name, "") for name in _ENDPOINTS.get(reference.scheme, ())]
    client: ClientConfig = {
        "allow_http": any(endpoint.startswith("http://") for endpoint in named),
        "connect_timeout": _CONNECT_SECONDS,
        "read_timeout": _READ_SECONDS,
        "timeout": _REQUEST_SECONDS,
        "user_agent": "megatron-inference",
    }
    certificates = os.environ.get("SSL_CERT_FILE")
    if certificates:
        try:
            client["root_certificate"] = Path(certificates).read_bytes()
        except OSError as error:
            raise ObjectStoreError(
                f"the file of SSL_CERT_FILE cannot be read ({error.strerror}): name a PEM file"
            ) from None
    prefix = reference.directory[0] or None
    # The download code counts attempts and resumes transfers itself. The library would retry from the first byte.
    retries: Any = {"max_retries": 0}
    if reference.scheme == "s3":
        return S3Store(reference.bucket, prefix=prefix, client_options=client, retry_config=retries)
    if reference.scheme == "gs":
        return GCSStore(reference.bucket, prefix=prefix, client_options=client, retry_config=retries)
    if reference.scheme == "az":
        return AzureStore(reference.bucket, prefix=prefix, client_options=client, retry_config=retries)
    url = f"https://{reference.bucket}/{prefix or ''}"
    return HTTPStore.from_url(url, client_options=client, retry_config=retries)
