"""Limits of the protocol, which both senders and receivers enforce."""

from __future__ import annotations

MAX_CLIENT_MESSAGE_BYTES = 8 << 20
MAX_ENGINE_MESSAGE_BYTES = 64 << 20
MAX_MEDIA_BYTES = 7 << 20
"""Maximum bytes of images, audio and video in one request. A SUBMIT with this number of bytes is within the limit of a
client's message.
"""
MAX_NAME_BYTES = 128
MAX_OPERATION_ID_BYTES = 64
MAX_SALT_CHARACTERS = 256
MAX_TENANT_CHARACTERS = 64
MAX_REQUEST_ID_CHARACTERS = 128
MAX_TRACEPARENT_CHARACTERS = 64
"""Maximum length of a W3C trace context. Version 00 has 55 characters."""
MAX_NEEDS_CHARACTERS = 512
MAX_SESSION_CHARACTERS = 64
MAX_LACKS = 64
MAX_PARAMETERS = 256
MAX_TASKS = 16
MAX_TEXT_CHARACTERS = 4096
"""Maximum length of an error, a reason or a source. Longer errors and reasons are truncated."""
MAX_CAUSE_CHARACTERS = 512
"""Maximum length of the error of one adapter. A longer error is truncated."""
MAX_RANKS = 1024
"""Maximum number of ranks of an engine that offer their weights to other engines."""
MAX_ENGINES = 2048
"""Maximum number of engines that are registered at the same time."""

MAX_FENCE = 1 << 53
MAX_EPOCH = 1 << 53
"""Maximum epoch. JSON can represent it exactly, and it exceeds any realistic number of updates."""

MAX_ADMIN_MESSAGE_BYTES = 1 << 20
"""Size limit of a message to the operator, which keeps the answers of many coordinators in memory."""

UID_BYTES = 16
TICKET_BYTES = 32
MAX_HANDOFF_BYTES = 64
MAX_TRANSFER_BLOCKS = 2048
"""Maximum number of blocks of one prompt that engines exchange. The rest of the prompt is computed."""
MAX_HANDLE_BYTES = 16 << 20
"""Maximum size of the handle of an export. vLLM's handle has the tokens of the prompt."""

HEARTBEAT_SECONDS = 0.5
SUSPECT_SECONDS = 2.0
"""Seconds without a heartbeat after which an engine gets no new requests."""
DEAD_SECONDS = 10.0
"""Seconds without a heartbeat after which an engine is removed, and its requests go to other engines."""
RECOVERY_SECONDS = 5.0
"""Maximum seconds that a restarted coordinator waits for its engines."""
