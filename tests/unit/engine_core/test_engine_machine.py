"""Whatever happens to an engine, answers are those of an undisturbed one, and nothing leaks.

A model-based test on the echo executor, whose answer depends on every token read back from the cache.
"""

import numpy as np
import pytest
from echo_executor import EchoExecutor, echo_answer, echo_weights
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from soak import size

from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.engine.engine_request import EngineRequest, RequestOutput
from megatron_runtime.protocol.headers import ErrorCode
from megatron_runtime.requests.config import InferenceConfig, KVCacheManagementMode, PrefixCachingEvictionPolicy
from megatron_runtime.requests.sampling_params import SamplingParams

PAGE, BLOCK = 4, 8
STEMS = [list(range(1, 41)), list(range(1, 17)) + [77] * 24]
"""Prompts begin with a part of one of these, so that they share blocks, some of them but for the end."""


class Machine(RuleBasedStateMachine):
    """expected: the whole answer of each request; answers: what came; forced: what each was given at the start."""

    @initialize(
        pages=st.integers(26, 60),
        max_tokens=st.integers(8, 40),
        max_requests=st.integers(1, 6),
        mode=st.sampled_from(KVCacheManagementMode),
        policy=st.sampled_from(PrefixCachingEvictionPolicy),
        caching=st.booleans(),
        chunked=st.booleans(),
    )
    def start(self, pages: int, max_tokens: int, max_requests: int, mode, policy, caching: bool, chunked: bool) -> None:
        self.executor = EchoExecutor(page_size=PAGE, num_pages=pages, max_sequence_length=96)
        self.executor.load()
        self.now = 0.0
        self.engine = EngineCore(
            self.executor,
            InferenceConfig(
                max_requests=max_requests,
                max_tokens=max_tokens if chunked else 64,
                enable_chunked_prefill=chunked,
                enable_prefix_caching=caching,
                prefix_caching_eviction_policy=policy,
                block_size_tokens=BLOCK,
                kv_cache_management_mode=mode,
            ),
            clock=lambda: self.now,
        )
        self.mode = mode
        self.suspended = False
        self.expected: dict[int, list[int]] = {}
        self.answers: dict[int, list[int]] = {}
        self.deadlines: dict[int, float] = {}
        self.ended: set[int] = set()
        self.findable: set[bytes] = set()

    @rule(
        stem=st.sampled_from(STEMS),
        shared=st.integers(0, 40),
        tail=st.lists(st.integers(1, 99), min_size=1, max_size=8),
        length=st.integers(1, 30),
        already=st.integers(0, 30),
        priority=st.integers(0, 2),
        salt=st.sampled_from([None, None, "tenant"]),
        seconds=st.sampled_from([None, None, 3.0]),
        tenant=st.sampled_from(["", "", "a", "b"]),
    )
    def add(self, stem, shared, tail, length, already, priority, salt, seconds, tenant) -> None:
        """A request, perhaps one that another engine began."""
        prompt = stem[:shared] + tail
        answer = echo_answer(prompt, length)
        number = len(self.expected)
        params = SamplingParams(temperature=0, num_tokens_to_generate=length, priority=priority, cache_salt=salt)
        forced = np.array(answer[:already], np.int32)
        self.engine.add_request(
            EngineRequest(number, np.array(prompt, np.int32), forced, params, deadline_seconds=seconds, tenant=tenant)
        )
        self.expected[number] = answer
        self.answers[number] = answer[:already]
        if seconds is not None:
            self.deadlines[number] = self.now + seconds

    @precondition(lambda self: not self.suspended)
    @rule(steps=st.integers(1, 6))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            for output in self.engine.step():
                self.take(output)
            self.engine.check_integrity()

    def take(self, output: RequestOutput) -> None:
        number = output.request_id
        assert number not in self.ended
        self.answers[number] += output.new_tokens
        assert self.answers[number] == self.expected[number][: len(self.answers[number])]
        if output.finish_reason is None:
            return
        self.ended.add(number)
        if output.finish_reason == "error":
            assert output.error_code is ErrorCode.DEADLINE
            assert self.now >= self.deadlines[number]
        else:
            assert output.finish_reason == "length"
            assert self.answers[number] == self.expected[number]

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule(pick=st.integers(0, 1000))
    def abort(self, pick: int) -> None:
        still_open = sorted(set(self.expected) - self.ended)
        if still_open:
            number = still_open[pick % len(still_open)]
            assert self.engine.abort_request(number)
            assert not self.engine.abort_request(number)
            self.ended.add(number)

    @precondition(lambda self: not self.suspended)
    @rule(tags=st.sampled_from([{"weights", "kv_cache"}, {"weights"}, {"kv_cache"}]))
    def suspend(self, tags: set[str]) -> None:
        self.engine.suspend(tags)
        self.suspended = True
        if self.mode is KVCacheManagementMode.RECOMPUTE and "kv_cache" in tags:
            assert self.engine.context.usage == 0
            assert not len(self.engine.context.prefix_cache)

    @precondition(lambda self: self.suspended)
    @rule()
    def resume(self) -> None:
        self.engine.resume()
        self.suspended = False

    @precondition(lambda self: not self.suspended)
    @rule(epoch=st.integers(1, 9))
    def update_to_equal_weights(self, epoch: int) -> None:
        self.executor.stage_weights("echo")
        self.engine.swap_weights(epoch)
        assert not len(self.engine.context.prefix_cache)

    @rule(epoch=st.integers(1, 9))
    def label_epoch(self, epoch: int) -> None:
        self.engine.set_epoch(epoch)

    @invariant()
    def books_agree(self) -> None:
        if not hasattr(self, "engine"):
            return
        self.engine.check_integrity()
        events = self.engine.take_block_events()
        if events.cleared:
            self.findable.clear()
        self.findable = (self.findable - set(events.evicted)) | set(events.stored)
        assert len(self.findable) == len(self.engine.context.prefix_cache)

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        if self.suspended:
            self.resume()
        for _ in range(3000):
            if not self.engine.has_work:
                break
            self.step(1)
        assert self.ended == set(self.expected)
        assert self.engine.context.usage == 0


TestEngine = Machine.TestCase
TestEngine.settings = settings(max_examples=size(15, soak=2000), stateful_step_count=40)


@pytest.mark.parametrize("mode", KVCacheManagementMode)
def test_kv_of_old_weights_is_not_used_after_an_update(mode: KVCacheManagementMode) -> None:
    executor = EchoExecutor(page_size=PAGE, num_pages=60)
    executor.load()
    config = InferenceConfig(
        enable_prefix_caching=True,
        block_size_tokens=BLOCK,
        prefix_caching_eviction_policy=PrefixCachingEvictionPolicy.LRU,
        kv_cache_management_mode=mode,
    )
    engine = EngineCore(executor, config)
    prompt = list(range(1, 21))
    params = SamplingParams(temperature=0, num_tokens_to_generate=10)
    engine.add_request(EngineRequest(0, np.array(prompt), np.array([], np.int32), params))
    begun = [token for _ in range(4) for output in engine.step() for token in output.new_tokens]
    executor.stage_weights("other")
    engine.swap_weights(5)
    engine.add_request(EngineRequest(1, np.array(prompt), np.array([], np.int32), params))
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    weights = echo_weights("other")
    rest = [token for output in outputs if output.request_id == 0 for token in output.new_tokens]
    assert begun == echo_answer(prompt, 4)
    assert rest == echo_answer(prompt + begun, 6, weights=weights)
    other = [token for output in outputs if output.request_id == 1 for token in output.new_tokens]
    assert other == echo_answer(prompt, 10, weights=weights)
    last = {output.request_id: output for output in outputs if output.finish_reason}
    assert last[1].num_cached_tokens in (0, 16)
    spans = last[0].summary
    assert spans is not None
    assert spans.policy_epoch == [(0, 0), (len(prompt) + 3, 5)]
    assert spans.kv_cache_epoch == [(0, 5)]
