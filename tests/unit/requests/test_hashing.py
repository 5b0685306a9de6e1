"""Block hashes: both forms against values computed from their definitions, and their properties."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_runtime.protocol.media import MediaItem, media_digest, media_of_blocks
from megatron_runtime.protocol.messages import tokens_to_bytes
from megatron_runtime.requests.hashing import (
    HASH_BASE,
    HASH_PRIME,
    HashForm,
    block_digests,
    block_hashes,
    digests_after,
    frame_hashes,
    hash_of_digest,
    root_digest,
)

TOKENS = st.lists(st.integers(0, 2**62), max_size=40)


def wrap(value: int) -> int:
    """As a signed 64-bit integer."""
    return (value + 2**63) % 2**64 - 2**63


def polynomial(tokens: list[int], size: int) -> list[int]:
    hashes, parent = [], 0
    for start in range(0, len(tokens) - size + 1, size):
        total = 0
        for position in range(size):
            weight = wrap(HASH_BASE**position) % HASH_PRIME
            total = wrap(total + wrap(tokens[start + position] * weight))
        parent = (parent * HASH_BASE + total % HASH_PRIME) % HASH_PRIME + 1
        hashes.append(parent)
    return hashes


def sha256(tokens: list[int], size: int, seed: bytes = bytes(32)) -> list[int]:
    hashes, digest = [], seed
    for start in range(0, len(tokens) - size + 1, size):
        block = b"".join(token.to_bytes(8, "little", signed=True) for token in tokens[start : start + size])
        digest = hashlib.sha256(digest + block).digest()
        hashes.append(int.from_bytes(digest[:8], "little") % (2**63 - 1) + 1)
    return hashes


def test_vectors() -> None:
    """Test vectors for other implementations: 1 + 2*31 + 3*31**2 + 4*31**3 + 1 is 122111."""
    tokens = list(range(1, 9))
    assert block_hashes(tokens, 4, form=HashForm.POLYNOMIAL) == [122_111, 4_030_688]
    assert block_hashes(tokens, 4) == [2_169_646_968_702_219_264, 1_548_982_756_790_257_953]
    assert block_hashes(tokens, 4, salt=b"tenant a") == [4_837_619_589_109_308_795, 3_254_703_758_531_083_260]
    assert frame_hashes(tokens_to_bytes(tokens), 4, adapter="sql@1") == [
        5_692_183_559_612_814_371,
        9_019_037_889_110_113_973,
    ]


def test_media_are_part_of_the_blocks_that_have_their_tokens() -> None:
    tokens, cat, dog = list(range(1, 13)), media_digest("image", b"cat"), media_digest("image", b"dog")
    shown = [MediaItem("image", cat, 2, 5, b""), MediaItem("image", dog, 7, 1, b"")]
    expected, digest = [], bytes(32)
    for start, media in ((0, cat), (4, cat + dog), (8, b"")):
        block = b"".join(token.to_bytes(8, "little") for token in tokens[start : start + 4])
        digest = hashlib.sha256(digest + block + media).digest()
        expected.append(hash_of_digest(digest))
    assert frame_hashes(tokens_to_bytes(tokens), 4, media=media_of_blocks(shown, 4)) == expected
    later = [MediaItem("image", cat, 9, 2, b"")]
    plain = frame_hashes(tokens_to_bytes(tokens), 4)
    assert frame_hashes(tokens_to_bytes(tokens), 4, media=media_of_blocks(later, 4))[:2] == plain[:2]


@given(TOKENS, st.integers(1, 20))
def test_both_forms_match_their_definition(tokens, size) -> None:
    assert block_hashes(tokens, size, form=HashForm.POLYNOMIAL) == polynomial(tokens, size)
    assert block_hashes(tokens, size) == sha256(tokens, size)


@given(st.lists(st.integers(0, 2**31 - 1), max_size=40), st.integers(1, 20), st.text(max_size=3), st.text(max_size=3))
def test_hashes_of_encoded_tokens_equal_those_of_the_engine(tokens, size, salt, adapter) -> None:
    assert frame_hashes(tokens_to_bytes(tokens), size, salt=salt) == block_hashes(tokens, size, salt=salt.encode())
    digests = block_digests(tokens, size, salt=salt.encode(), adapter=adapter)
    assert frame_hashes(tokens_to_bytes(tokens), size, salt=salt, adapter=adapter) == list(map(hash_of_digest, digests))


@given(TOKENS, st.integers(1, 20), st.sampled_from(HashForm))
def test_one_positive_hash_for_each_complete_block(tokens, size, form) -> None:
    hashes = block_hashes(tokens, size, form=form)
    assert len(hashes) == len(tokens) // size
    assert all(0 < value < 2**63 for value in hashes)


@pytest.mark.parametrize("form", HashForm)
def test_a_hash_covers_all_blocks_before_it(form) -> None:
    tokens = list(range(32))
    changed = [99, *tokens[1:]]
    original = block_hashes(tokens, 8, form=form)
    assert all(a != b for a, b in zip(original, block_hashes(changed, 8, form=form), strict=True))
    assert block_hashes([*tokens[:31], 5], 8, form=form)[:3] == original[:3]


def test_a_salt_separates_tenants() -> None:
    tokens = list(range(16))
    root = hashlib.sha256(b"megatron prefix cache: root, v1\0" + bytes([1, *bytes(7)]) + b"a")
    assert block_hashes(tokens, 8, salt=b"a") == sha256(tokens, 8, root.digest())
    assert not set(block_hashes(tokens, 8, salt=b"a")) & set(block_hashes(tokens, 8, salt=b"b"))
    with pytest.raises(ValueError, match="takes no salt"):
        block_hashes(tokens, 8, salt=b"a", form=HashForm.POLYNOMIAL)


@given(st.text(max_size=8), st.sampled_from(["", "sql@1"]), st.lists(st.integers(0, 127), min_size=8, max_size=8))
def test_no_salt_or_adapter_is_a_block_of_another_chain(salt, adapter, tokens) -> None:
    """A salt can hold what a block of any chain hashes: the digest before it, and its tokens."""
    for chain in (bytes(32), root_digest(salt.encode(), adapter)):
        first, second = digests_after(chain, tokens, 4)
        block = np.array(tokens[:4], "<i8").tobytes()
        assert root_digest(chain + block) != first
        assert block_digests(tokens[4:], 4, salt=chain + block) != [second]
    # As text, which is what a request has.
    assert (
        frame_hashes(tokens_to_bytes(tokens[4:]), 4, salt=(bytes(32) + block).decode()) != block_hashes(tokens, 4)[1:]
    )
    adapted = root_digest(salt.encode(), "sql@1")
    before, name = root_digest(salt.encode()), np.frombuffer(hashlib.sha256(b"sql@1").digest(), "<i8")
    assert digests_after(before, name, 4) != [adapted]


def test_salts_and_adapters_do_not_run_together() -> None:
    pairs = [(b"", "ab"), (b"a", "b"), (b"ab", ""), (b"", ""), (b"ab", "ab")]
    assert len({root_digest(*pair) for pair in pairs}) == len(pairs)


def test_a_block_size_below_one_is_rejected() -> None:
    with pytest.raises(ValueError, match="block_size 0"):
        block_hashes([1], 0)
