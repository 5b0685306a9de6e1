"""The headers of messages. A header is the integer that is the first element of every message.

The headers 0 to 99 belong to Megatron-Core. The headers from 100 on are this runtime's extensions.
"""

from __future__ import annotations

from enum import IntEnum

PROTOCOL_VERSION = 3
"""The version that HELLO announces. A change that the previous release cannot read increments it. Peers accept
neighbouring versions. Version 2 was skipped, because messages of version 1 had other frames.
"""


class Header(IntEnum):
    CONNECT = 0
    CONNECT_ACK = 1
    SUBMIT_REQUEST = 20
    ENGINE_REPLY = 21
    ENGINE_REPLY_PARTIAL = 22
    ABORT_REQUEST = 23
    SUBMIT_REQUEST_WITH_KV = 24  # this and the next are answered as unsupported
    RELEASE_KV = 25
    PAUSE = 40
    UNPAUSE = 41
    SUSPEND = 42
    RESUME = 43
    SET_GENERATION_EPOCH = 44
    STOP = 45
    START_CUDA_PROFILER = 46
    STOP_CUDA_PROFILER = 47
    DISCONNECT = 60
    SHUTDOWN = 61
    TP_BROADCAST = 80

    HELLO = 100
    HELLO_ACK = 101
    HEARTBEAT = 102
    CONTROL_ACK = 103
    CONTROL_COMMIT = 104
    STATUS = 105
    STATUS_REPLY = 106
    ERROR = 107
    CACHED_BLOCKS = 108
    UPDATE_WEIGHTS = 109
    DRAIN = 110
    DISPATCH = 111
    PARTIAL = 112
    FINAL = 113
    SUBMIT = 114
    SET_ADAPTERS = 115
    PAIR_STATE = 116
    RESERVE = 117
    QUOTA = 118
    CHARGE = 119
    PREFILL = 120
    EXPORTED = 121
    TRANSFER = 122
    IMPORTED = 123
    RELEASE = 124


SIGNALS = frozenset({Header.PAUSE, Header.UNPAUSE, Header.SUSPEND, Header.RESUME, Header.STOP})
"""Control messages that change the state of engines and have no arguments."""

PROFILER = frozenset({Header.START_CUDA_PROFILER, Header.STOP_CUDA_PROFILER})
"""Control messages that change no state. An engine that cannot execute them keeps serving."""

CONTROLS = SIGNALS | PROFILER | {Header.SET_GENERATION_EPOCH, Header.UPDATE_WEIGHTS, Header.SET_ADAPTERS, Header.DRAIN}
"""All control messages. Each operation id gets one CONTROL_ACK."""


class Role(IntEnum):
    """The role of a peer, which determines what the peer may do.

    If the coordinator has three ports, the port of the peer's connection determines the role.
    """

    CLIENT = 0
    ENGINE = 1
    ADMIN = 2


class ErrorCode(IntEnum):
    """Codes of an ERROR, or of a CONTROL_ACK that rejects a verb. Codes 4xx and 5xx have the same meaning as in HTTP.

    Codes below 100 concern the connection.
    """

    UNKNOWN_PEER = 1  # send HELLO (again): this coordinator does not know the connection
    MALFORMED = 2  # the frame cannot be read
    WRONG_ROLE = 3  # the port or the registration does not allow this message
    VERSION = 4  # the peers have no protocol version in common
    STANDBY = 5  # this coordinator is on standby: connect to the other one
    INVALID_REQUEST = 400
    ADAPTER_NOT_FOUND = 404  # a request's adapter is not in the pool's list
    TOO_LARGE = 413
    ILLEGAL_SIGNAL = 409  # for a control message that is not legal in the state that the error names
    MODEL_CHANGED = 409  # for a request whose model differs from the engines' model
    STALE_FENCE = 412  # the coordinator has received a higher fence
    IN_PROGRESS = 423  # another operation is in progress
    MEDIA_MISSING = 428  # the coordinator lacks data that SUBMIT omitted; submit again with all data
    QUEUE_FULL = 429
    ENGINE_FAILED = 500
    UNSUPPORTED = 501  # the engine's backend has no such feature
    UNAVAILABLE = 503  # paused with Reject, or stopped
    DEADLINE = 504
    ENGINES_MISSING = 424  # fewer engines are registered than the sender expects
