"""The gain of each switch of a compiled step: one engine, whose steps alternate between the settings.

    python bench/step_switches.py --json step_switches.json

All settings read the same weights in the same memory, so that differences between two processes do not affect the
figures. The exception is MEGATRON_LARGE_PAGES, which changes that memory. In each round every setting computes one
step, in random order. A gain is (time without) / (time with) of a round: the median over the rounds, and the quartiles.
`the same again` is another decoder of the usual setting: its difference from 1 is the noise of a gain.
`--tuning query_block=16` measures another value of a size instead of the switches.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from statistics import median, quantiles

import click
import numpy as np

from megatron_kernels.cpu.memory import PAGES_THREAD
from megatron_kernels.cpu.switches import OF_A_STEP, Switch
from megatron_kernels.cpu.tuning import TUNING_VARIABLE
from megatron_runtime.backends.native.backend import NativeBackend
from megatron_runtime.backends.native.build import build_native
from megatron_runtime.backends.native.cpu.executor import CpuExecutor
from megatron_runtime.backends.native.engine import EngineCore
from megatron_runtime.cli.bench.report import machine
from megatron_runtime.engine.engine_request import EngineRequest
from megatron_runtime.engine.settings import EngineSettings
from megatron_runtime.models.native_decoder import NativeDecoder
from megatron_runtime.sampling_params import IGNORE_EOS, SamplingParams

_USUAL, _CONTROL = "usual", "the same again"
_PROMPT = 64
_LONG_PROMPT = 512
_BATCHES = (1, 8, 32)
_SEQUENCE = 1024
_SWITCHES = (Switch.LARGE_PAGES, *OF_A_STEP)
_HELP = {"show_default": True}
Gains = dict[str, list[float]]
"""By setting: the median, and the two quartiles."""


class Engine:
    """An engine that computes each step with a given setting. settings: environment variables by name."""

    def __init__(self, model: str, dtype: str, threads: int, settings: Mapping[str, Mapping[str, str]]) -> None:
        built = _load(model, dtype, threads)
        self._engine: EngineCore = built.core
        assert isinstance(built.core.executor, CpuExecutor)
        self._executor = built.core.executor
        self._models: dict[str, NativeDecoder] = {}
        for name, environment in settings.items():
            with _environment(environment):
                # The pages of weights are chosen when they are loaded. All other settings share the loaded weights.
                found = built if Switch.LARGE_PAGES.value not in environment else _load(model, dtype, threads)
                decoder = _decoder(found)
                self._models[name] = NativeDecoder(decoder.config, decoder.weights)
        for thread in threading.enumerate():
            if thread.name == PAGES_THREAD:
                thread.join()
        self._numbers = itertools.count()
        self._random = np.random.default_rng(0)

    @property
    def settings(self) -> list[str]:
        return list(self._models)

    def add(self, count: int, *, prompt_tokens: int, new_tokens: int) -> None:
        params = SamplingParams(temperature=0.0, num_tokens_to_generate=new_tokens, termination_id=IGNORE_EOS, top_k=1)
        none = np.empty(0, dtype=np.int32)
        for _ in range(count):
            prompt = self._random.integers(10, 20_000, prompt_tokens, dtype=np.int32)
            self._engine.add_request(EngineRequest(next(self._numbers), prompt, none, params))

    def step(self, setting: str) -> float:
        """Return the seconds of one step."""
        self._executor.model = self._models[setting]
        begun = time.perf_counter()
        self._engine.step()
        return time.perf_counter() - begun

    def finish(self) -> None:
        while self._engine.has_work:
            self._engine.step()


def _load(model: str, dtype: str, threads: int) -> NativeBackend:
    built = build_native(
        EngineSettings(
            coordinator="tcp://127.0.0.1:0",  # never connected to
            name="bench",
            model=model,
            dtype=dtype,
            max_sequence_length=_SEQUENCE,
            threads=threads,
            prefix_caching=False,
        )
    )
    built.core.executor.load()
    return built


def _decoder(built: NativeBackend) -> NativeDecoder:
    model = getattr(built.core.executor, "model", None)
    if not isinstance(model, NativeDecoder):
        raise click.ClickException("this model does not run compiled on this machine: there is nothing to compare")
    return model


@contextmanager
def _environment(values: Mapping[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def gains(rounds: list[dict[str, float]]) -> Gains:
    """Return the gain of each setting. rounds: seconds of a step by setting."""
    found: Gains = {}
    for name in rounds[0]:
        if name != _USUAL:
            ratios = [seconds[name] / seconds[_USUAL] for seconds in rounds]
            low, _, high = quantiles(ratios, n=4)
            found[name] = [round(one, 3) for one in (median(ratios), low, high)]
    return found


def decodes(engine: Engine, count: int, *, batch: int) -> list[dict[str, float]]:
    """Return rounds of decode steps of one batch, whose contexts grow with the steps."""
    engine.add(batch, prompt_tokens=_PROMPT, new_tokens=(count + 1) * len(engine.settings) + _PROMPT)
    for _ in range(_PROMPT // 2):  # until every prompt is computed
        engine.step(_USUAL)
    rounds = _rounds(engine.settings, count, engine.step)
    engine.finish()
    return rounds


def prefills(engine: Engine, count: int) -> list[dict[str, float]]:
    """Return rounds of steps that compute one long prompt each."""

    def step(setting: str) -> float:
        engine.add(1, prompt_tokens=_LONG_PROMPT, new_tokens=1)
        seconds = engine.step(setting)
        engine.finish()
        return seconds

    return _rounds(engine.settings, count, step)


def _rounds(settings: list[str], count: int, step: Callable[[str], float]) -> list[dict[str, float]]:
    """Return the seconds of a step by setting, for `count` rounds after a warm-up round."""
    rounds = [{setting: step(setting) for setting in random.sample(settings, len(settings))} for _ in range(count + 1)]
    return rounds[1:]


@click.command()
@click.option("--model", default="builtin:smollm2-135m", **_HELP)
@click.option("--dtype", "dtypes", multiple=True, default=["int4", "int8", "bfloat16", "float32"], **_HELP)
@click.option("--rounds", type=click.IntRange(min=2, max=60), default=40, **_HELP)
@click.option("--threads", type=click.IntRange(min=1), default=2, **_HELP)
@click.option("--tuning", "tunings", multiple=True, help="NAME=NUMBER: measure this instead of the switches.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path), help="Write the figures there.")
def main(
    *, model: str, dtypes: tuple[str, ...], rounds: int, threads: int, tunings: tuple[str, ...], json_file: Path | None
) -> None:
    """Compute the steps of one engine with each switch on and off."""
    os.sched_setaffinity(0, set(sorted(os.sched_getaffinity(0))[:threads]))
    others = {tuning: {TUNING_VARIABLE: tuning} for tuning in tunings} or {s.value: {s.value: "0"} for s in _SWITCHES}
    settings = {_USUAL: {}, _CONTROL: {}, **others}
    found: dict[str, dict[str, Gains]] = {}
    for dtype in dtypes:
        engine = Engine(model, dtype, threads, settings)
        for batch in _BATCHES:
            found.setdefault(dtype, {})[f"b{batch}"] = gains(decodes(engine, rounds, batch=batch))
        found[dtype][f"prefill {_LONG_PROMPT}"] = gains(prefills(engine, max(2, rounds // 4)))
        for name in (_CONTROL, *others):
            cells = {cell: values[name] for cell, values in found[dtype].items()}
            figures = "  ".join(f"{cell} {v[0]:.3f} ({v[1]:.3f}-{v[2]:.3f})" for cell, v in cells.items())
            click.echo(f"{dtype:9} {name:24} {figures}")
    if json_file is not None:
        options = {"model": model, "rounds": rounds, "threads": threads}
        document = {"benchmark": "step_switches", "machine": machine(), "options": options, "gains": found}
        json_file.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
