"""Allocates unused ports and subnets."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Iterable

from localcluster.errors import ClusterError
from localcluster.settings import PORT_NAMES, PREFERRED_PORTS, Options
from localcluster.shell import run
from megatron_runtime.cli.processes import free_ports, reserve_port
from megatron_runtime.protocol import strict_json as json


def take(port: int) -> bool:
    """Reserve a port until this process ends. Return False if the port is in use or another process has reserved it."""
    return reserve_port(port) and _can_listen(port)


def _can_listen(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", port))
        except OSError:
            return False
        return True


def allocate(options: Options) -> dict[str, int]:
    """Return an unused port for each server, by the server's name.

    A requested port of the API server has precedence. Otherwise, a server gets its preferred port, or a port outside
    the ephemeral range if the preferred port is in use. Raises ClusterError if the requested port is in use.
    """
    if options.api_port is not None and not take(options.api_port):
        raise ClusterError(f"--api-port={options.api_port} is taken; give another, or leave it out to get a free one")
    ports: dict[str, int] = {}
    for name in PORT_NAMES:
        preferred = PREFERRED_PORTS.get(name, 0)
        if name == "apiserver" and options.api_port is not None:
            preferred = options.api_port
        ports[name] = preferred if preferred and take(preferred) else free_ports(1)[0]
    return ports


def local_networks(*, ignore_device: str) -> list[tuple[str, ipaddress.IPv4Network]]:
    """Return the device and the IPv4 network of each route of this machine.

    The default route and routes through `ignore_device` are left out.
    """
    routes = json.loads(run(["ip", "-json", "-4", "route", "show"]).stdout or "[]")
    return [
        (route.get("dev", "?"), ipaddress.IPv4Network(route["dst"], strict=False))
        for route in routes
        if route["dst"] != "default" and route.get("dev") != ignore_device
    ]


def overlaps(subnet: str, networks: Iterable[tuple[str, ipaddress.IPv4Network]]) -> str | None:
    """Return a device whose network overlaps `subnet`, or None if no network overlaps `subnet`."""
    wanted = ipaddress.IPv4Network(subnet)
    return next((device for device, network in networks if network.overlaps(wanted)), None)


def choose_subnet(
    option: str, asked: str | None, candidates: Iterable[str], networks: list[tuple[str, ipaddress.IPv4Network]]
) -> str:
    """Return the subnet `asked` or, if `asked` is None, the first candidate that overlaps no network.

    Raises ClusterError if `asked` or every candidate overlaps a network. option: name of the option in the message.
    """
    if asked is not None:
        device = overlaps(asked, networks)
        if device is not None:
            raise ClusterError(f"{option}={asked} overlaps a network of {device}; give another")
        return asked
    for candidate in candidates:
        if overlaps(candidate, networks) is None:
            return candidate
    raise ClusterError(f"every default for {option} overlaps a network of this machine; give {option}")
