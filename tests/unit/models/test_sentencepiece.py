"""SentencePiece vocabularies of GGUF files against the sentencepiece library itself."""

import io
import random
from pathlib import Path

import gguf
import pytest
import sentencepiece

from megatron_runtime.tokenization import Tokenizer
from megatron_runtime.tokenization.gguf_tokenizer import tokenizer_from_gguf

CONTROL = ["<start_of_turn>", "<end_of_turn>"]
USER_DEFINED = ["\n\n", "\n\n\n", "  ", "   ", "    ", "<table>", "</table>"]
TEXTS = [
    "",
    " ",
    "Hello, world",
    "   three before and two after  ",
    "a\tb\t\tc\r\nd\n\n\ne",
    "naïve café — “quoted” … ½ ² ﬁ Å",
    "日本語のテキストと한국어 مرحبا بالعالم",
    "🤗👩\u200d👩\u200d👧👨🏽\u200d🚀🇩🇪 e\u0301\u0301 \u200b\u00a0\u3000",
    "<table>  x  </table>\n\n<tab le>",
    "def f(x):\n    return x ** 2  # comment\n",
    "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
    "1234567890 3.14159 1e-5",
    "\x00\x01\x7f",
]


def trained(*, adds_space: bool) -> sentencepiece.SentencePieceProcessor:
    """Return a vocabulary of a thousand pieces, trained on this file and the standard library."""
    written = io.BytesIO()
    lines = [line for path in (Path(__file__), Path(random.__file__)) for line in path.read_text().splitlines()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines),
        model_writer=written,
        model_type="bpe",
        vocab_size=1000,
        byte_fallback=True,
        add_dummy_prefix=adds_space,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        control_symbols=CONTROL,
        # A model that puts a space in front has no runs of spaces among its symbols.
        user_defined_symbols=[] if adds_space else [symbol.replace(" ", "▁") for symbol in USER_DEFINED],
        num_threads=1,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())


def kind_of(model: sentencepiece.SentencePieceProcessor, id_: int) -> gguf.TokenType:
    if model.is_unknown(id_):
        return gguf.TokenType.UNKNOWN
    if model.is_control(id_):
        return gguf.TokenType.CONTROL
    if model.is_byte(id_):
        return gguf.TokenType.BYTE
    is_given = model.id_to_piece(id_).replace("▁", " ") in USER_DEFINED
    return gguf.TokenType.USER_DEFINED if is_given else gguf.TokenType.NORMAL


def write(path: Path, model: sentencepiece.SentencePieceProcessor, *, adds_space: bool) -> None:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model("llama")
    # llama.cpp's converter writes spaces in user-defined tokens as they are.
    kinds = [kind_of(model, id_) for id_ in range(len(model))]
    pieces = [model.id_to_piece(id_) for id_ in range(len(model))]
    own = [kind == gguf.TokenType.USER_DEFINED for kind in kinds]
    writer.add_token_list([piece.replace("▁", " ") if mine else piece for piece, mine in zip(pieces, own, strict=True)])
    writer.add_token_scores([model.get_score(id_) for id_ in range(len(model))])
    writer.add_token_types(kinds)
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_space_prefix(adds_space)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "space in front"])
def both(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenizer, sentencepiece.SentencePieceProcessor]:
    reference = trained(adds_space=request.param)
    path = tmp_path_factory.mktemp("vocabulary") / "m.gguf"
    write(path, reference, adds_space=request.param)
    return tokenizer_from_gguf(path), reference


def texts() -> list[str]:
    generator = random.Random(0)
    source = Path(random.__file__).read_text()
    starts = [generator.randrange(len(source) - 100) for _ in range(60)]
    characters = "abc  \n\té日🤗 .,'-_<>01Аb"
    noise = ["".join(generator.choices(characters, k=generator.randrange(1, 40))) for _ in range(60)]
    return [*TEXTS, *(source[start : start + generator.randrange(5, 100)] for start in starts), *noise]


def test_tokens_are_those_of_the_library(both: tuple[Tokenizer, sentencepiece.SentencePieceProcessor]) -> None:
    ours, reference = both
    for text in texts():
        assert ours.encode(text, add_special=False) == reference.encode(text), repr(text)


def test_tokens_decode_to_the_text(both: tuple[Tokenizer, sentencepiece.SentencePieceProcessor]) -> None:
    ours, reference = both
    adds_space = reference.encode("a", out_type=str)[0].startswith("▁")
    for text in texts():
        ids = ours.encode(text, add_special=False)
        assert ours.decode(ids) == text
        stream = ours.detokenizer()
        assert "".join(stream.feed([id_]) for id_ in ids) + stream.finish() == text
        spelled = b"".join(map(ours.token_bytes, ids)).decode()
        assert spelled == (" " + text if adds_space and text else text)
        for cut in range(1, len(ids)):  # an answer continues the text of its prompt
            before = reference.decode(ids[:cut])
            if "\N{REPLACEMENT CHARACTER}" not in before:
                assert before + ours.decode(ids[cut:], after=ids[:cut]) == text


def test_special_tokens_are_recognised(both: tuple[Tokenizer, sentencepiece.SentencePieceProcessor]) -> None:
    ours, reference = both
    start, end = map(reference.piece_to_id, CONTROL)
    assert ours.encode("a")[0] == ours.bos_id == 1
    assert ours.encode("<start_of_turn>", add_special=False) == [start]
    assert set(ours.eos_ids) == {2, end}
    assert ours.decode([start, *reference.encode("a"), end]) == "a"
