"""The coordinator's ROUTER and ZeroMQ's own sockets: messages, names, and the ends of connections."""

import asyncio
import errno
import random
import socket
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from eventually import LONG_SECONDS
from machine import scaled

from megatron_runtime.protocol.headers import Role
from megatron_runtime.transport.security import PeerKeys
from megatron_runtime.transport.zmtp import frames
from megatron_runtime.transport.zmtp.connection import MESSAGES_PER_ITERATION, PeerId
from megatron_runtime.transport.zmtp.frames import COMMAND

from .zmtp_port import LIMIT, NULL_BEGIN, Port, until

SIZES = [0, 1, 255, 256, 8192, 65536, LIMIT]


# --- messages ---------------------------------------------------------------------------------------------------------


async def test_messages_of_every_size_go_both_ways(either: Port) -> None:
    dealer = either.dealer()
    rng = random.Random(1)
    messages = [[rng.randbytes(size)] for size in SIZES]
    messages += [[rng.randbytes(rng.choice(SIZES[:-1])) for _ in range(count)] for count in (2, 3, 10)]
    for message in messages:
        await dealer.send_multipart(message)
        peer, found = await either.next()
        assert found == message
        assert either.send(peer, *message)
        assert await asyncio.wait_for(dealer.recv_multipart(), LONG_SECONDS) == message


async def test_however_the_bytes_are_cut_the_messages_are_the_same(port: Port) -> None:
    rng = random.Random(2)
    messages = [
        [rng.randbytes(rng.choice((0, 1, 7, 254, 255, 256, 5000))) for _ in range(rng.choice((1, 1, 1, 3)))]
        for _ in range(400)
    ]
    data = NULL_BEGIN + b"".join(map(frames.message, messages))
    raw = await port.raw(b"")
    begin = 0
    while begin < len(data):
        end = begin + rng.choice((1, 2, 3, 60, 64, 300, 20_000))
        raw.write(data[begin:end])
        begin = end
        await asyncio.sleep(0)
    assert [(await port.next())[1] for _ in messages] == messages


async def test_a_flood_arrives_complete_and_in_order_while_the_loop_runs_other_callbacks(port: Port) -> None:
    count = 20 * MESSAGES_PER_ITERATION
    done = asyncio.Event()
    found: list[int] = []

    def on_message(_peer: PeerId, message: list[bytes]) -> None:
        found.append(int(message[0]))
        if len(found) == count:
            done.set()

    port.on_message = on_message
    raw = await port.raw(NULL_BEGIN + b"".join(frames.frame(0, b"%d" % number) for number in range(count)))
    turns = 0
    while not done.is_set():
        turns += 1
        await asyncio.sleep(0)
    assert found == list(range(count))
    assert turns >= count / MESSAGES_PER_ITERATION / 2, "other callbacks of the loop run between budgets"
    raw.close()


async def test_a_handler_that_raises_loses_its_message_only(either: Port) -> None:
    def on_message(peer: PeerId, message: list[bytes]) -> None:
        if message[0] == b"bad":
            raise ValueError("bad message")
        either.received.put_nowait((peer, message))

    either.on_message = on_message
    dealer = either.dealer()
    for text in (b"bad", b"good"):
        await dealer.send(text)
    assert (await either.next())[1] == [b"good"]
    assert either.router.handler_errors == 1


async def test_a_message_at_the_limit_passes_and_one_beyond_ends_its_connection(either: Port) -> None:
    dealer, other = either.dealer(), either.dealer()
    await dealer.send(bytes(LIMIT))
    peer, message = await either.next()
    assert message == [bytes(LIMIT)]
    await dealer.send(bytes(LIMIT + 100))
    assert await asyncio.wait_for(either.gone.get(), LONG_SECONDS) == peer
    assert either.ended_by_peer == {peer: False}
    await other.send(b"still here")
    assert (await either.next())[1] == [b"still here"]


async def test_the_send_buffer_of_a_peer_that_does_not_read_is_bounded_and_reports_room_once(either: Port) -> None:
    dealer = either.dealer()
    dealer.setsockopt(zmq.RCVHWM, 1)
    await dealer.send(b"hello")
    peer, _ = await either.next()
    sent = 0
    for _ in range(10_000):
        if not either.send(peer, sent.to_bytes(4, "big") * 1000):
            break
        sent += 1
        if sent % 10 == 0:
            await asyncio.sleep(0.001)
    else:
        pytest.fail("40 MB fitted into a buffer of 64 KiB")
    for number in range(sent):
        assert (await asyncio.wait_for(dealer.recv(), LONG_SECONDS))[:4] == number.to_bytes(4, "big")
    assert await asyncio.wait_for(either.room.get(), LONG_SECONDS) == peer
    assert either.send(peer, b"again")
    assert await asyncio.wait_for(dealer.recv(), LONG_SECONDS) == b"again"
    assert either.room.empty()
    either.connections[peer].report_room()
    assert either.room.empty(), "the report comes within the call"
    assert await asyncio.wait_for(either.room.get(), LONG_SECONDS) == peer


async def test_a_connection_that_takes_the_name_of_a_full_one_reports_room(either: Port) -> None:
    first = either.dealer(routing_id=b"name")
    first.setsockopt(zmq.RCVHWM, 1)
    await first.send(b"hello")
    peer, _ = await either.next()
    while either.send(peer, bytes(4000)):  # noqa: ASYNC110 - until it is full
        await asyncio.sleep(0)
    assert either.room.empty()
    second = either.dealer(routing_id=b"name")
    await second.send(b"hello")
    assert await asyncio.wait_for(either.room.get(), LONG_SECONDS) == peer
    assert either.send(peer, b"to the second")
    assert await asyncio.wait_for(second.recv(), LONG_SECONDS) == b"to the second"


# --- connections ------------------------------------------------------------------------------------------------------


async def test_each_connection_has_a_name_of_its_own_or_the_one_it_brings(port: Port) -> None:
    nameless = [port.dealer() for _ in range(3)]
    named = port.dealer(routing_id=b"mp-coord-0")
    for dealer in (*nameless, named):
        await dealer.send(b"hello")
    peers = {(await port.next())[0] for _ in range(4)}
    assert (3, b"mp-coord-0") in peers
    assert len(peers) == 4


async def test_a_name_belongs_to_the_last_connection_that_registered_it(either: Port) -> None:
    first = either.dealer(routing_id=b"name")
    await first.send(b"first")
    peer, _ = await either.next()
    second = either.dealer(routing_id=b"name")
    await second.send(b"second")
    assert await either.next() == (peer, [b"second"])
    assert either.send(peer, b"to the second")
    assert await asyncio.wait_for(second.recv(), LONG_SECONDS) == b"to the second"
    assert await first.poll(50) == 0


async def test_unread_messages_end_with_their_connection_and_others_are_served(port: Port) -> None:
    """In one iteration of the loop the first of three connections ends and each has a message to send."""
    dealers = [port.dealer(routing_id=b"%d" % number) for number in range(3)]
    peers = []
    for dealer in dealers:
        await dealer.send(b"hello")
        peers.append((await port.next())[0])
    port.connections[peers[0]].abort()
    for peer in peers:
        port.send(peer, b"answer")
    for dealer in dealers[1:]:
        assert await asyncio.wait_for(dealer.recv(), LONG_SECONDS) == b"answer"
    assert await asyncio.wait_for(port.gone.get(), LONG_SECONDS) == peers[0]


async def test_a_name_is_not_given_to_another_key(make_port, keys: Path) -> None:
    (keys / "client.pub").write_text((keys / "client.pub").read_text() + "\n" + (keys / "engine.pub").read_text())
    port = make_port(keys=keys)
    owner = port.dealer(routing_id=b"name")
    await owner.send(b"mine")
    peer, _ = await port.next()
    thief = port.dealer(PeerKeys.load(keys, Role.ENGINE), routing_id=b"name")
    await thief.send(b"mine now")
    honest = port.dealer(PeerKeys.load(keys, Role.ENGINE))
    await honest.send(b"hello")
    assert (await port.next())[1] == [b"hello"]
    assert port.send(peer, b"to the owner")
    assert await asyncio.wait_for(owner.recv(), LONG_SECONDS) == b"to the owner"


async def test_the_connection_that_had_the_name_before_ends(port: Port) -> None:
    named = frames.command(b"READY", frames.properties([(b"Socket-Type", b"DEALER"), (b"Identity", b"name")]))
    raw = await port.raw(frames.greeting(b"NULL", as_server=False) + frames.frame(COMMAND, named))
    await until(lambda: port.connections)
    second = port.dealer(routing_id=b"name")
    await second.send(b"hello")
    assert await port.next() == ((3, b"name"), [b"hello"])
    await raw.end()
    assert len(port.connections) == 1
    assert port.gone.empty(), "the name is there as before"


@pytest.mark.parametrize("what", [[], [(b"Socket-Type", b"SUB")]], ids=["none", "SUB"])
async def test_a_socket_of_a_type_that_is_no_routers_partner_is_not_let_in(port: Port, what) -> None:
    ready = frames.frame(COMMAND, frames.command(b"READY", frames.properties(what)))
    raw = await port.raw(frames.greeting(b"NULL", as_server=False) + ready)
    await raw.end()
    assert port.connections == {}
    partner = await port.raw()
    await until(lambda: port.connections)
    partner.close()


async def test_a_lost_connection_is_reported_and_a_cut_one_delivers_nothing_more(either: Port) -> None:
    leaves, stays = either.dealer(), either.dealer()
    await leaves.send(b"leaves")
    left, _ = await either.next()
    await stays.send(b"stays")
    stayed, _ = await either.next()
    leaves.close(linger=0)
    assert await asyncio.wait_for(either.gone.get(), LONG_SECONDS) == left
    assert either.ended_by_peer == {left: True}
    either.router.cut(stayed)
    await stays.send(b"still there?")
    await asyncio.sleep(0.1)
    assert either.connections == {}
    assert either.received.empty()
    assert either.gone.empty()


@pytest.mark.slow
@pytest.mark.long
async def test_a_silent_connection_is_ended_and_one_that_answers_is_kept(make_port, keys: Path) -> None:
    async def check(**options: Path) -> None:
        port = make_port(check_seconds=scaled(1.5), **options)
        answers = port.dealer()
        await answers.send(b"hello")
        peer, _ = await port.next()
        if not options:
            silent = await port.raw()
            await silent.greeting()
            await silent.frame()
            assert await silent.frame() == (COMMAND, frames.PING)
            await silent.end()
            silent = await asyncio.wait_for(port.gone.get(), LONG_SECONDS)
            assert silent != peer
            assert port.ended_by_peer == {silent: False}
        await asyncio.sleep(scaled(3.5))  # a check, and the time for its answer
        assert list(port.connections) == [peer]

    await asyncio.gather(check(), check(keys=keys))


async def test_a_ping_is_answered_with_its_context(port: Port) -> None:
    raw = await port.raw(NULL_BEGIN + frames.frame(COMMAND, b"\x04PING\x00\x64context"))
    await raw.greeting()
    await raw.frame()
    assert await raw.frame() == (COMMAND, b"\x04PONGcontext")
    raw.close()


@pytest.mark.slow
async def test_pings_of_a_peer_that_does_not_read_are_answered_within_bounds(port: Port) -> None:
    raw = await port.raw()
    raw.pause()
    await until(lambda: port.connections)
    [connection] = port.connections.values()
    ping = frames.frame(COMMAND, b"\x04PING\x00\x00" + bytes(200))
    for _ in range(300):
        raw.write(ping * 1000)
        await asyncio.sleep(0)
    for _ in range(20):
        await asyncio.sleep(0.05)
        assert connection._transport.get_write_buffer_size() < 1 << 20
    raw.close()


async def test_sent_messages_leave_before_the_end_and_the_port_is_free_at_once(either: Port) -> None:
    dealer = either.dealer(reconnects=True)
    await dealer.send(b"hello")
    peer, _ = await either.next()
    assert either.send(peer, b"last message")
    either.router.close()
    number = int(either.address.rsplit(":", 1)[1])
    with socket.create_server(("127.0.0.1", number)):
        await either.router.closed()
    assert await asyncio.wait_for(dealer.recv(), LONG_SECONDS) == b"last message"


def has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as probe:
        return probe.connect_ex(("::1", 9)) in (0, errno.ECONNREFUSED)


async def test_ipv6_and_a_path_are_addresses_too(port: Port, tmp_path: Path) -> None:
    addresses = [port.router.bind_path(tmp_path / "router.sock")]
    if has_ipv6():
        addresses.append(port.router.bind("::1", 0))
    for address in addresses:
        dealer = port.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.IPV6, 1)
        dealer.connect(address)
        await dealer.send(address.encode())
        assert (await port.next())[1] == [address.encode()]
