"""With a real model in float32 a killed engine changes no answer."""

import random
from collections.abc import Callable

import pytest
from eventually import LONG_SECONDS
from fleet import Fleet, Load, until_serving
from soak import repeated, size

from megatron_runtime.backends.text import ModelText
from megatron_runtime.sampling.bad_words import BadWords

REQUESTS = size(16, soak=50)
BAD_WORDS = [",", ".", "the", "a", "of", "and", "1", "I'm"]
MODEL_OPTIONS = ("--backend", "native", "--dtype", "float32", "--threads", "1", "--kv-cache-memory", "128Mi")


@pytest.mark.timeout(600)
@repeated(soak=5)
async def test_answers_after_a_killed_model_engine_equal_an_undisturbed_run(
    fleet: Fleet, seed: int, report: Callable[[str], None]
) -> None:
    await fleet.coordinator()
    for name in ("engine-0", "engine-1"):
        await fleet.engine(name, *MODEL_OPTIONS)
    link = await fleet.admin()
    await until_serving(link, fleet.engines, seconds=2 * LONG_SECONDS)
    client = await fleet.client()
    rng = random.Random(seed)
    prompts = [rng.choices(range(100, 40_000), k=8) for _ in range(REQUESTS)]

    def load() -> Load:
        load = Load([client])
        for prompt in prompts:
            load.add(prompt, 8, temperature=0.0, bad_words=BAD_WORDS)
        return load

    undisturbed = load()
    await undisturbed.finish(seconds=2 * LONG_SECONDS)
    answers = [record.final["generated_tokens"] for record in undisturbed.records if record.final is not None]
    disturbed = load()
    await disturbed.until(rng.randint(REQUESTS, 4 * REQUESTS))
    await fleet.engines.pop("engine-0").kill()
    await disturbed.finish(seconds=2 * LONG_SECONDS)
    bad_words = BadWords(ModelText.of_model("builtin:smollm2-135m").bad_words(BAD_WORDS, vocab_size=49152))
    for record, answer in zip(disturbed.records, answers, strict=True):
        record.check(answer)
        assert not any(token in bad_words.after(answer[:place]) for place, token in enumerate(answer))
    gaps = [record.longest_gap(since=0) for record in disturbed.records]
    report(f"{REQUESTS} streams equal to the undisturbed run; longest wait for a frame {max(gaps):.2f} s")
