"""Logs in to the API server with the service account of the pod, or outside a pod with a kubeconfig.

`KubeApi`, which writes, and kopf, which watches, use the same configuration.
"""

from __future__ import annotations

import os
from pathlib import Path
from urllib.request import getproxies

import aiohttp
import kopf
from kubernetes.aio.client import Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from megatron_operator.cluster.nesting import BoundedResponse
from megatron_operator.cluster.watch_ages import WatchAges

SERVICE_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


class LoginError(RuntimeError):
    """There are no usable credentials for the API server. The message names the attempted sources and the remedy."""


def in_cluster() -> bool:
    """Return whether this process runs in a pod with a service account."""
    return bool(os.environ.get("KUBERNETES_SERVICE_HOST")) and Path(SERVICE_ACCOUNT, "token").exists()


class RedirectedError(aiohttp.ClientConnectionError):
    """A server answered with a redirect. This is a connection error, so that a redirected watch is retried."""


def rejects_redirects() -> aiohttp.TraceConfig:
    """Return an aiohttp trace configuration that makes redirected requests fail with RedirectedError.

    A redirect may come from a pod to which the API server forwards a request. If the session followed this redirect,
    the pod could choose the URL that the session reads, and the server that receives the credentials.
    """

    async def reject(_: aiohttp.ClientSession, __: object, answer: aiohttp.TraceRequestRedirectParams) -> None:
        answer.response.close()
        raise RedirectedError(
            f"{answer.url.origin()} answers {answer.response.status}, a redirect, which is not followed: give the "
            "address of the server itself"
        )

    config = aiohttp.TraceConfig()
    config.on_request_redirect.append(reject)
    return config


async def load_configuration(*, kubeconfig: Path | None, context: str | None = None) -> Configuration:
    """Return the client configuration. An explicit kubeconfig takes precedence over the service account.

    Raises:
        LoginError: neither a kubeconfig nor a service account is usable.
    """
    configuration = Configuration()
    # trust_env would look up proxies and ~/.netrc, which costs each request two thread switches.
    configuration.client_session_kwargs = {"trust_env": bool(getproxies())}
    try:
        if kubeconfig is None and in_cluster():
            load_incluster_config(client_configuration=configuration)
        else:
            path = str(kubeconfig) if kubeconfig is not None else None
            await load_kube_config(
                config_file=path, context=context, client_configuration=configuration, persist_config=False
            )
    except (ConfigException, OSError) as error:
        where, remedy = "service account and default kubeconfig", "Set KUBECONFIG"
        if kubeconfig is not None:
            where, remedy = f"kubeconfig {kubeconfig}", "Give another one"
        raise LoginError(f"cannot log in to Kubernetes with {where}: {error}. {remedy}") from error
    return configuration


def kopf_session(configuration: Configuration, *, watches: WatchAges) -> kopf.AiohttpSession:
    """Return a session for kopf with the same login as KubeApi. The session follows no redirect.

    kopf closes the session, and calls this function again when the API server rejects the credentials.

    watches: records when each watch is established.
    """
    if configuration.refresh_api_key_hook is not None:
        configuration.refresh_api_key_hook(configuration)
    header = configuration.api_key.get("BearerToken", "")
    scheme, _, token = header.rpartition(" ")
    login = kopf.ConnectionInfo(
        server=configuration.host,
        ca_path=configuration.ssl_ca_cert,
        insecure=not configuration.verify_ssl,
        username=configuration.username or None,
        password=configuration.password or None,
        scheme="Bearer" if token and not scheme else (scheme.capitalize() or None),
        token=token or None,
        certificate_path=configuration.cert_file,
        private_key_path=configuration.key_file,
        default_namespace=None,
    )
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=login.as_ssl_context()),
        headers=login.as_http_headers(),
        trust_env=bool(getproxies()),
        trace_configs=[watches.trace(), rejects_redirects()],
        response_class=BoundedResponse,
    )
    return kopf.AiohttpSession(server=login.server, aiohttp_session=session)
