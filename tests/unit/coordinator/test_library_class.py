"""`DataParallelInferenceCoordinator` as a caller of Megatron's class knows it: names, routing, identities."""

import threading

import pytest
import zmq
from eventually import LONG_SECONDS

from megatron_runtime.megatron_core.data_parallel_inference_coordinator import DataParallelInferenceCoordinator
from megatron_runtime.protocol.headers import Header
from megatron_runtime.protocol.messages import pack, unpack
from megatron_runtime.requests.config import PrefixCachingCoordinatorPolicy

RANKS = [b"mp-coord-0", b"mp-coord-1", b"mp-coord-2"]
PARAMS = {"num_tokens_to_generate": 2}


class Letters:
    def tokenize(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]

    def detokenize(self, tokens: list[int]) -> str:
        return "".join(map(chr, tokens))


class Pool:
    """A coordinator on a thread of its own, and plain engines and clients that the test plays by hand."""

    def __init__(self, *, ranks: int = 3, **options) -> None:
        self.context = zmq.Context()
        self.coordinator = DataParallelInferenceCoordinator(None, 0, Letters(), **options)
        self.thread = threading.Thread(target=self.coordinator.start, daemon=True)
        self.thread.start()
        self.engines = {identity: self.connect(identity) for identity in RANKS[:ranks]}
        for number, engine in enumerate(self.engines.values(), start=1):
            engine.send(b"")
            self.until(lambda number=number: len(self.coordinator.identities_of_data_parallel_ranks) == number)

    def connect(self, identity: bytes) -> zmq.Socket:
        dealer = self.context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.IDENTITY, identity)
        dealer.setsockopt(zmq.RCVTIMEO, 10_000)
        dealer.connect(self.coordinator.address)
        return dealer

    def client(self) -> zmq.Socket:
        client = self.connect(b"client")
        client.send(pack([int(Header.CONNECT)]))
        assert unpack(client.recv()) == [Header.CONNECT_ACK]
        return client

    @staticmethod
    def until(condition) -> None:
        pause = threading.Event()
        for _ in range(2000):
            if condition():
                return
            pause.wait(0.005)
        raise AssertionError("the condition never held")

    def close(self) -> None:
        client = self.client()
        client.send(pack([int(Header.SHUTDOWN)]))
        self.thread.join(LONG_SECONDS)
        self.coordinator.stop()
        self.context.destroy(linger=0)


@pytest.fixture
def pool():
    pools = []

    def make(**options) -> Pool:
        pools.append(Pool(**options))
        return pools[-1]

    yield make
    for made in pools:
        made.close()


def test_engines_of_an_empty_frame_are_ranks_in_the_order_they_came(pool) -> None:
    coordinator = pool().coordinator
    assert list(coordinator.identities_of_data_parallel_ranks) == RANKS
    assert coordinator.router_socket.type == zmq.ROUTER
    assert coordinator.state is coordinator.CoordinatorState.RUNNING
    assert [state.name for state in coordinator.CoordinatorState][1:] == ["RUNNING", "PAUSED", "SUSPENDED", "STOPPING"]
    assert [coordinator.get_next_data_parallel_rank() for _ in range(4)] == [*RANKS, RANKS[0]]


def test_a_client_is_never_counted_as_an_engine(pool) -> None:
    ready = pool(ranks=1)
    ready.client()
    assert list(ready.coordinator.identities_of_data_parallel_ranks) == RANKS[:1]


@pytest.mark.parametrize("policy", [PrefixCachingCoordinatorPolicy.LONGEST_PREFIX, None], ids=["longest", "default"])
def test_the_best_rank_is_the_identity_of_the_rank_with_the_prefix(pool, policy) -> None:
    chosen = {"prefix_caching_coordinator_policy": policy} if policy is not None else {}
    coordinator = pool(block_size_tokens=2, enable_prefix_caching=True, **chosen).coordinator
    hashes = coordinator.compute_request_hashes("abcdef")
    assert hashes == coordinator.compute_request_hashes([97, 98, 99, 100, 101, 102])
    assert len(hashes) == 3, "of all blocks, whichever of them the policy uses"
    assert coordinator.compute_request_hashes("a") == []
    assert coordinator.get_best_data_parallel_rank(hashes) == RANKS[0]
    coordinator._update_rank_hashes(RANKS[2], hashes)
    assert coordinator.get_best_data_parallel_rank(hashes) == RANKS[2]
    coordinator._update_rank_hashes(RANKS[1], hashes)
    assert coordinator.get_best_data_parallel_rank(hashes) == RANKS[1]
    assert coordinator.get_best_data_parallel_rank([]) == RANKS[0]
    with pytest.raises(KeyError, match="no engine with identity"):
        coordinator._update_rank_hashes(b"unknown", hashes)


def test_the_best_rank_counts_every_hash_that_it_is_given(pool) -> None:
    """The policy of the first block limits what the coordinator itself looks up, as in Megatron-Core."""
    coordinator = pool(block_size_tokens=2, enable_prefix_caching=True).coordinator
    hashes = coordinator.compute_request_hashes("abcdef")
    coordinator._update_rank_hashes(RANKS[2], hashes)
    coordinator._update_rank_hashes(RANKS[1], hashes[:1])
    assert coordinator.get_best_data_parallel_rank(hashes) == RANKS[2]
    assert coordinator.get_best_data_parallel_rank(hashes[:1]) == RANKS[1]


@pytest.mark.parametrize("options", [{}, {"block_size_tokens": 2}, {"enable_prefix_caching": True}], ids=str)
def test_without_prefix_caching_there_are_no_hashes(pool, options) -> None:
    assert pool(ranks=1, **options).coordinator.compute_request_hashes("abcdef") == []


def test_ids_in_flight_point_to_their_client_and_plain_answers_carry_text(pool) -> None:
    ready = pool(ranks=1)
    coordinator, engine, client = ready.coordinator, ready.engines[RANKS[0]], ready.client()
    expected = coordinator.next_request_id
    client.send(pack([int(Header.SUBMIT_REQUEST), 5, "hi", PARAMS, None]))
    header, number, prompt, _ = unpack(engine.recv())
    assert (header, number, prompt) == (Header.SUBMIT_REQUEST, expected, "hi")
    ready.until(lambda: coordinator.request_id_to_client_id == {expected: b"client"})
    assert coordinator.request_id_to_client_request_id == {expected: 5}
    engine.send(pack([int(Header.ENGINE_REPLY), [{"request_id": number, "generated_tokens": [33, 33]}]]))
    header, number, reply = unpack(client.recv())
    assert (header, number, reply["generated_text"]) == (Header.ENGINE_REPLY, 5, "!!")
    assert coordinator.request_id_to_client_id == {}


def test_the_late_answer_of_a_plain_engine_that_left_is_delivered(pool) -> None:
    ready = pool(ranks=1)
    engine, client = ready.engines[RANKS[0]], ready.client()
    client.send(pack([int(Header.SUBMIT_REQUEST), 0, [1], PARAMS, None]))
    number = unpack(engine.recv())[1]
    engine.send(pack([int(Header.DISCONNECT)]))
    ready.until(lambda: not ready.coordinator.identities_of_data_parallel_ranks)
    reply = {"request_id": number, "generated_tokens": [7, 8], "status": "COMPLETED"}
    stranger = ready.connect(b"stranger")
    stranger.send(pack([int(Header.ENGINE_REPLY), [{**reply, "generated_tokens": [6]}]]))
    assert unpack(stranger.recv())[1]["message"] == "say HELLO"
    engine.send(pack([int(Header.ENGINE_REPLY), [reply]]))
    assert unpack(client.recv())[2]["generated_tokens"] == [7, 8]


def test_a_coordinator_outlives_its_engines(pool) -> None:
    ready = pool(ranks=1)
    engine, client = ready.engines[RANKS[0]], ready.client()
    for turn in range(3):
        client.send(pack([int(Header.SUBMIT_REQUEST), turn, [turn], PARAMS, None]))
        number = unpack(engine.recv())[1]
        reply = {"request_id": number, "generated_tokens": [turn], "status": "COMPLETED"}
        engine.send(pack([int(Header.ENGINE_REPLY), [reply]]))
        assert unpack(client.recv())[1] == turn
        engine.send(pack([int(Header.DISCONNECT)]))
        ready.until(lambda: not ready.coordinator.identities_of_data_parallel_ranks)
        engine.send(b"")
        ready.until(lambda: list(ready.coordinator.identities_of_data_parallel_ranks) == RANKS[:1])


def test_an_engine_that_cannot_be_reached_is_removed() -> None:
    coordinator = DataParallelInferenceCoordinator(None, 0, None)
    with zmq.Context() as context:
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.IDENTITY, RANKS[0])
        dealer.connect(coordinator.address)
        dealer.send(b"")
        coordinator._runner.run(coordinator._coordinator.wait_for_engines(1))
        assert coordinator._send_to_engine(RANKS[0], b"payload") is True
        assert dealer.recv() == b"payload"
        coordinator._remove_engine(RANKS[0])
        with pytest.raises(KeyError):
            coordinator._send_to_engine(RANKS[0], b"payload")
        dealer.close(linger=0)
    coordinator.stop()


def test_a_number_of_requests_is_not_taken_for_the_port() -> None:
    """Later releases have `max_requests` where the documents have the port."""
    with pytest.raises(ValueError, match=r"inference_coordinator_port 64: .* max_requests=64 by keyword"):
        DataParallelInferenceCoordinator(None, 0, Letters(), 64)
    with pytest.raises(ValueError, match="max_requests 0"):
        DataParallelInferenceCoordinator(None, 0, Letters(), max_requests=0)


def test_a_rank_is_given_max_requests_at_once(pool) -> None:
    made = pool(ranks=1, max_requests=1, hostname="127.0.0.1")
    client, rank = made.client(), made.engines[RANKS[0]]
    for number in range(2):
        client.send(pack([int(Header.SUBMIT_REQUEST), number, [1], PARAMS]))
    first = unpack(rank.recv())
    made.until(lambda: made.coordinator._core.status().queued == 1)
    assert len(made.coordinator.request_id_to_client_id) == 1
    rank.send(
        pack([int(Header.ENGINE_REPLY), [{"request_id": first[1], "generated_tokens": [5], "status": "COMPLETED"}]])
    )
    assert unpack(client.recv())[1] == 0
    assert unpack(rank.recv())[0] == Header.SUBMIT_REQUEST


def test_the_text_of_a_finished_request_is_put_in_place() -> None:
    coordinator = DataParallelInferenceCoordinator(None, 0, Letters())
    finished = {"generated_tokens": [104, 105]}
    coordinator.detokenize(finished)
    coordinator.stop()
    assert finished["generated_text"] == "hi"
