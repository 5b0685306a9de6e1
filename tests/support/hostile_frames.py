"""Frames of an attacker, for the hostile suite of each layer.

HostileFrames has noise, and real messages that are damaged, truncated, out of order or repeated. VALUES has any values.
BOMBS has frames that decode to many objects. The suites:

- codec: unit/wire/test_hostile_frames.py; bytes below it: unit/wire/test_zmtp_strangers.py and tests/fuzz
- coordinator: unit/coordinator/test_hostile_frames.py; as a process with keys: survival/test_hostile_peers.py
- operator's link: unit/operator_io/test_hostile_coordinator.py
"""

from __future__ import annotations

import random
from collections.abc import Callable

from hypothesis import strategies as st
from vectors import VECTORS

from megatron_runtime.protocol.headers import Header
from megatron_runtime.protocol.messages import (
    Abort,
    Control,
    Disconnect,
    Hello,
    MalformedMessageError,
    Plain,
    RequestMeta,
    Submit,
    decode,
    pack,
    tokens_to_bytes,
)


class HostileFrames:
    """An endless source of random frames, drawn by `rng`.

    It omits messages that the sender may legitimately send: registration or departure under another name, and SHUTDOWN
    of the Megatron protocol.
    """

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._sent: list[list[bytes]] = []

    def next(self) -> list[bytes]:
        while True:
            frames = self._next()
            if not _is_a_right(frames):
                break
        if len(self._sent) < 1000:
            self._sent.append(frames)
        else:
            self._sent[self._rng.randrange(1000)] = frames
        return frames

    def _next(self) -> list[bytes]:
        rng = self._rng
        kind = rng.randrange(10)
        if kind == 0 and self._sent:
            return rng.choice(self._sent)
        if kind == 1:
            return self._submit()
        if kind == 2:
            return [rng.randbytes(rng.randrange(1, 60)) for _ in range(rng.randrange(1, 12))]
        frames = [bytearray(frame) for frame in rng.choice(list(VECTORS.values())).to_frames()]
        frame = rng.choice(frames)
        if kind == 3 and frame:
            del frame[rng.randrange(len(frame)) :]
        elif kind == 4:
            frames.insert(rng.randrange(len(frames) + 1), bytearray(rng.randbytes(rng.randrange(8))))
        elif kind == 5:
            rng.shuffle(frames)
        elif kind == 6:
            frame += rng.randbytes(rng.randrange(1, 5000))
        elif kind < 9 and frame:
            for _ in range(rng.randrange(1, 4)):
                frame[rng.randrange(len(frame))] = rng.randrange(256)
        return [bytes(frame) for frame in frames]

    def _submit(self) -> list[bytes]:
        """Return a valid request, which a later ABORT of its uid may cancel."""
        rng = self._rng
        uid = rng.randbytes(16)
        if rng.random() < 0.5 and self._sent:
            return Abort(uid).to_frames()
        params = pack({"num_tokens_to_generate": rng.randrange(4)})
        prompt = tokens_to_bytes(rng.choices(range(60_000), k=rng.randrange(20)))
        return Submit(uid, RequestMeta(streaming=True, seed=1), prompt, b"", params).to_frames()


def _is_a_right(frames: list[bytes]) -> bool:
    try:
        message = decode(frames)
    except MalformedMessageError:
        return False
    if isinstance(message, Plain):
        return not message.items or message.items[0] == Header.SHUTDOWN
    return isinstance(message, Hello | Disconnect)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.binary(max_size=20)
    | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=6) | st.dictionaries(st.text(max_size=8) | st.integers(0, 9), inner, max_size=5)
    ),
    max_leaves=60,
)
"""Any values of msgpack."""


def control_frames(kind: Header) -> list[bytes]:
    """Return a verb as an administrator sends it."""
    return Control(kind=kind, operation_id="not mine to give", fence=1 << 40).to_frames()


def _array(size: int) -> bytes:
    return b"\xdd" + size.to_bytes(4, "big")


def _map(size: int) -> bytes:
    return b"\xdf" + size.to_bytes(4, "big")


def _nested(size: int) -> bytes:
    """Return a list with one list of a thousand lists, each with a thousand elements."""
    inner = b"\xdc\x03\xe8" + bytes(1000)
    middle = b"\xdc\x03\xe8" + inner * 1000
    count = max(1, size // len(middle))
    return _array(count) + middle * count


def _one_map(size: int) -> bytes:
    """Return a map that repeats one key."""
    entries = (size - 5) // 2
    return _map(entries) + b"\x01\xc0" * entries


def _maps_of_one_key(size: int) -> bytes:
    inner = b"\xde\x03\xe8" + b"\x01\xc0" * 1000
    count = size // len(inner)
    return _array(count) + inner * count


BOMBS: dict[str, Callable[[int], bytes]] = {
    "numbers": lambda size: _array(size - 5) + bytes(size - 5),
    "maps": lambda size: _array(size - 5) + b"\x80" * (size - 5),
    "lists": lambda size: _array(size - 5) + b"\x90" * (size - 5),
    "texts": lambda size: _array((size - 5) // 2) + b"\xa1x" * ((size - 5) // 2),
    "lists of lists": _nested,
    "one map": _one_map,
    "maps of one key": _maps_of_one_key,
    "depth": lambda size: b"\x91" * 1000 + _array(size - 1005) + b"\x80" * (size - 1005),
    "never filled": lambda size: _array(size) * (size // 5),
    "too deep": lambda size: b"\x91" * size,
}
"""Functions that return a frame of about `size` bytes that decodes to many objects, or declares them."""


def bombs_of(header: int, size: int) -> list[bytes]:
    """Return one message per bomb, with the bomb as second element after `header`."""
    return [b"\x92" + pack(header) + bomb(size) for bomb in BOMBS.values()]
