"""Limits of the wire, checked by senders and receivers alike."""

from __future__ import annotations

MAX_CLIENT_MESSAGE_BYTES = 8 << 20
MAX_ENGINE_MESSAGE_BYTES = 64 << 20
MAX_MEDIA_BYTES = 7 << 20
"""Images, audio and video of one request. SUBMIT with all of them is within the limit of a client's message."""
MAX_NAME_BYTES = 128
MAX_OPERATION_ID_BYTES = 64
MAX_SALT_CHARACTERS = 256
MAX_TENANT_CHARACTERS = 64
MAX_REQUEST_ID_CHARACTERS = 128
MAX_TRACEPARENT_CHARACTERS = 64
"""Version 00 has 55 characters."""
MAX_NEEDS_CHARACTERS = 512
MAX_SESSION_CHARACTERS = 64
MAX_LACKS = 64
MAX_PARAMETERS = 256
MAX_TASKS = 16
MAX_TEXT_CHARACTERS = 4096
"""Maximum length of an error, a reason or a source. Errors and reasons are truncated to it."""
MAX_CAUSE_CHARACTERS = 512
"""Maximum length of the error of one adapter, which is truncated to it."""
MAX_RANKS = 1024
"""Ranks of an engine that offer their weights to other engines."""
MAX_ENGINES = 2048
"""Engines registered at the same time."""

MAX_FENCE = 1 << 53
MAX_EPOCH = 1 << 53
"""Exactly representable in JSON, and above any realistic number of leaders or updates."""

MAX_ADMIN_MESSAGE_BYTES = 1 << 20
"""Size limit of a message to the operator, which keeps the answers of many coordinators in memory."""

UID_BYTES = 16
TICKET_BYTES = 32
MAX_HANDOFF_BYTES = 64
MAX_TRANSFER_BLOCKS = 2048
"""Blocks of one prompt that engines exchange; the rest is computed."""

HEARTBEAT_SECONDS = 0.5
SUSPECT_SECONDS = 2.0
"""An engine without a heartbeat for this long gets no new requests."""
DEAD_SECONDS = 10.0
"""An engine without a heartbeat for this long is removed, and its requests go to other engines."""
RECOVERY_SECONDS = 5.0
"""The longest time that a restarted coordinator waits for its engines."""
