"""A chat with the model of a resource: `kubectl megatron chat`.

Requests go through the API server's proxy to the Service of the resource, so that it works wherever kubectl works. The
API server removes the Authorization header of a request; the key of the server travels as x-api-key.
"""

from __future__ import annotations

import base64
import http.client
from collections.abc import Generator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megatron_operator.cluster.kinds import SECRET, SERVICE
from megatron_operator.kubectl_proxy import ClusterError, rejection
from megatron_operator.resource_client import ResourceClient
from megatron_operator.resource_view import Object
from megatron_runtime.process.secrets import HEADER, SecretError
from megatron_runtime.protocol import strict_json as json

MAX_EVENT_BYTES = 16 << 20
"""Of one line of an answer."""
ANSWER_SECONDS = 600.0
"""Longest time without a byte: a request may wait in the coordinator."""


class ChatError(Exception):
    """The server rejected a request, or broke off an answer."""


def first_key(text: str, *, model: str) -> str | None:
    """Return the first API key of a key file, in either of its forms, that may use a model. None: there is none."""
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]
    if lines and lines[0].startswith(("keys:", "---")):
        import yaml  # only for a key file in YAML

        try:
            entries = yaml.safe_load(text)["keys"]
            usable = [entry["key"] for entry in entries if model in (entry.get("models") or [model])]
        except (yaml.YAMLError, KeyError, TypeError, AttributeError):
            return None
        return str(usable[0]) if usable else None
    return lines[0] if lines else None


def api_key(client: ResourceClient, resource: Mapping[str, Any], *, model: str) -> str | None:
    """Return an API key from the Secret of a resource; None if its server needs none.

    Raises:
        ClusterError: the user may not read the Secret, or it has no usable key.
    """
    reference = ((resource.get("spec") or {}).get("server") or {}).get("apiKeysSecretRef")
    if reference is None:
        return None
    name, key = reference["name"], reference["key"]
    about = f"Secret {client.namespace}/{name}"
    try:
        secret = client.api.request("GET", SECRET.path(client.namespace, name), about=about)
    except ClusterError as error:
        raise ClusterError(f"the server needs an API key; {error}; give --api-key", code=error.code) from error
    content = base64.b64decode((secret.get("data") or {}).get(key) or "").decode(errors="replace")
    found = first_key(content, model=model)
    if found is None:
        raise ClusterError(f"{about}: key {key} has no API key for model {model}; give --api-key")
    try:
        return HEADER.check(f"{about}: the API key of key {key}", found)
    except SecretError as error:
        raise ClusterError(str(error)) from None


@dataclass
class Conversation:
    """A conversation with one model.

    sampling: fields of every request, such as temperature.
    """

    client: ResourceClient
    resource: Mapping[str, Any]
    model: str
    key: str | None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    messages: list[Object] = field(default_factory=list)

    @property
    def path(self) -> str:
        """The API server's proxy to the Service of the resource."""
        scheme = "https" if (self.resource["spec"].get("server") or {}).get("tls") is not None else "http"
        service = f"{'https:' if scheme == 'https' else ''}{self.resource['metadata']['name']}:{scheme}"
        return SERVICE.path(self.client.namespace, service, subresource="proxy/v1/chat/completions")

    def ask(self, text: str) -> Generator[tuple[str, str], None, None]:
        """Send a message; yield parts of reasoning and of the answer. Closing the generator aborts the request.

        The message and what arrived of the answer become part of the conversation.

        Raises:
            ClusterError: the API server does not answer, or forbids the request.
            ChatError:    the server rejected the request or broke off the answer. The message is not kept.
        """
        question = {"role": "user", "content": text}
        body = {**self.sampling, "model": self.model, "messages": [*self.messages, question], "stream": True}
        headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
        if self.key is not None:
            headers["x-api-key"] = self.key
        answer: list[str] = []
        try:
            with self.client.api.open(
                "POST", self.path, body=json.dumps(body).encode(), headers=headers, seconds=ANSWER_SECONDS
            ) as response:
                if response.status != 200:
                    raise _failure(response, about=f"services/proxy of {self.client.namespace}")
                for event in _events(response):
                    for part in _parts(event):
                        answer.append(part[1])
                        yield part
        finally:
            if any(answer):
                self.messages += [question, {"role": "assistant", "content": "".join(answer)}]


def _failure(response: http.client.HTTPResponse, *, about: str) -> Exception:
    """Return the error of an answer of the server, or of the API server before it."""
    text = response.read(64 << 10)
    try:
        error = json.loads(text)["error"]
        return ChatError(f"{response.status}: {error['message']}")
    except (ValueError, KeyError, TypeError):
        return rejection(response.status, text, about=about)


def _events(response: http.client.HTTPResponse) -> Iterator[Object]:
    """Yield the events of a stream. Raises ChatError."""
    while line := response.readline(MAX_EVENT_BYTES):
        if not line.endswith(b"\n"):
            break
        if not line.startswith(b"data:"):
            continue
        data = line.removeprefix(b"data:").strip()
        if data == b"[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError as error:
            raise ChatError(f"an event of the stream is not JSON: {error}") from error
        if not isinstance(event, dict):
            raise ChatError("an event of the stream is not a JSON object")
        if "error" in event:
            failure = event["error"]
            raise ChatError(str(failure.get("message") if isinstance(failure, dict) else failure))
        yield event
    raise ChatError("the stream broke off before its end")


def _parts(event: Object) -> Iterator[tuple[str, str]]:
    """Yield reasoning and text of each choice of an event."""
    try:
        for choice in event["choices"]:
            delta = choice.get("delta") or {}
            reasoning, text = delta.get("reasoning_content") or "", delta.get("content") or ""
            if reasoning or text:
                yield str(reasoning), str(text)
    except (KeyError, TypeError, AttributeError) as error:
        raise ChatError("an event of the stream is no part of a chat") from error
