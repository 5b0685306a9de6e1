"""Epochs of tokens: however an answer is cut into messages and dispatches, each token keeps its own."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_runtime.protocol import limits
from megatron_runtime.protocol.codec import MalformedMessageError
from megatron_runtime.protocol.epochs import add_epochs, continued_epochs, epochs_from_bytes, epochs_to_bytes

per_token = st.lists(st.sampled_from([0, 3, 4, limits.MAX_EPOCH]), max_size=20)


def spans_of(epochs: list[int]) -> list[tuple[int, int]]:
    return [(at, epoch) for at, epoch in enumerate(epochs) if at == 0 or epochs[at - 1] != epoch]


@given(per_token, st.data())
def test_messages_of_any_length_bring_the_epoch_of_each_token(epochs: list[int], data: st.DataObject) -> None:
    before, received, first = [9] * data.draw(st.integers(0, 3)), [], 0
    add_epochs(received, spans_of(before), first=0, count=len(before), at=0)
    while first < len(epochs):
        count = data.draw(st.integers(0, len(epochs) - first))
        count = count or 1
        message: list[tuple[int, int]] = []
        add_epochs(message, spans_of(epochs), first=first, count=count, at=0)
        assert message == spans_of(epochs[first : first + count])
        add_epochs(received, epochs_from_bytes(epochs_to_bytes(message)), first=0, count=count, at=len(before) + first)
        first += count
    assert received == spans_of(before + epochs)


@given(st.integers(1, 5), per_token.filter(bool), st.lists(st.sampled_from([0, 4, 5]), min_size=1, max_size=9))
def test_an_answer_that_another_engine_continues_names_the_epoch_of_each_token(
    prompt: int, earlier: list[int], later: list[int]
) -> None:
    begun = [later[0]] * (prompt + len(earlier) - 1)  # as an engine labels an answer that it began
    spans = continued_epochs(
        spans_of(earlier), spans_of(begun + later), prompt_length=prompt, num_generated=len(earlier)
    )
    for number, epoch in enumerate(earlier + later):
        assert [one for position, one in spans if position < prompt + number][-1] == epoch
    assert spans[0][0] == 0


def test_an_answer_whose_earlier_epochs_are_unknown_has_those_of_its_engine() -> None:
    assert continued_epochs((), [(0, 4)], prompt_length=3, num_generated=2) == [(0, 4)]


@pytest.mark.parametrize(
    "data",
    [b"\0" * 11, [[0, 1]], None, epochs_to_bytes([(0, limits.MAX_EPOCH + 1)]), epochs_to_bytes([(3, 1), (3, 2)])],
)
def test_epochs_that_are_none_are_rejected(data: object) -> None:
    with pytest.raises(MalformedMessageError, match="epochs of tokens"):
        epochs_from_bytes(data)
