"""Protects a process from defects of its environment: closed standard streams, and proxies for loopback addresses.

Imports no torch.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies_environment, proxy_bypass

C = TypeVar("C")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


class UnusableProxyError(OSError):
    """An environment variable names a proxy that the HTTP client cannot use.

    The message has the names of the proxy variables, not their values.
    """


def prepare_process() -> None:
    """Open closed standard streams, and exempt loopback addresses from proxies. Commands call this function first.

    A closed standard stream is replaced by /dev/null. Otherwise the next socket or file would get the stream's
    descriptor, and the command's output would be written there. The exemption from proxies applies to this process and
    its children.
    """
    for descriptor, (name, mode) in enumerate({"stdin": "r", "stdout": "w", "stderr": "w"}.items()):
        try:
            os.fstat(descriptor)
        except OSError:
            stream = os.fdopen(os.open(os.devnull, os.O_RDWR), mode)  # os.open() returns the lowest free descriptor
            setattr(sys, name, stream)
    if getproxies_environment():
        # Some libraries read the lower-case variable, others the upper-case one.
        listed = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
        names = [name.strip() for name in listed.split(",") if name.strip()]
        os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(
            [*names, *(name for name in _LOOPBACK if name not in names)]
        )


def output_is_closed() -> bool:
    """Return whether the program that reads standard output or standard error, such as `head`, has exited."""
    poll = select.poll()
    for descriptor in (1, 2):
        poll.register(descriptor, 0)
    return any(events & (select.POLLERR | select.POLLHUP) for _, events in poll.poll(0))


def missing_package(error: ModuleNotFoundError, *, extra: str) -> str:
    """Return an error message that tells the user to install `extra`.

    Re-raise `error` if the missing module is part of this project, because `extra` does not provide such a module.

    extra: name of optional dependencies of this project's distribution.
    """
    name = (error.name or "").partition(".")[0]
    if not name or name.startswith("megatron_"):
        raise error
    return f"the package {name} is not installed: pip install 'megatron-inference[{extra}]'"


def http_client(make: Callable[..., C], url: str, **options: Any) -> C:
    """Return an HTTP client for `url` that uses the environment's proxy, except for loopback and hosts in NO_PROXY.

    make:    httpx.Client, httpx.AsyncClient or httpx2.Client.
    options: options of the client.

    Raises UnusableProxyError if the client cannot use the value of a proxy variable.
    """
    import httpx  # an optional dependency, which the operator's image lacks

    host = urlsplit(url).hostname or ""
    if host in _LOOPBACK or proxy_bypass(host):
        # With trust_env=False, httpx ignores all proxy variables, even unusable ones. The SSL context reads the
        # variables for certificates.
        return make(trust_env=False, verify=httpx.create_ssl_context(trust_env=True), **options)
    try:
        return make(**options)
    except (ImportError, ValueError) as error:
        names = ", ".join(sorted(f"{scheme.upper()}_PROXY" for scheme in getproxies_environment() if scheme != "no"))
        raise UnusableProxyError(
            f"a proxy of the environment ({names}) cannot be used for {host}: set it to an HTTP proxy, such as "
            "http://HOST:3128, or list the host in NO_PROXY. SOCKS proxies need 'pip install socksio'"
        ) from error
