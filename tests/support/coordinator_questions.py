"""Query a coordinator's status as an admin other than the operator."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from typing import Any

from control_link import ControlLink

from megatron_operator.cluster.kinds import SECRET
from megatron_runtime.protocol.messages import StatusReply
from megatron_runtime.transport.security import KeyPair, PeerKeys


async def ask_coordinator(api: Any, namespace: str, port: int) -> StatusReply:
    """Return the status of the coordinator of resource `demo` on this machine."""
    admin = await api.get(SECRET, namespace, "megatron-operator-admin")
    keys = await api.get(SECRET, namespace, "demo-keys")

    def entry(secret: Mapping[str, Any], name: str) -> bytes:
        return base64.b64decode(secret["data"][name]).split()[0]

    own = KeyPair(entry(admin, "admin.pub"), entry(admin, "admin.key"))
    link = ControlLink(port, keys=PeerKeys(own=own, server_public=entry(keys, "server.pub")), name="test")
    await link.start()
    try:
        return await link.status()
    finally:
        link.close()
