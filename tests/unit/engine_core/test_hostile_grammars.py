"""No grammar ends an engine or holds up its other requests: real engine processes, and engines stepped by hand."""

import asyncio
import json
import os
import resource
import signal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from echo_executor import EchoExecutor, echo_answer
from eventually import LONG_SECONDS, eventually
from fleet import Fleet, Process, until_serving
from hostile_grammars import REJECTED_BY_TEXT, REJECTED_BY_TRIAL, ambiguous, chained_references, multiples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from soak import SOAK, size

from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.backends.text import GrammarQueue, ModelText
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.megatron_core.inference_client import InferenceClient
from megatron_runtime.requests.config import InferenceConfig
from megatron_runtime.requests.sampling_params import InvalidSamplingParamsError, SamplingParams
from megatron_runtime.sampling import structured_output
from megatron_runtime.sampling.answer_guide import AnswerGuide, BeginGrammar
from megatron_runtime.sampling.answer_parts import AnswerParts
from megatron_runtime.sampling.batch import AnswerState
from megatron_runtime.sampling.grammar_compiler import COMPILE_SECONDS
from megatron_runtime.sampling.structured_output import GrammarCompiler, GrammarState
from megatron_runtime.tokenization import Tokenizer, load_tokenizer

pytestmark = pytest.mark.slow

DIGITS = {"type": "regex", "value": "[0-9]{4}"}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return load_tokenizer("builtin:smollm2-135m", renders_chat=False)


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> Iterator[GrammarCompiler]:
    compiler = GrammarCompiler(tokenizer, vocab_size=tokenizer.vocab_size)
    yield compiler
    compiler.close()


# --- an engine process ------------------------------------------------------------------------------------------------


class Served:
    """A coordinator and one echo engine, each a process, and a client."""

    def __init__(self, engine: Process, client: InferenceClient, tokenizer: Tokenizer) -> None:
        self.engine = engine
        self.client = client
        self._tokenizer = tokenizer

    async def ask(self, structure: dict[str, Any] | None, *, length: int = 8) -> dict[str, Any]:
        params = SamplingParams(temperature=0.0, num_tokens_to_generate=length, structured_output=structure)
        return await asyncio.wait_for(self.client.add_request([1, 2, 3], params), LONG_SECONDS)

    async def check(self) -> None:
        """The engine is the process that it was, and answers with and without a grammar."""
        plain, digits = await asyncio.gather(self.ask(None), self.ask(DIGITS))
        assert plain["generated_tokens"] == echo_answer([1, 2, 3], 8)
        assert self._tokenizer.decode(digits["generated_tokens"]).isdecimal()
        assert self.engine.running

    def trial_pid(self) -> int:
        """Of the process that tries the engine's grammars."""
        found = [
            int(entry.name)
            for entry in Path("/proc").iterdir()
            if entry.name.isdecimal() and is_trial_of(entry, parent=self.engine.pid)
        ]
        assert len(found) == 1, f"processes that try grammars: {found}"
        return found[0]


def is_trial_of(entry: Path, *, parent: int) -> bool:
    try:
        command = (entry / "cmdline").read_bytes().split(b"\0")
        ppid = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError):
        return False
    return b"megatron_runtime.sampling.grammar_compiler" in command and ppid == parent


@pytest.fixture
async def served(tmp_path: Path, tokenizer: Tokenizer) -> AsyncIterator[Served]:
    fleet = Fleet(tmp_path)
    try:
        await fleet.coordinator()
        engine = await fleet.engine("engine-0")
        client = await fleet.client()
        await until_serving(await fleet.admin(), ["engine-0"])
        yield Served(engine, client, tokenizer)
    finally:
        await fleet.close()


async def test_hostile_grammars_are_answered_with_an_error_and_end_no_engine(served: Served) -> None:
    streams = [asyncio.ensure_future(served.ask(None, length=200)) for _ in range(4)]
    for name, structure in REJECTED_BY_TEXT.items():
        error = (await served.ask(structure))["error"]
        assert (error["code"], error["field"]) == (400, "structured_output"), name
    for name, (structure, words) in REJECTED_BY_TRIAL.items():
        error = (await served.ask(structure))["error"]
        assert (error["code"], error["field"]) == (400, "structured_output"), name
        assert "too complex" in error["message"], error
        assert words in error["message"], error
        await served.check()
    assert (await served.ask({"type": "choice", "value": ["yes"]}))["status"] == "COMPLETED"
    before = served.trial_pid()
    for structure, _ in REJECTED_BY_TRIAL.values():
        assert (await served.ask(structure))["error"]["code"] == 400
    assert served.trial_pid() == before, "a repeated grammar costs no process"
    for answer in await asyncio.gather(*streams):
        assert answer["generated_tokens"] == echo_answer([1, 2, 3], 200)
    await served.check()
    served.engine.process.send_signal(signal.SIGTERM)
    assert await served.engine.ended() == 0
    assert not is_alive(before), "an engine that leaves ends the process first"


async def test_a_trial_process_that_is_killed_fails_one_request_and_leaves_with_its_engine(served: Served) -> None:
    await served.check()
    pid = served.trial_pid()
    before = cpu_seconds(pid)
    slow = asyncio.ensure_future(served.ask(multiples(299)))

    async def is_compiling() -> bool:
        return cpu_seconds(pid) > before + 0.1 or slow.done()

    await eventually(is_compiling, what="the trial process compiles", look_seconds=0.01)
    await served.check()
    assert not slow.done(), "others are answered while a grammar is compiled"
    os.kill(pid, signal.SIGKILL)
    assert "SIGKILL" in (await slow)["error"]["message"]
    assert (await slow)["error"]["code"] == 400
    assert (await served.ask({"type": "choice", "value": ["yes"]}))["status"] == "COMPLETED"
    await served.check()
    pid = served.trial_pid()
    await served.engine.kill()

    async def is_gone() -> bool:
        return not is_alive(pid)

    await eventually(is_gone, what="the end of the trial process of a killed engine")


def is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# --- an engine stepped by hand ----------------------------------------------------------------------------------------


class HeldMasks:
    """Computes masks on a thread once they are released."""

    def __init__(self) -> None:
        self.released = threading.Event()
        self._thread = ThreadPoolExecutor(1)

    def submit(self, tenant: str, call: Callable[[], Any]) -> Future[Any]:
        def held() -> Any:
            self.released.wait(LONG_SECONDS)
            return call()

        return self._thread.submit(held)


def test_a_slow_mask_delays_its_own_request_alone(
    compiler: GrammarCompiler, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    masks = HeldMasks()
    monkeypatch.setattr(compiler, "_masks", masks)
    engine = EngineCore(EchoExecutor(page_size=4, num_pages=200), InferenceConfig(max_requests=4))
    engine.executor.load()
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=50)
    constrained = SamplingParams(temperature=0.0, num_tokens_to_generate=50, structured_output=DIGITS)
    prompt, nothing = np.array([1, 2, 3], np.int32), np.empty(0, np.int32)
    engine.add_request(EngineRequest(0, prompt, nothing, constrained), grammar=compiler.begin(DIGITS))
    engine.add_request(EngineRequest(1, prompt, nothing, params))
    answers: dict[int, list[int]] = {0: [], 1: []}

    def step() -> None:
        for output in engine.step():
            assert output.error is None
            answers[output.request_id] += output.new_tokens

    while len(answers[1]) < 50:
        step()
    assert len(answers[0]) == 1, "the first mask was there; the next one is held"
    step()
    assert engine.has_work
    masks.released.set()
    while engine.has_work:
        step()
    assert answers[1] == echo_answer([1, 2, 3], 50)
    assert tokenizer.decode(answers[0]).isdecimal()
    assert len(tokenizer.decode(answers[0])) == 4
    engine.check_integrity()


def test_a_grammar_that_takes_too_much_time_fails_its_request_alone(
    compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(structured_output, "MASK_SECONDS", 0.01)
    monkeypatch.setattr(structured_output, "MASK_SECONDS_PER_TOKEN", 0.0)
    engine = EngineCore(EchoExecutor(page_size=4, num_pages=200), InferenceConfig(max_requests=4))
    engine.executor.load()
    prompt, nothing = np.array([1, 2, 3], np.int32), np.empty(0, np.int32)
    structure = ambiguous(20)
    params = SamplingParams(temperature=0.0, num_tokens_to_generate=50, structured_output=structure)
    engine.add_request(EngineRequest(0, prompt, nothing, params), grammar=compiler.begin(structure))
    engine.add_request(EngineRequest(1, prompt, nothing, SamplingParams(temperature=0.0, num_tokens_to_generate=50)))
    answer: list[int] = []
    errors = {}
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                errors[output.request_id] = output.error, output.error_code
            elif output.request_id == 1:
                answer += output.new_tokens
    assert list(errors) == [0]
    assert "CPU time" in errors[0][0] or "Too many items" in errors[0][0]
    assert errors[0][1] == 400
    assert answer == echo_answer([1, 2, 3], 50)


@pytest.mark.parametrize(
    "structure",
    [
        {"type": "json_schema", "value": {"const": b"bytes"}},
        {"type": "json_schema", "value": {1: {2: None}, "type": None}},
        {"type": "regex", "value": "\ud800"},
        {"type": "grammar", "value": "start: \0"},
    ],
)
def test_values_that_are_no_text_are_an_error(compiler: GrammarCompiler, structure: dict[str, Any]) -> None:
    assert compiler.is_known(structure) in (True, False)
    with pytest.raises(InvalidSamplingParamsError, match="structured_output"):
        compiler.begin(structure)


def test_answers_nested_thousands_deep_are_followed(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    """The matcher does not recurse along the answer: not even on a thread with a small stack."""
    (opening,) = tokenizer.encode("(", add_special=False)
    (closing,) = tokenizer.encode(")", add_special=False)
    (inner,) = tokenizer.encode("x", add_special=False)
    found: list[Any] = []

    def run() -> None:
        tokens = [*[opening] * 3000, inner, *[closing] * 2999]
        state = compiler.begin({"type": "grammar", "value": 'start: "(" start ")" | "x"'}, tokens)
        state.accept(closing)
        found.append((state.failure, state.is_complete))

    before = threading.stack_size(256 << 10)
    try:
        thread = threading.Thread(target=run)
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    assert found == [(None, True)]


def test_a_grammar_holds_from_the_tokens_that_it_follows(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    after = tokenizer.encode("</think>", add_special=False)
    structure = {"type": "regex", "value": "[0-9]{2}", "after": after}
    digits, words = tokenizer.encode("42", add_special=False), tokenizer.encode("One thought", add_special=False)

    def after_tokens(tokens: Sequence[int]) -> AnswerState:
        parts = AnswerParts(SamplingParams(structured_output=structure), token_bytes=tokenizer.token_bytes)
        parts.feed_all(tokens)
        of_structure = tokens[parts.free :] if parts.structure is not None else []
        return AnswerGuide(parts, rest=of_structure, grammar=compiler.begin(structure, of_structure))

    state = after_tokens([])
    for token in [*words, *after[:-1]]:
        assert state.allowed() is None
        state.accept(token)
    state.accept(after[-1])
    mask = state.allowed()
    assert mask is not None
    assert mask[digits[0] // 32] >> (digits[0] % 32) & 1
    assert not mask[words[0] // 32] >> (words[0] % 32) & 1
    moved = after_tokens([*words, *after, *digits])
    assert (moved.is_complete, moved.failure) == (True, None)
    with pytest.raises(InvalidSamplingParamsError, match="structured_output"):
        SamplingParams(structured_output={**structure, "after": []})


def test_a_grammar_is_compiled_on_a_stack_of_its_own(compiler: GrammarCompiler) -> None:
    """Whatever stack the calling thread has: this grammar needs more than 256 KiB."""
    found: list[GrammarState] = []
    before = threading.stack_size(256 << 10)
    try:
        thread = threading.Thread(target=lambda: found.append(compiler.begin(chained_references(45, arrays=2))))
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join()
    assert found[0].failure is None


# --- random grammars --------------------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(codec="utf-8"), max_size=8)
NUMBERS = st.integers(0, 12) | st.sampled_from([9999, 10_000, 1 << 31, 1 << 63, 1 << 70, -1])
EXPRESSIONS = st.recursive(
    st.sampled_from(["a", "[a-z]", ".", r"\d", r"\p{L}", "^", "$", "(?i)x", r"\b", "[^\\n]", "é", "\\"]) | TEXTS,
    lambda inner: st.one_of(
        st.tuples(inner, inner).map("".join),
        st.tuples(inner, inner).map("|".join),
        inner.map("({})".format),
        st.tuples(inner, NUMBERS, NUMBERS).map(lambda parts: "({}){{{},{}}}".format(*parts)),
        st.tuples(inner, st.sampled_from("*+?")).map(lambda parts: "({}){}".format(*parts)),
    ),
    max_leaves=12,
)
NAMES = st.sampled_from(["start", "a", "b", "c", "A", "B", "%ignore", "_x"])
BODIES = st.recursive(
    NAMES | TEXTS.map(json.dumps) | EXPRESSIONS.map("/{}/".format),
    lambda inner: st.one_of(
        st.tuples(inner, inner).map(" ".join),
        st.tuples(inner, inner).map(" | ".join),
        inner.map("({})".format),
        inner.map("[{}]".format),
        st.tuples(inner, st.sampled_from(["*", "+", "?", "{2,5}", "{10000}", "~3"])).map(lambda p: "({}){}".format(*p)),
    ),
    max_leaves=10,
)
GRAMMARS = st.lists(st.tuples(NAMES, BODIES), min_size=1, max_size=8).map(
    lambda rules: "\n".join(f"{name}: {body}" for name, body in [("start", "a b*"), *rules])
)
SCHEMAS = st.recursive(
    st.sampled_from(
        [{}, {"type": "integer"}, {"type": "string"}, {"$ref": "#"}, {"$ref": "#/$defs/a"}, {"const": None}]
    )
    | st.fixed_dictionaries({"type": st.just("string")}, optional={"pattern": EXPRESSIONS, "maxLength": NUMBERS})
    | st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number"])},
        optional={"minimum": NUMBERS, "maximum": NUMBERS, "multipleOf": NUMBERS | st.floats(allow_nan=False)},
    )
    | st.fixed_dictionaries({"enum": st.lists(TEXTS | st.integers() | st.none(), max_size=4)}),
    lambda inner: st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("array")}, optional={"items": inner, "minItems": NUMBERS, "maxItems": NUMBERS}
        ),
        st.fixed_dictionaries(
            {"type": st.just("object")},
            optional={
                "properties": st.dictionaries(TEXTS, inner, max_size=4),
                "additionalProperties": inner | st.booleans(),
                "patternProperties": st.dictionaries(EXPRESSIONS, inner, max_size=2),
                "required": st.lists(TEXTS, max_size=2),
                "minProperties": NUMBERS,
            },
        ),
        st.tuples(st.sampled_from(["anyOf", "oneOf", "allOf"]), st.lists(inner, max_size=4)).map(
            lambda p: {p[0]: p[1]}
        ),
        st.fixed_dictionaries(
            {"$defs": st.dictionaries(st.sampled_from(["a", "b"]), inner), "allOf": st.tuples(inner)}
        ),
        inner.map(lambda schema: {"not": schema}),
    ),
    max_leaves=12,
)
STRUCTURES = st.one_of(
    st.builds(lambda value: {"type": "regex", "value": value}, EXPRESSIONS.filter(bool)),
    st.builds(lambda value: {"type": "grammar", "value": value}, GRAMMARS),
    st.builds(lambda value: {"type": "json_schema", "value": value}, SCHEMAS),
    st.builds(lambda value: {"type": "choice", "value": value}, st.lists(TEXTS.filter(bool), min_size=1, max_size=6)),
)
LONGEST_BEGIN_SECONDS = 20 * 2 * COMPILE_SECONDS
"""Tried, then compiled, on a host twenty times slower than usual."""

MAX_GROWTH = 1 << 30


@settings(
    max_examples=size(25, soak=20_000),
    derandomize=not SOAK,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(structure=STRUCTURES, choices=st.lists(st.integers(0, 1 << 20), max_size=12))
def test_random_grammars_give_masks_or_an_error(
    compiler: GrammarCompiler, structure: dict[str, Any], choices: list[int]
) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.monotonic()
    try:
        SamplingParams(structured_output=structure)
        state = compiler.begin(structure)
    except InvalidSamplingParamsError:
        return
    assert time.monotonic() - started < LONGEST_BEGIN_SECONDS
    for choice in choices:
        allowed = state.allowed()
        if state.is_complete or allowed is None:
            break
        tokens = np.flatnonzero(np.unpackbits(allowed.view(np.uint8), bitorder="little"))
        if not len(tokens):
            break
        state.accept(int(tokens[choice % len(tokens)]))
    assert (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024 < MAX_GROWTH


# --- waiting for a grammar --------------------------------------------------------------------------------------------


class HeldText(ModelText):
    """Compiles no grammar, but waits in `first` until it is released. Known grammars are those called "known"."""

    def __init__(self) -> None:
        super().__init__(lambda: load_tokenizer("builtin:smollm2-135m", renders_chat=False))
        self.begun: list[str] = []
        self.compiling, self.release = threading.Event(), threading.Event()

    def begin_grammar(
        self,
        params: SamplingParams,
        generated: Sequence[int] = (),
        *,
        tenant: str = "",
        begin_calls: BeginGrammar | None = None,
    ) -> AnswerState | None:
        name = params.structured_output["value"]
        self.begun.append(name)
        self.compiling.set()
        if name == "first":
            self.release.wait(LONG_SECONDS)
        return None

    def is_grammar_known(self, params: SamplingParams) -> bool:
        return params.structured_output["value"] == "known"


def constrained(request_id: int, value: str, *, tenant: str = "", deadline: float | None = None) -> EngineRequest:
    nothing = np.empty(0, np.int32)
    params = SamplingParams(structured_output={"type": "regex", "value": value})
    return EngineRequest(
        request_id, nothing, nothing, params, tenant=tenant, has_tenant=bool(tenant), deadline_seconds=deadline
    )


async def test_requests_that_wait_for_a_grammar_can_be_dropped_and_meet_their_deadlines() -> None:
    text = HeldText()
    queue = GrammarQueue(text)
    done: dict[str, BaseException | None] = {}

    def add(name: str, *, deadline: float | None = None) -> None:
        request = constrained(hash(name), name, deadline=deadline)
        queue.add(request, on_done=lambda task: done.update({name: task.exception()}))

    def are_done(*names: str) -> Callable[[], Any]:
        async def check() -> bool:
            return set(names) <= set(done)

        return check

    add("first")
    await asyncio.to_thread(text.compiling.wait, LONG_SECONDS)
    add("second")
    add("dropped")
    add("overdue", deadline=0.01)
    add("known")
    await asyncio.sleep(0)
    queue.drop(hash("dropped"))
    await eventually(are_done("overdue", "known"), what="what need not wait", look_seconds=0.01)
    assert isinstance(done["overdue"], TimeoutError)
    assert text.begun == ["first", "known"]
    text.release.set()
    await eventually(are_done("first", "second"), what="the rest", look_seconds=0.01)
    assert text.begun == ["first", "known", "second"]
    assert done == {"first": None, "second": None, "overdue": done["overdue"], "known": None}
    queue.close()


async def test_grammars_of_tenants_are_compiled_round_robin() -> None:
    """Thirty grammars of one tenant wait; each of the others is the next but one. Clients without a tenant share."""
    text = HeldText()
    queue = GrammarQueue(text)
    first = asyncio.create_task(queue.begin(constrained(0, "first", tenant="a")))
    await asyncio.to_thread(text.compiling.wait, LONG_SECONDS)
    tasks = [asyncio.create_task(queue.begin(constrained(n, f"a{n}", tenant="a"))) for n in range(1, 30)]
    tasks += [asyncio.create_task(queue.begin(constrained(n, f"b{n}", tenant="b"))) for n in range(30, 32)]
    tasks.append(asyncio.create_task(queue.begin(constrained(32, "c32"))))
    await asyncio.sleep(0)
    text.release.set()
    await asyncio.gather(first, *tasks)
    assert text.begun[:8] == ["first", "b30", "c32", "a1", "b31", "a2", "a3", "a4"]
    queue.close()


def test_the_memory_of_kept_grammars_is_bounded(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured_output, "_KEPT", 3)
    for number in range(8):
        compiler.begin({"type": "regex", "value": f"x{{{number + 1}}}"})
    assert len(compiler._compiled) == 3
    monkeypatch.setattr(structured_output, "_REJECTED", 3)
    for number in range(8):
        with pytest.raises(InvalidSamplingParamsError, match="structured_output"):
            compiler.begin({"type": "regex", "value": f"(x{{{number + 1}}}"})
    assert len(compiler._rejected) == 3


def test_a_rejection_is_forgotten_after_a_while(compiler: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process may have been killed by hand, or for want of memory, while it tried a good grammar."""
    structure = {"type": "regex", "value": "good[a-z]"}
    with monkeypatch.context() as patch:
        patch.setattr(structured_output, "try_grammar", _lost)
        with pytest.raises(InvalidSamplingParamsError, match="too complex"):
            compiler.begin(structure)
    with pytest.raises(InvalidSamplingParamsError, match="too complex"):
        compiler.begin(structure)
    later = time.monotonic() + 2 * structured_output._REJECTED_SECONDS
    monkeypatch.setattr(structured_output.time, "monotonic", lambda: later)
    assert compiler.begin(structure).failure is None


def _lost(*_: Any) -> tuple[int, Any]:
    raise structured_output.ProcessLostError("it was killed by signal SIGKILL")
