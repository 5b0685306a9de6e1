"""Limits of the wire, checked by senders and receivers alike."""

from __future__ import annotations

MAX_CLIENT_MESSAGE_BYTES = 8 << 20
MAX_ENGINE_MESSAGE_BYTES = 64 << 20
MAX_NAME_BYTES = 128
MAX_OPERATION_ID_BYTES = 64
MAX_SALT_CHARACTERS = 256
MAX_TENANT_CHARACTERS = 64

UID_BYTES = 16

HEARTBEAT_SECONDS = 0.5
SUSPECT_SECONDS = 2.0
"""An engine silent for so long gets no new work."""
DEAD_SECONDS = 10.0
"""An engine silent for so long is removed and its requests go elsewhere."""
RECOVERY_SECONDS = 5.0
"""A coordinator that came back waits so long, at most, for its engines."""
