"""How the operator reaches the API server: its service account in a pod, a kubeconfig elsewhere.

The one loaded configuration serves both clients: `KubeApi`, which writes, and kopf, which watches.
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


class LoginError(RuntimeError):
    """There is no way to the API server. The message says what was tried and what to give."""


def in_cluster() -> bool:
    """This process runs in a pod with a service account."""
    return bool(os.environ.get("KUBERNETES_SERVICE_HOST")) and os.path.exists(
        "/var/run/secrets/kubernetes.io/serviceaccount/token"
    )


async def load_configuration(*, kubeconfig: Path | None, context: str | None = None) -> Configuration:
    """The way to the API server. An explicit kubeconfig wins over the service account.

    Raises:
        LoginError: when neither is usable.
    """
    configuration = Configuration()
    # Looking for a proxy in the environment and for ~/.netrc costs each request two hops through a thread.
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
        where = f"kubeconfig {kubeconfig}" if kubeconfig else "service account and default kubeconfig"
        raise LoginError(f"cannot log in to Kubernetes with {where}: {error}. Give --kubeconfig FILE") from error
    return configuration


def kopf_session(configuration: Configuration, *, watches: WatchAges) -> kopf.AiohttpSession:
    """The same login for kopf, which closes the session. Called again by kopf when its credentials are refused.

    watches: is told when a watch is taken.
    """
    login = _kopf_login(configuration)
    session = aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0, ssl=login.as_ssl_context()),
        headers=login.as_http_headers(),
        trust_env=bool(getproxies()),
        trace_configs=[watches.trace()],
        response_class=BoundedResponse,
    )
    return kopf.AiohttpSession(server=login.server, aiohttp_session=session)


def _kopf_login(configuration: Configuration) -> kopf.ConnectionInfo:
    """With a token that is read anew."""
    if configuration.refresh_api_key_hook is not None:
        configuration.refresh_api_key_hook(configuration)
    header = configuration.api_key.get("BearerToken", "")
    scheme, _, token = header.rpartition(" ")
    return kopf.ConnectionInfo(
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
