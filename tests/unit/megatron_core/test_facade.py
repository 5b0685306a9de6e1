"""MegatronLLM and MegatronAsyncLLM: rejected arguments, prompts and answers, and every lifecycle call."""

import asyncio
import sys
import threading
import types

import pytest
from eventually import LONG_SECONDS
from own_children import own_children

from megatron_runtime.backends.text import ModelText
from megatron_runtime.in_process import builder
from megatron_runtime.megatron_core.apis import MegatronAsyncLLM, MegatronLLM, ServeConfig
from megatron_runtime.megatron_core.apis._llm_base import _CoordinatorRuntime, _MegatronLLMBase
from megatron_runtime.megatron_core.config import InferenceConfig
from megatron_runtime.megatron_core.inference_request import DynamicInferenceRequest, Status
from megatron_runtime.megatron_core.model_inference_wrappers.gpt.gpt_inference_wrapper import GPTInferenceWrapper
from megatron_runtime.models.config import UnsupportedModelError
from megatron_runtime.protocol.lifecycle import EngineState
from megatron_runtime.requests.errors import MaxSequenceLengthOverflowError
from megatron_runtime.transport.control_calls import ControlRejectedError

PROMPT = "The capital of France is"


class TestConstruction:
    @pytest.mark.parametrize("where", [{"coordinator_host": "127.0.0.1"}, {"coordinator_port": 5555}])
    def test_an_address_needs_a_coordinator(self, options, where) -> None:
        with pytest.raises(ValueError, match="coordinator_host/port require use_coordinator=True"):
            MegatronLLM(**options, **where)

    def test_the_async_class_needs_a_coordinator_by_default(self, options) -> None:
        with pytest.raises(ValueError, match="requires use_coordinator=True"):
            MegatronAsyncLLM(**options, use_coordinator=False)

    @pytest.mark.parametrize(
        ("given", "configured", "initialised"),
        [({"expert_model_parallel_size": 2}, None, None), ({}, 2, None), ({}, 1, 2), ({}, None, 2)],
        ids=["an argument", "the TransformerConfig", "a TransformerConfig of its default", "the parallel state"],
    )
    def test_direct_mode_has_no_expert_ranks(self, options, monkeypatch, given, configured, initialised) -> None:
        if configured is not None:
            config = types.SimpleNamespace(expert_model_parallel_size=configured)
            options["model"] = types.SimpleNamespace(config=config)
        if initialised is not None:
            sizes = {"tensor": 1, "pipeline": 1, "expert": initialised}
            state = {f"get_{name}_model_parallel_world_size": lambda size=size: size for name, size in sizes.items()}
            state["model_parallel_is_initialized"] = lambda: True
            monkeypatch.setitem(sys.modules, "megatron.core.parallel_state", types.SimpleNamespace(**state))
        with pytest.raises(ValueError, match=r"expert_model_parallel_size > 1 \(it is 2\) needs use_coordinator=True"):
            MegatronLLM(**options, **given)

    def test_an_unsupported_model_is_rejected_with_its_type(self, options) -> None:
        with pytest.raises(UnsupportedModelError, match=r"builtins\.dict"):
            MegatronLLM(**{**options, "model": {}})

    def test_an_unsupported_tokenizer_is_rejected_with_its_type(self, options) -> None:
        with pytest.raises(TypeError, match=r"tokenizer is builtins\.dict"):
            MegatronLLM(**{**options, "tokenizer": {}})

    def test_an_unsupported_setting_is_rejected(self, options) -> None:
        config = InferenceConfig(num_speculative_tokens=2, buffer_size_gb=0.02)
        with pytest.raises(ValueError, match="num_speculative_tokens=2"):
            MegatronLLM(**{**options, "inference_config": config})

    @pytest.mark.parametrize(("free_gb", "cache_gb"), [(4, 1), (1000, 20)])
    def test_the_default_configuration_fits_the_host(self, monkeypatch, free_gb, cache_gb) -> None:
        monkeypatch.setattr(builder, "available_bytes", lambda: free_gb << 30)
        assert builder.default_config().buffer_size_gb == cache_gb

    def test_the_controller_has_the_models_text(self, make, tokenizer) -> None:
        llm = make()
        ids = llm.controller.tokenize_prompt(PROMPT)
        assert (ids, llm.controller.detokenize(ids)) == (tokenizer.encode(PROMPT), tokenizer.decode(ids))
        assert llm.controller.tokenizer is llm.engine.controller.tokenizer
        llm.engine.suspend()
        assert llm.controller.inference_wrapped_model is None

    def test_a_custom_wrapper_class_runs_the_model(self, make, greedy) -> None:
        steps = []

        class Counting(GPTInferenceWrapper):
            def run_one_forward_step(self, plan, cache):
                steps.append(len(plan.token_ids))
                return super().run_one_forward_step(plan, cache)

        make(inference_wrapper_cls=Counting).generate([1, 2, 3], greedy(3))
        assert steps == [3, 1, 1]

    def test_a_port_in_use_fails_and_leaves_no_thread_or_process(self, make, options) -> None:
        first = make(use_coordinator=True)
        port = int(first._coord_runtime.coord_addr.rpartition(":")[2])
        threads, processes = set(threading.enumerate()), own_children()
        with pytest.raises(RuntimeError, match=f"{port} did not start"):
            MegatronLLM(**options, use_coordinator=True, coordinator_port=port)
        assert set(threading.enumerate()) <= threads
        assert own_children() <= processes  # an earlier one may have been reaped since


class TestPrompts:
    @pytest.mark.parametrize(
        ("prompts", "listed", "is_batch"),
        [
            ("abc", ["abc"], False),
            ([1, 2, 3], [[1, 2, 3]], False),
            (["abc", "def"], ["abc", "def"], True),
            ([[1, 2], [3, 4]], [[1, 2], [3, 4]], True),
            ([], [], True),
            (["abc", 1.5], ["abc", 1.5], True),  # only the first element is checked
        ],
    )
    def test_shapes(self, prompts, listed, is_batch) -> None:
        base = _MegatronLLMBase.__new__(_MegatronLLMBase)
        assert base._normalize_prompts(prompts) == (listed, is_batch)

    @pytest.mark.parametrize("prompts", [{"abc"}, 1.5, {"a": 1}, [1.5], None, (1, 2), [True]])
    def test_anything_else_is_a_type_error(self, prompts) -> None:
        base = _MegatronLLMBase.__new__(_MegatronLLMBase)
        with pytest.raises(TypeError, match="want str"):
            base._normalize_prompts(prompts)


class TestDirectMode:
    @pytest.fixture
    def llm(self, make) -> MegatronLLM:
        return make()

    def test_one_in_one_out_and_a_batch_in_its_order(self, llm, greedy, tokenizer) -> None:
        single = llm.generate(PROMPT, greedy())
        assert isinstance(single, DynamicInferenceRequest)
        assert (single.status, single.finish_reason) == (Status.COMPLETED, "length")
        assert single.generated_text == tokenizer.decode(single.generated_tokens)
        assert (single.prompt, list(single.prompt_tokens)) == (PROMPT, tokenizer.encode(PROMPT))
        assert isinstance(single.latency, float)
        prompts = [[number, 1, 2] for number in range(100)]
        batch = llm.generate(prompts, greedy(2))
        assert [request.prompt_tokens for request in batch] == prompts
        assert llm.generate(prompts[42], greedy(2)).generated_tokens == batch[42].generated_tokens
        assert llm.generate([]) == []

    @pytest.mark.parametrize("use_coordinator", [False, True])
    def test_one_object_of_parameters_serves_many_requests(self, make, greedy, use_coordinator) -> None:
        llm = make(use_coordinator=use_coordinator)
        params = greedy(3, return_log_probs=True)
        before = params.serialize()
        answers = llm.generate([[number, 1] for number in range(5)], params)
        assert params.serialize() == before
        assert [answer.generated_length for answer in answers] == [3] * 5
        own = [answer.sampling_params for answer in answers]
        assert len({id(one) for one in [params, *own]}) == 6
        assert all(one.num_tokens_to_generate == 3 for one in own)

    def test_more_prompts_than_may_wait(self, make, greedy) -> None:
        llm = make(inference_config=InferenceConfig(buffer_size_gb=0.02, max_waiting=4, max_requests=2))
        assert len(llm.generate([[1, 2]] * 30, greedy(2))) == 30

    @pytest.mark.parametrize("use_coordinator", [False, True])
    def test_bad_words_are_not_in_the_answer(self, make, greedy, tokenizer, use_coordinator) -> None:
        llm = make(use_coordinator=use_coordinator)
        whole = llm.generate(PROMPT, greedy(12)).generated_tokens
        words = [text for token in whole if (text := tokenizer.decode([token])).isalnum()]
        sequences = ModelText(tokenizer).bad_words(words, vocab_size=tokenizer.vocab_size)
        first = next(place for place, token in enumerate(whole) if (token,) in sequences)
        answer = llm.generate(PROMPT, greedy(12, bad_words=words)).generated_tokens
        assert answer[:first] == whole[:first]
        assert not {(token,) for token in answer} & set(sequences)

    def test_every_rank_is_primary_and_verbs_need_a_coordinator(self, llm) -> None:
        assert llm.is_primary_rank
        for verb in (llm.pause, llm.unpause, llm.suspend, llm.resume, lambda: llm.set_generation_epoch(1)):
            with pytest.raises(RuntimeError, match="use_coordinator=True"):
                verb()
        for bridge in (llm.submit, llm.run_sync):
            with pytest.raises(RuntimeError, match="use_coordinator=True"):
                bridge(asyncio.sleep(0))
        with pytest.raises(ValueError, match="use_coordinator=True"):
            llm.serve(ServeConfig())

    def test_shutdown_does_nothing_any_number_of_times(self, llm, greedy) -> None:
        llm.shutdown()
        llm.shutdown()
        llm.wait_for_shutdown()
        assert llm.generate([1], greedy(1)).generated_length == 1

    def test_an_overlong_prompt_is_a_failed_answer_among_others(self, llm, greedy) -> None:
        good, bad = llm.generate([[1, 2], [3] * 300], greedy(2))
        assert good.status is Status.COMPLETED
        assert bad.status is Status.FAILED
        assert bad.failed()
        assert "maximum context length is" in bad.error["message"]
        assert isinstance(bad.events[-1].payload, MaxSequenceLengthOverflowError)

    def test_stop_words_log_probs_and_segments(self, llm, greedy, tokenizer) -> None:
        whole = llm.generate(PROMPT, greedy(12))
        texts = [tokenizer.decode([token]) for token in whole.generated_tokens]
        params = greedy(12, return_log_probs=True, top_n_logprobs=2, return_segments=True)
        params.stop_words = [texts[5]]
        stopped = llm.generate(PROMPT, params)
        assert stopped.finish_reason == "stop"
        assert stopped.generated_text == whole.generated_text[: whole.generated_text.index(texts[5])]
        assert len(stopped.generated_log_probs) == len(stopped.generated_tokens) == len(stopped.generated_segments)
        for log_prob, likeliest in zip(stopped.generated_log_probs, stopped.generated_top_n_logprobs, strict=True):
            assert max(likeliest.values()) == pytest.approx(log_prob)

    def test_a_stream_is_the_answer(self, llm, greedy) -> None:
        whole = llm.generate(PROMPT, greedy(20))
        chunks = list(llm.generate_stream(PROMPT, greedy(20)))
        assert "".join(chunk.text for chunk in chunks) == whole.generated_text
        assert [token for chunk in chunks for token in chunk.token_ids] == whole.generated_tokens
        assert [chunk.request for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
        assert chunks[-1].request.generated_tokens == whole.generated_tokens

    def test_a_stream_closed_early_frees_the_engine(self, llm, greedy) -> None:
        stream = llm.generate_stream(PROMPT, greedy(200))
        next(stream)
        stream.close()
        assert not llm.engine.core.has_work
        assert llm.generate([1, 2], greedy(1)).status is Status.COMPLETED

    def test_calls_of_several_threads_are_serialised(self, llm, greedy) -> None:
        expected = llm.generate(PROMPT, greedy()).generated_tokens
        found: list[list[int]] = []
        threads = [
            threading.Thread(target=lambda: found.append(llm.generate(PROMPT, greedy()).generated_tokens))
            for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [expected] * 4

    def test_images_are_rejected(self, llm) -> None:
        with pytest.raises(ValueError, match="multi_modal_data"):
            llm.generate("x", None, multi_modal_data={"images": []})


class TestCoordinatorMode:
    @pytest.fixture
    def llm(self, make) -> MegatronLLM:
        return make(use_coordinator=True)

    def test_requests_streams_and_lifecycle_calls(self, llm, make, greedy) -> None:
        expected = make().generate(PROMPT, greedy(20))
        assert llm.is_primary_rank
        answer = llm.generate(PROMPT, greedy(20))
        assert (answer.generated_tokens, answer.generated_text) == (expected.generated_tokens, expected.generated_text)
        chunks = list(llm.generate_stream(PROMPT, greedy(20)))
        assert "".join(chunk.text for chunk in chunks) == expected.generated_text
        llm.pause()
        with pytest.raises(ControlRejectedError, match="PAUSED"):
            llm.resume()
        future = llm.submit(llm._generate_impl([PROMPT], greedy(20)))
        llm.suspend()
        assert not llm.engine.core.executor.has_weights
        llm.resume()
        assert not future.done()
        llm.unpause()
        assert future.result(timeout=LONG_SECONDS)[0].generated_tokens == expected.generated_tokens
        llm.set_generation_epoch(4)
        assert llm.generate(PROMPT, greedy(2)).policy_epoch[-1][1] == 4

    def test_closing_a_stream_aborts(self, llm, greedy) -> None:
        stream = llm.generate_stream(PROMPT, greedy(200))
        next(stream)
        stream.close()
        assert llm._coord_runtime.client.streams == {}

    def test_an_engine_that_serves_a_coordinator_rejects_direct_calls(self, llm, greedy) -> None:
        with pytest.raises(RuntimeError, match="serves a coordinator"):
            llm.engine.generate([[1]], greedy(1))

    def test_shutdown_stops_everything_wakes_waiters_and_is_idempotent(self, make) -> None:
        llm = make(use_coordinator=True)
        coordinator = llm.engine.coordinator
        waiting = threading.Thread(target=llm.wait_for_shutdown)
        waiting.start()
        thread = threading.Thread(target=llm.shutdown)
        thread.start()
        llm.shutdown()
        thread.join()
        waiting.join(timeout=LONG_SECONDS)
        assert not waiting.is_alive()
        assert coordinator.process.returncode is not None
        llm.wait_for_shutdown()
        with pytest.raises(RuntimeError, match="has been shut down"):
            llm.generate("x")

    def test_shutdown_while_suspended(self, make) -> None:
        llm = make(use_coordinator=True)
        llm.pause()
        llm.suspend()
        llm.shutdown()

    def test_shutdown_does_not_wait_for_a_dead_coordinator(self, make, monkeypatch) -> None:
        monkeypatch.setattr("megatron_runtime.in_process.lifecycle.SHUTDOWN_SECONDS", 0.2)
        monkeypatch.setattr("megatron_runtime.transport.control_calls.ANSWER_MARGIN_SECONDS", 0.2)
        llm = make(use_coordinator=True)
        llm.engine.coordinator.process.kill()
        llm.shutdown()

    def test_a_worker_rank_takes_no_prompts(self, make, options, monkeypatch, greedy) -> None:
        """The second rank of a pool, here in the same process: it finds the first one's coordinator by its port."""
        first = make(use_coordinator=True)
        port = int(first._coord_runtime.coord_addr.rpartition(":")[2])
        with monkeypatch.context() as patched:
            patched.setenv("RANK", "1")
            worker = MegatronLLM(**options, use_coordinator=True, coordinator_port=port)
            try:
                assert not worker.is_primary_rank
                assert worker._coord_runtime.client is None
                with pytest.raises(RuntimeError, match="primary rank"):
                    worker.generate("x")
                worker.serve(ServeConfig(), blocking=False)
                assert worker.url is None
                prompts = [[number] for number in range(8)]
                assert len(as_rank_0(lambda: first.generate(prompts, greedy(2)), patched)) == 8
                as_rank_0(first.pause, patched)
                worker.pause()
                assert worker.submit(state_of(worker)).result() is EngineState.PAUSED
                as_rank_0(first.unpause, patched)
                worker.unpause()
                waiting = threading.Thread(target=worker.wait_for_shutdown)
                waiting.start()
                as_rank_0(first.shutdown, patched)
                waiting.join(timeout=LONG_SECONDS)
                assert not waiting.is_alive()
            finally:
                worker.shutdown()


async def state_of(llm: MegatronLLM) -> EngineState:
    return llm.engine._service.worker.lifecycle.state


def as_rank_0(call, patched):
    patched.setenv("RANK", "0")
    try:
        return call()
    finally:
        patched.setenv("RANK", "1")


class TestAsync:
    async def test_concurrent_requests_streams_and_lifecycle_calls(self, make, make_async, greedy) -> None:
        expected = make().generate([[number, 2] for number in range(20)], greedy(4))
        async with make_async() as llm:
            answers = await asyncio.gather(*(llm.generate([number, 2], greedy(4)) for number in range(20)))
            assert [answer.generated_tokens for answer in answers] == [request.generated_tokens for request in expected]
            assert await llm.generate([]) == []
            chunks = [chunk async for chunk in llm.generate_stream([3, 2], greedy(4))]
            assert "".join(chunk.text for chunk in chunks) == expected[3].generated_text
            with pytest.raises(TypeError, match="takes one prompt"):
                await anext(llm.generate_stream([[3, 2], [1]], greedy(4)))
            early = llm.generate_stream(PROMPT, greedy(200))
            await anext(early)
            await early.aclose()
            assert llm._coord_runtime.client.streams == {}
            await llm.pause()
            await llm.suspend()
            await llm.resume()
            await llm.unpause()
            assert (await llm.generate([3, 2], greedy(4))).generated_tokens == expected[3].generated_tokens
            coordinator = llm.engine.coordinator
        assert coordinator.process.returncode is not None
        await llm.shutdown()
        await llm.wait_for_shutdown()

    async def test_cancelling_generate_aborts_the_request(self, make_async, greedy) -> None:
        async with make_async() as llm:
            await llm.pause()
            task = asyncio.create_task(llm.generate(PROMPT, greedy(100)))
            client = llm._coord_runtime.client
            async with asyncio.timeout(LONG_SECONDS):
                while not client.completion_futures:  # noqa: ASYNC110 - a table has no event
                    await asyncio.sleep(0.01)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            async with asyncio.timeout(LONG_SECONDS):
                while client.completion_futures:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)

    async def test_direct_mode_on_request(self, make, make_async, greedy) -> None:
        expected = make().generate(PROMPT, greedy())
        async with make_async(use_coordinator=False, allow_direct_mode=True) as llm:
            assert (await llm.generate(PROMPT, greedy())).generated_tokens == expected.generated_tokens
            chunks = [chunk async for chunk in llm.generate_stream(PROMPT, greedy())]
            assert "".join(chunk.text for chunk in chunks) == expected.generated_text
            early = llm.generate_stream(PROMPT, greedy(200))
            await anext(early)
            await early.aclose()
            assert not llm.engine.core.has_work
            with pytest.raises(RuntimeError, match="use_coordinator=True"):
                await llm.pause()
            with pytest.raises(ValueError, match="use_coordinator=True"):
                await llm.serve(ServeConfig())
            await llm.wait_for_shutdown()


class TestRuntime:
    class Engine:
        """Counts its starts and stops."""

        def __init__(self, error: Exception | None = None) -> None:
            self.error = error
            self.started: list[tuple] = []
            self.stopped = 0

        async def start_listening_to_data_parallel_coordinator(self, port, launch, **options) -> str:
            self.started.append((port, launch, sorted(options)))
            if self.error is not None:
                raise self.error
            return "tcp://127.0.0.1:1"

        async def stop_listening(self) -> None:
            self.stopped += 1

    async def test_a_failed_setup_is_torn_down(self, monkeypatch) -> None:
        async def reject(client) -> None:
            raise TimeoutError("unreachable")

        engine = self.Engine()
        monkeypatch.setattr("megatron_runtime.megatron_core.inference_client.InferenceClient.start", reject)
        runtime = _CoordinatorRuntime(engine, is_primary=True, coordinator_host=None, coordinator_port=None)
        with pytest.raises(TimeoutError, match="unreachable"):
            await runtime.setup(loop=asyncio.get_running_loop())
        assert engine.stopped == 1
        assert runtime.client is None
        await runtime.teardown()

    @pytest.mark.parametrize(("host", "more"), [(None, ["loop", "name"]), ("h", ["hostname", "loop", "name"])])
    async def test_only_given_arguments_are_passed_on(self, host, more) -> None:
        engine = self.Engine(ValueError("enough"))
        runtime = _CoordinatorRuntime(engine, is_primary=True, coordinator_host=host, coordinator_port=None)
        with pytest.raises(ValueError, match="enough"):
            await runtime.setup(loop=asyncio.get_running_loop())
        assert engine.started == [(None, True, more)]
