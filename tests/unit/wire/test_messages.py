"""Messages survive the wire. What is no message is in test_hostile_frames.py."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from vectors import VECTORS

from megatron_runtime.protocol.adapters import Adapter, AdapterList
from megatron_runtime.protocol.headers import Header
from megatron_runtime.protocol.messages import (
    Dispatch,
    MalformedMessageError,
    Partial,
    PartialEntry,
    RequestMeta,
    Submit,
    decode,
    pack,
    tokens_from_bytes,
    tokens_to_bytes,
    unpack,
)

tokens = st.lists(st.integers(0, 2**31 - 1), max_size=50)
uids = st.binary(min_size=16, max_size=16)
u64 = st.integers(0, 2**64 - 1)
metas = st.builds(
    RequestMeta,
    st.booleans(),
    u64,
    st.none() | st.integers(0, 10**9),
    st.just(False),
    st.integers(-(2**31), 2**31),
    st.text(max_size=20),
    st.text(max_size=20),
    st.text(max_size=64),
    st.text(max_size=64),
    request_id=st.text(max_size=64),
    traceparent=st.text(max_size=64),
    needs=st.text(max_size=64),
)
bodies = st.binary(max_size=60)


@given(tokens)
def test_tokens_travel_as_little_endian_int32(values: list[int]) -> None:
    assert tokens_to_bytes(values) == np.array(values, dtype="<i4").tobytes()
    assert (
        tokens_to_bytes(tuple(values)) == tokens_to_bytes(np.array(values, dtype=np.int64)) == tokens_to_bytes(values)
    )
    assert tokens_from_bytes(tokens_to_bytes(values)).tolist() == values


@pytest.mark.parametrize("token", [1.5, "1", None, 1 << 31])
def test_a_value_that_is_no_token_is_rejected(token: object) -> None:
    with pytest.raises(ValueError, match="32 bits"):
        tokens_to_bytes([1, token])  # type: ignore[list-item]


@given(uids, metas, tokens, tokens, bodies)
def test_submit_round_trip(uid: bytes, meta: RequestMeta, prompt: list[int], held: list[int], params: bytes) -> None:
    message = Submit(uid, meta, tokens_to_bytes(prompt), tokens_to_bytes(held), params)
    assert decode(message.to_frames()) == message


@given(u64, uids, st.integers(0, 2**32 - 1), metas, tokens, tokens, bodies)
def test_dispatch_round_trip(
    dispatch_id: int, uid: bytes, route: int, meta: RequestMeta, prompt: list[int], held: list[int], params: bytes
) -> None:
    message = Dispatch(dispatch_id, uid, route, meta, tokens_to_bytes(prompt), tokens_to_bytes(held), params)
    assert decode(message.to_frames()) == message


@given(st.lists(st.tuples(uids, u64, st.integers(0, 1000), st.integers(0, 8)), max_size=70))
def test_partial_round_trip(fields: list[tuple[bytes, int, int, int]]) -> None:
    entries = [PartialEntry(*values) for values in fields]
    count = sum(entry.count for entry in entries)
    message = Partial(3, entries, tokens_to_bytes(range(count)))
    assert decode(message.to_frames()) == message


def test_a_partial_whose_index_and_tokens_disagree_is_rejected() -> None:
    frames = Partial(0, [PartialEntry(bytes(16), 1, 0, 2)], tokens_to_bytes([1])).to_frames()
    with pytest.raises(MalformedMessageError, match="its index says 8"):
        decode(frames)


def test_a_field_of_the_wrong_type_is_named() -> None:
    with pytest.raises(MalformedMessageError, match="field timeout_seconds"):
        decode([pack([int(Header.PAUSE), {"timeout_seconds": "soon"}])])


def test_unknown_keys_of_a_newer_peer_are_ignored() -> None:
    assert decode([pack([int(Header.STATUS), {"colour": "blue"}])]) == VECTORS["STATUS"]


def test_a_map_with_keys_that_cannot_be_keys_is_malformed() -> None:
    with pytest.raises(MalformedMessageError, match="not msgpack"):
        unpack(b"\x81\x90\x01")


def test_a_tenant_is_the_last_element_of_the_meta_and_may_be_absent() -> None:
    items = [True, 7, None, False, 0, "salt", "engine-0", "tenant"]
    assert RequestMeta.from_list(items).tenant == "tenant"
    for count in (4, 6, 7):
        meta = RequestMeta.from_list(items[:count])
        assert meta.tenant == ""
        assert "" not in meta.items()[6:], "what is empty at the end is not sent: older peers did not know it"
    assert len(RequestMeta(tenant="t").items()) == 8
    for wrong in ("x" * 65, b"t", None, 5):
        with pytest.raises(MalformedMessageError, match="tenant"):
            RequestMeta.from_list([*items[:7], wrong])


def test_the_id_and_the_trace_of_a_request_may_be_absent() -> None:
    trace = f"00-{'a' * 32}-{'b' * 16}-01"
    items = [True, 7, None, False, 0, "", "", "", "", "req-1", trace]
    meta = RequestMeta.from_list(items)
    assert (meta.request_id, meta.traceparent) == ("req-1", trace)
    assert list(meta.items()) == items
    assert RequestMeta.from_list(items[:9]).request_id == ""
    assert len(RequestMeta(request_id="req-1").items()) == 10
    for place, longest in ((9, 128), (10, 64)):
        for wrong in ("x" * (longest + 1), b"t", None, 5):
            with pytest.raises(MalformedMessageError, match="request_id, traceparent"):
                RequestMeta.from_list([*items[:place], wrong])


def test_the_session_ends_the_meta() -> None:
    items = [True, 7, None, False, 0, "", "", "", "", "", "", "", "s"]
    meta = RequestMeta.from_list(items)
    assert meta.session == "s"
    assert list(meta.items()) == items
    assert RequestMeta.from_list([*items, "of a later release"]) == meta
    assert RequestMeta.from_list(items[:12]).session == "", "of a peer of an earlier release"
    for wrong in ("x" * 65, b"t", None, 5):
        with pytest.raises(MalformedMessageError, match="session"):
            RequestMeta.from_list([*items[:12], wrong])


def test_needs_are_sent_only_if_there_are_some() -> None:
    items = [True, 7, None, False, 0, "", "", "", "", "", "", "HIGH_TEMPERATURE PRIORITY"]
    meta = RequestMeta.from_list(items)
    assert meta.needs == "HIGH_TEMPERATURE PRIORITY"
    assert list(meta.items()) == items
    assert RequestMeta.from_list(items[:11]).needs == "", "of a peer of an earlier release"
    assert len(RequestMeta(True, 7).items()) == 6
    for wrong in ("x" * 513, b"t", None, 5):
        with pytest.raises(MalformedMessageError, match="needs"):
            RequestMeta.from_list([*items[:11], wrong])


def test_an_adapter_follows_the_tenant_in_the_meta_and_may_be_absent() -> None:
    items = [True, 7, None, False, 0, "salt", "engine-0", "tenant", "sql"]
    assert RequestMeta.from_list(items).adapter == "sql"
    assert RequestMeta.from_list(items[:8]).adapter == ""
    assert RequestMeta(tenant="t", adapter="sql").items()[8] == "sql"
    for wrong in ("x" * 129, b"sql", None, 5):
        with pytest.raises(MalformedMessageError, match="adapter"):
            RequestMeta.from_list([*items[:8], wrong])


@pytest.mark.parametrize(
    ("adapters", "problem"),
    [
        ([{"name": "", "source": "/a"}], "use a letter or digit"),
        ([{"name": "a b", "source": "/a"}], "use a letter or digit"),
        ([{"name": "a" * 129, "source": "/a"}], "at most 128 characters"),
        ([{"name": "a", "source": ""}], "source '' of adapter 'a'"),
        ([{"name": "a", "source": "/" * 1025}], "at most 1024 characters"),
        ([{"name": "a"}], "adapters.0.source"),
        ([{"name": "a", "source": "/a"}, {"name": "a", "source": "/b"}], "'a' is listed twice"),
        ([{"name": f"a{i}", "source": "/a"} for i in range(65)], "65 adapters: use at most 64"),
        ("a", "adapters.adapters 'a'"),
    ],
)
def test_a_list_of_adapters_that_is_not_valid_is_malformed(adapters: object, problem: str) -> None:
    with pytest.raises(MalformedMessageError, match=problem):
        decode([pack([int(Header.SET_ADAPTERS), {"adapters": {"adapters": adapters}}])])


def test_unknown_keys_of_an_adapter_of_a_newer_peer_are_ignored() -> None:
    adapters = {"adapters": [{"name": "a", "source": "/a", "rank": 16}], "generation": 3, "colour": "blue"}
    message = decode([pack([int(Header.SET_ADAPTERS), {"adapters": adapters}])])
    assert message.adapters == AdapterList((Adapter("a", "/a"),), generation=3)  # type: ignore[union-attr]
