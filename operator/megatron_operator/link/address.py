"""Resolves the address of a coordinator's admin port. Tests can inject another resolver."""

from __future__ import annotations

from collections.abc import Callable

from megatron_operator.resource.names import PORT_ADMIN
from megatron_runtime.transport.zmtp.dealer import AddressError, parse_address

Resolver = Callable[[str, str, str], str | None]
"""Maps (name, namespace, cluster IP of `NAME-coordinator` or empty) to a ZeroMQ endpoint, or to None without one."""


class AddressTemplateError(ValueError):
    """`--coordinator-address` is not a valid template."""


def service_address(name: str, namespace: str, cluster_ip: str) -> str | None:
    """Return the address of the admin port at the Service's cluster IP. Returns None if `cluster_ip` is empty.

    The address needs no DNS and is reachable from nodes and pods.
    """
    if not cluster_ip:
        return None
    host = f"[{cluster_ip}]" if ":" in cluster_ip else cluster_ip
    return f"tcp://{host}:{PORT_ADMIN}"


def template_resolver(template: str) -> Resolver:
    """Return a resolver that fills in `{name}` and `{namespace}` in a template.

    Without a scheme, the address gets `tcp://`. Without a port, it gets the admin port.

    Raises:
        AddressTemplateError: the template has another placeholder or scheme.
    """
    try:
        template.format(name="name", namespace="namespace")
    except (KeyError, IndexError, ValueError) as error:
        raise AddressTemplateError(
            f"--coordinator-address {template!r}: {error}; only {{name}} and {{namespace}} may stand in braces"
        ) from error

    def resolve(name: str, namespace: str, cluster_ip: str) -> str | None:
        address = template.format(name=name, namespace=namespace)
        if "://" in address:
            return address
        _, colon, port = address.rpartition(":")
        return f"tcp://{address}" if colon and port.isdigit() else f"tcp://{address}:{PORT_ADMIN}"

    try:
        parse_address(str(resolve("name", "namespace", "")))
    except AddressError as error:
        raise AddressTemplateError(f"--coordinator-address {template!r}: {error}") from error
    return resolve
