"""CURVE keys of a libzmq socket."""

from __future__ import annotations

from typing import Any

import zmq

from megatron_runtime.transport.security import PeerKeys


def set_keys(socket: zmq.Socket[Any], keys: PeerKeys) -> None:
    """Set the keys of a peer, before connect()."""
    socket.curve_publickey = keys.own.public
    socket.curve_secretkey = keys.own.secret
    socket.curve_serverkey = keys.server_public
