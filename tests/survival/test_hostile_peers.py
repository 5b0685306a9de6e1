"""A flood of broken frames, and frames that decode to many objects, from clients, engines and unknown peers: the
coordinator keeps serving other clients.
"""

import asyncio
import contextlib
import random
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
import zmq
from eventually import LONG_SECONDS, eventually
from fleet import Fleet, Load, until_status
from hostile_frames import HostileFrames, bombs_of, control_frames
from libzmq_keys import set_keys
from soak import FIRST_SEED, part, size

from megatron_runtime.protocol.headers import SIGNALS, ErrorCode, Header, Role
from megatron_runtime.protocol.messages import Error, Hello, StatusReply, decode, pack
from megatron_runtime.transport.security import KeyPair, PeerKeys

BURST = 1000
BURSTS = part(range(size(4, soak=1000)))
FRAMES = BURST * len(BURSTS)
BROKEN = FRAMES * 0.8
"""More frames are rejected: most are broken, the others are requests."""
STREAMS_PER_BURST = 20
OVERSIZED = {Role.CLIENT: (8 << 20) + 1, Role.ENGINE: (64 << 20) + 1}
MAX_GROWTH_BYTES = 256 << 20
LOOKS = 10
"""The coordinator has read all frames when it has rejected most, and the count stays the same for this many queries."""


class Attackers:
    """DEALER sockets. read() discards the answers: ZeroMQ closes a connection whose peer reads nothing, heartbeats
    included, and then sends nothing more on it.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._context = zmq.Context()
        self._sockets: list[zmq.Socket] = []
        self.ports = {Role.CLIENT: fleet.client_port, Role.ENGINE: fleet.engine_port, Role.ADMIN: fleet.admin_port}

    def connect(self, port: Role, keys: PeerKeys | None) -> zmq.Socket:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.SNDHWM, 0)
        socket.setsockopt(zmq.RCVHWM, 0)
        socket.setsockopt(zmq.LINGER, 0)
        self._sockets.append(socket)
        if keys is not None:
            set_keys(socket, keys)
        socket.connect(f"tcp://127.0.0.1:{self.ports[port]}")
        return socket

    def registered(self, role: Role) -> zmq.Socket:
        socket = self.connect(role, self._fleet.keys(role))
        socket.send_multipart(Hello(role=role, name=f"attacker-{role.name}", incarnation=1).to_frames())
        return socket

    def read(self) -> None:
        for socket in self._sockets:
            while socket.poll(0):
                socket.recv_multipart()

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def attackers(fleet: Fleet) -> Iterator[Attackers]:
    attackers = Attackers(fleet)
    yield attackers
    attackers.close()


@pytest.mark.timeout(3600)
async def test_a_flood_of_broken_frames_affects_no_other_client(
    fleet: Fleet, attackers: Attackers, report: Callable[[str], None]
) -> None:
    coordinator, link = await fleet.serve(1, "--max-requests", "400", "--kv-cache-memory", "16Mi")
    client = await fleet.client()
    sockets = [attackers.registered(role) for role in (Role.CLIENT, Role.ENGINE)]
    sockets += [attackers.connect(role, fleet.keys(role)) for role in (Role.CLIENT, Role.ENGINE)]
    rng = random.Random(f"{FIRST_SEED} {BURSTS[0]}")
    source = HostileFrames(rng)
    memory = psutil.Process(coordinator.pid).memory_info
    start = maximum = memory().rss
    for turn, burst in enumerate(BURSTS):
        load = Load([client])
        for number in range(STREAMS_PER_BURST):
            load.add([burst, number], 6)
        for number in range(BURST):
            rng.choice(sockets).send_multipart(source.next())
            if number % 50 == 0:
                attackers.read()
                await asyncio.sleep(0)
        if turn % 50 == 0:
            for role, length in OVERSIZED.items():
                attackers.connect(role, fleet.keys(role)).send(bytes(length))
        await load.check()
        maximum = max(maximum, memory().rss)
    counts: list[int] = []

    def all_were_read(status: StatusReply) -> bool:
        attackers.read()
        counts.append(status.rejected_frames)
        return counts[-1] > BROKEN and len(counts) > LOOKS and counts[-1] == counts[-LOOKS]

    status = await until_status(link, all_were_read, seconds=3 * LONG_SECONDS, what="every frame was read")
    maximum = max(maximum, memory().rss)
    assert (status.state, status.epoch, status.fence) == ("RUNNING", 0, 0)
    growth = maximum - start
    report(
        f"{FRAMES} frames, {status.rejected_frames} rejected; coordinator grew by {growth / (1 << 20):.1f} MiB at most"
    )
    assert growth < MAX_GROWTH_BYTES
    assert coordinator.running


async def test_unauthorized_control_is_rejected_and_counted(fleet: Fleet, attackers: Attackers) -> None:
    coordinator, link = await fleet.serve(1)
    before = (await link.status()).rejected_frames
    unknown = PeerKeys(KeyPair.generate(), fleet.keys(Role.ADMIN).server_public)
    outside = [
        attackers.connect(Role.ADMIN, None),
        attackers.connect(Role.ADMIN, unknown),
        attackers.connect(Role.ADMIN, fleet.keys(Role.CLIENT)),
        attackers.connect(Role.ADMIN, fleet.keys(Role.ENGINE)),
    ]
    inside = [attackers.registered(role) for role in (Role.CLIENT, Role.ENGINE)]
    for kind in sorted(SIGNALS):
        for socket in inside:
            socket.send_multipart(control_frames(kind))
        for socket in outside:
            # A rejected socket has no connection and would block.
            with contextlib.suppress(zmq.Again):
                socket.send_multipart(control_frames(kind), zmq.NOBLOCK)

    async def counted() -> bool:
        counts = await coordinator.metrics()
        return counts["megatron_coordinator_rejected_frames_total{wrong_role}"] >= len(inside) * len(SIGNALS)

    await eventually(counted, what="verbs on the wrong port are counted")
    # Three of the outside sockets present a key that the admin port does not know.
    wanted = before + len(inside) * len(SIGNALS) + 3
    status = await until_status(link, lambda status: status.rejected_frames >= wanted, what="rejected keys are counted")
    assert (status.state, status.fence) == ("RUNNING", 0)
    assert [engine.state for engine in status.engines if engine.name == "engine-0"] == ["RUNNING"]


BOMB_BYTES = {Role.CLIENT: (8 << 20) - 100, Role.ENGINE: size(16, soak=64) * (1 << 20) - 100}
MEMORY_BYTES = 192 << 20
"""For the largest message that a port takes, the buffer it arrives in, and what it becomes within its limits."""
STALL_FACTOR = 15
"""Of what this machine takes to read a control message of the most elements and to answer a STATUS."""


@pytest.mark.parametrize("role", [Role.CLIENT, Role.ENGINE])
async def test_a_bomb_of_any_kind_neither_fills_nor_holds_up_the_coordinator(
    fleet: Fleet, attackers: Attackers, report: Callable[[str], None], role: Role
) -> None:
    """A frame of 8 MiB held it up for seconds, and took 620 MiB."""
    coordinator = await fleet.coordinator()
    link = await fleet.admin()
    reference = pack([int(Header.STATUS), {"x": [0] * 65_000}])
    undisturbed = []
    for _ in range(30):
        begun = time.process_time()
        decode([reference])
        undisturbed.append(time.process_time() - begun)
        await link.status(timeout_seconds=LONG_SECONDS)
    longest_allowed = 1.0 + STALL_FACTOR * max(undisturbed)

    def cpu_seconds() -> float:
        """Return the coordinator's own time, which other programs of the machine do not lengthen."""
        return sum(psutil.Process(coordinator.pid).cpu_times()[:2])

    memory = psutil.Process(coordinator.pid).memory_info
    idle = memory().rss
    attacker = attackers.connect(role, fleet.keys(role))
    frames = [
        frame
        for header in (Header.SUBMIT, Header.HELLO, Header.SUBMIT_REQUEST)
        for frame in bombs_of(int(header), BOMB_BYTES[role])
    ]
    stalls, peak = [], 0
    for frame in frames:
        attacker.send(frame)
        answered = False
        while not answered:
            answered = bool(attacker.poll(0))
            begun = cpu_seconds()
            await link.status(timeout_seconds=LONG_SECONDS)
            stalls.append(cpu_seconds() - begun)
            peak = max(peak, memory().rss - idle)
        error = decode(attacker.recv_multipart())
        assert isinstance(error, Error)
        assert error.code in (ErrorCode.MALFORMED, ErrorCode.UNKNOWN_PEER)
    report(
        f"longest stall {max(stalls):.3f} s of CPU time, {longest_allowed:.3f} s allowed; {peak >> 20} MiB more at most"
    )
    assert max(stalls) < longest_allowed
    assert peak < MEMORY_BYTES
    assert coordinator.running
