"""The addresses of a coordinator or of a pair."""

from __future__ import annotations

import pytest

from megatron_runtime.transport.addresses import CoordinatorAddresses

FIRST, OTHER = "tcp://10.0.0.1:5555", "tcp://10.0.0.2:5555"


def tried(addresses: CoordinatorAddresses, count: int) -> list[str]:
    found = []
    for _ in range(count):
        found.append(addresses.current)
        addresses.move_on()
    return found


def test_the_addresses_of_a_pair_alternate() -> None:
    assert tried(CoordinatorAddresses(FIRST, OTHER, learns=False), 3) == [FIRST, OTHER, FIRST]
    assert tried(CoordinatorAddresses(FIRST), 2) == [FIRST, FIRST]


@pytest.mark.parametrize(("host", "address"), [("10.0.0.2", OTHER), ("fd00::2", "tcp://[fd00::2]:5555")])
def test_the_other_coordinator_is_learned_by_its_host_and_forgotten(host: str, address: str) -> None:
    addresses = CoordinatorAddresses(FIRST)
    addresses.learn(host)
    assert len(addresses) == 2
    addresses.move_on()
    assert addresses.current == address
    addresses.learn(None)
    assert tried(addresses, 3) == [address, FIRST, address], "the one in use and the first one stay"


def test_addresses_that_are_all_there_are_stay_as_they_are() -> None:
    addresses = CoordinatorAddresses(FIRST, learns=False)
    addresses.learn("10.0.0.2")
    assert len(addresses) == 1
