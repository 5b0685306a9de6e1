"""The decoder against transformers: logits of whole prompts, and of mixed batches over scattered pages."""

from pathlib import Path

import pytest
import torch

from megatron_runtime.checkpoints.safetensors import SafetensorsCheckpoint
from megatron_runtime.models.decoder import DecoderModel
from megatron_runtime.models.layers.paged_attention import AttentionBatch, SequenceRows
from megatron_runtime.models.weights import load_weights

PAGE = 16


class Model:
    """A Llama with a cache of scattered pages, and the same weights in transformers."""

    def __init__(self, directory: Path) -> None:
        checkpoint = SafetensorsCheckpoint(directory)
        self.config = checkpoint.config
        from transformers import AutoModelForCausalLM

        self.reference = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.ours = DecoderModel(self.config, load_weights(checkpoint, torch.float32))
        width = 2 * self.config.num_kv_heads * self.config.head_dim
        self.cache = torch.zeros(self.config.num_layers, 64, PAGE, width)

    def tokens(self, count: int, *, seed: int) -> torch.Tensor:
        return torch.randint(self.config.vocab_size, (count,), generator=torch.Generator().manual_seed(seed))

    def expected(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.reference(tokens[None]).logits[0, -1]

    def run(self, tokens: list[torch.Tensor], starts: list[int], batch: AttentionBatch) -> torch.Tensor:
        """Logits after the last of each sequence's new tokens, which begin at `starts`."""
        new = [sequence[start:] for sequence, start in zip(tokens, starts, strict=True)]
        positions = [torch.arange(start, len(all_)) for all_, start in zip(tokens, starts, strict=True)]
        ends = torch.tensor([len(part) for part in new]).cumsum(0)
        hidden = self.ours.embed(torch.cat(new))
        hidden = self.ours.run_layers(hidden, torch.cat(positions), attention=batch, cache_LPXE=self.cache)
        return self.ours.logits(hidden[ends - 1])

    def prefill(self, tokens: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        chunk = SequenceRows(slice(0, len(tokens)), None, None)
        return self.run([tokens], [0], AttentionBatch(rows(pages, 0, len(tokens)), [chunk]))[0]


def rows(pages: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    at = torch.arange(start, stop)
    return pages[at // PAGE] * PAGE + at % PAGE


def hidden_from(visible: torch.Tensor, columns: int) -> torch.Tensor:
    """[len(visible), columns]: 0 in the first `visible` columns of each row, -inf after them."""
    return torch.zeros(len(visible), columns).masked_fill_(torch.arange(columns) >= visible[:, None], float("-inf"))


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


@pytest.fixture(scope="module")
def smollm(exported: Path) -> Model:
    with torch.inference_mode():
        return Model(exported)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Model:
    """Random weights with features that the built-in model lacks: Llama 3.1 rope scaling and an untied head."""
    from transformers import LlamaConfig, LlamaForCausalLM

    directory = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        tie_word_embeddings=False,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    )
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    model.save_pretrained(directory)
    with torch.inference_mode():
        return Model(directory)


@pytest.mark.parametrize(("name", "count"), [("tiny", 1), ("tiny", 2), ("tiny", 200), ("smollm", 37)])
def test_prefill_gives_the_logits_of_transformers(name: str, count: int, request: pytest.FixtureRequest) -> None:
    model: Model = request.getfixturevalue(name)
    tokens = model.tokens(count, seed=count)
    torch.testing.assert_close(model.prefill(tokens, torch.arange(20)), model.expected(tokens), rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("name", ["smollm", "tiny"])
def test_a_mixed_batch_over_scattered_pages_gives_each_sequence_its_own_logits(
    name: str, request: pytest.FixtureRequest
) -> None:
    model: Model = request.getfixturevalue(name)
    pages = torch.randperm(63, generator=torch.Generator().manual_seed(1))
    short, long, chunked, fresh = (model.tokens(count, seed=count) for count in (9, 50, 40, 21))
    pages_of = {9: pages[:1], 50: pages[1:5], 40: pages[5:8], 21: pages[8:10]}
    model.prefill(short[:-1], pages_of[9])
    model.prefill(long[:-1], pages_of[50])
    model.prefill(chunked[:25], pages_of[40])

    batch = AttentionBatch(
        cache_rows_T=torch.cat(
            [rows(pages_of[9], 8, 9), rows(pages_of[50], 49, 50), rows(pages_of[40], 25, 40), rows(pages_of[21], 0, 21)]
        ),
        chunks=[
            SequenceRows(slice(0, 1), pages_of[9], torch.zeros(1, 9)),
            SequenceRows(slice(1, 2), pages_of[50], torch.zeros(1, 50)),
            SequenceRows(slice(2, 17), pages_of[40], hidden_from(torch.arange(26, 41), 40)),
            SequenceRows(slice(17, 38), None, None),
        ],
    )
    logits = model.run([short, long, chunked, fresh], [8, 49, 25, 0], batch)
    for tokens, ours in zip((short, long, chunked, fresh), logits, strict=True):
        torch.testing.assert_close(ours, model.expected(tokens), rtol=1e-4, atol=1e-3)


def test_bfloat16_weights_stay_near_float32(tiny: Model, tmp_path: Path) -> None:
    tiny.reference.save_pretrained(tmp_path)
    checkpoint = SafetensorsCheckpoint(tmp_path)
    model = DecoderModel(checkpoint.config, load_weights(checkpoint, torch.bfloat16))
    tokens = tiny.tokens(30, seed=5)
    hidden = model.run_layers(
        model.embed(tokens),
        torch.arange(30),
        attention=AttentionBatch(torch.arange(30), [SequenceRows(slice(0, 30), None, None)]),
        cache_LPXE=tiny.cache.bfloat16(),
    )
    logits = model.logits(hidden[29:])[0]
    assert logits.dtype is torch.bfloat16
    assert torch.nn.functional.cosine_similarity(logits.float(), tiny.expected(tokens), dim=0) > 0.99
