"""The tokenizer of a GGUF file, compared with its sources: our own, transformers', and
sentencepiece's."""

from __future__ import annotations

import io
import json
import random
from pathlib import Path
from typing import Any

import gguf
import pytest
import sentencepiece
from gguf import GGUFWriter, TokenType
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer, get_gguf_tokenizer

from sglcore.checkpoint.gguf_config import TOKENS, end_tokens
from sglcore.checkpoint.gguf_header import _Reader, read_header
from sglcore.core.errors import CheckpointError
from sglcore.engine.start import embedded_model
from sglcore.engine.tokenizers.text_codec import TextCodec, eos_token_ids

TEXTS = (
    "",
    "Once upon a time, there was a kind boy.",
    " Two  spaces\n\n\tand tabs \r\n",
    "It's 12345 o'clock; WE'LL see: 3.14159",
    "naïve café — 你好, мир! \U0001f600\u200b",
    "<|end|> in the middle<|bos|>and\n<|end|>",
    "def f(x):\n    return x**2  # {}",
    "e\u0301 \u00e9",
)
COMPATIBLE = "\ufb01n \uff21\uff11 \u00bd \u2460 x\u00b2\u3000\u338f"
"""Characters that NFKC or NFKD would change and NFC does not."""


def random_texts(count: int) -> list[str]:
    """Return seeded texts of letters, digits, spaces and symbols."""
    draw = random.Random(11)
    alphabet = "aabcdeeilnorstt  \n'.,;:!-_09A\u00e9\u4f60<|>"
    return ["".join(draw.choices(alphabet, k=draw.randint(1, 80))) for _ in range(count)]


def write(file: Path, values: dict[str, Any]) -> Path:
    """Write a GGUF file with metadata only."""
    writer = GGUFWriter(file, "llama")
    for key, value in values.items():
        add = {list: writer.add_array, bool: writer.add_bool, int: writer.add_uint32, str: writer.add_string}
        add[type(value)](f"tokenizer.{key}", value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    return file


def byte_level(tokenizer: Tokenizer, pre: str, **more: Any) -> dict[str, Any]:
    """Return the metadata of a byte-level tokenizer."""
    model = json.loads(tokenizer.to_str())["model"]
    added = tokenizer.get_added_tokens_decoder()
    tokens = [tokenizer.id_to_token(token_id) for token_id in range(tokenizer.get_vocab_size())]
    kinds = [int(TokenType.CONTROL if n in added else TokenType.NORMAL) for n in range(len(tokens))]
    merges = [" ".join(merge) for merge in model["merges"]]
    values = {"ggml.model": "gpt2", "ggml.pre": pre, "ggml.tokens": tokens, "ggml.token_type": kinds}
    return {**values, "ggml.merges": merges, **more}


@pytest.mark.parametrize("pre", ["smollm", "refact"])
def test_our_own_tokenizer_comes_back_whole(pre: str, tmp_path: Path) -> None:
    own = TextCodec(embedded_model())
    more = {"ggml.bos_token_id": 1, "ggml.eos_token_id": 2, "ggml.padding_token_id": 0, "ggml.add_bos_token": True}
    template = own.template.source()
    assert template is not None
    file = write(tmp_path / "m.gguf", byte_level(own.tokenizer, pre, chat_template=template, **more))
    codec = TextCodec(file)
    for text in (*TEXTS, *random_texts(100)):
        for special in (True, False):
            ids = own.encode(text, special=special)
            assert codec.encode(text, special=special) == ids, text
            assert codec.decode(ids) == own.decode(ids)
    messages = [{"role": "user", "content": "Hello"}]
    assert codec.render_chat(messages) == own.render_chat(messages)
    assert codec.special_ids == own.special_ids and eos_token_ids(file) == {2}


FORMED = ("qwen2", "deepseek-r1-qwen")
"""Rules that put a text into the NFC form first."""
BEGUN = ("llama-bpe", "llama3", "llama-v3", "smaug-bpe")
"""Rules of Llama 3, whose files may leave out that a prompt begins with BOS."""
PLAIN = ("gpt-2", "gpt2", "dbrx", "chatglm-bpe", "glm4", "olmo")
SAME = {"chatglm-bpe": "dbrx", "glm4": "dbrx"}
"""Rules that transformers does not know -> the one with the same expression in llama.cpp."""


@pytest.mark.parametrize("pre", [*FORMED, *BEGUN, *PLAIN])
def test_bytes_are_cut_as_by_transformers(pre: str, tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.BPE())
    split: Any = pre_tokenizers.Split(Regex(r"\s+|\w+|\W"), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=500, initial_alphabet=alphabet, special_tokens=["<|end|>", "<|bos|>"])
    tokenizer.train_from_iterator([*TEXTS, *random_texts(50), "12 123 1234 the then there"], trainer)
    file = write(tmp_path / "m.gguf", byte_level(tokenizer, pre, **{"ggml.bos_token_id": 1}))
    known = write(tmp_path / "known.gguf", byte_level(tokenizer, SAME.get(pre, pre), **{"ggml.bos_token_id": 1}))
    codec, (oracle, _) = TextCodec(file), convert_gguf_tokenizer(*get_gguf_tokenizer(str(known))[:2])
    for text in (*TEXTS, COMPATIBLE, *random_texts(200)):
        ids = codec.encode(text, special=False)
        assert codec.decode(ids, skip_special_tokens=False) == (nfc(text) if pre in FORMED else text)
        if pre not in FORMED or text == nfc(text):
            assert ids == oracle.encode(text, add_special_tokens=False).ids, text
    assert codec.encode("a") == [1] * (pre in BEGUN) + codec.encode("a", special=False)


def nfc(text: str) -> str:
    """Return the NFC form, which Qwen's tokenizer applies."""
    import unicodedata

    return unicodedata.normalize("NFC", text)


def trained_pieces() -> sentencepiece.SentencePieceProcessor:
    """A small sentencepiece BPE model with byte fallback, as Llama 2 has."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*TEXTS[1:], *random_texts(300), *["there was a time when there were three"] * 20]),
        model_writer=model,
        model_type="bpe",
        vocab_size=420,
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        allow_whitespace_only_pieces=True,
        minloglevel=2,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


def test_pieces_are_merged_as_by_sentencepiece(tmp_path: Path) -> None:
    oracle = trained_pieces()
    count = oracle.get_piece_size()
    kinds = [
        TokenType.UNKNOWN if oracle.is_unknown(n)
        else TokenType.CONTROL if oracle.is_control(n)
        else TokenType.BYTE if oracle.is_byte(n)
        else TokenType.NORMAL
        for n in range(count)
    ]  # fmt: skip
    values = {
        "ggml.model": "llama",
        "ggml.pre": "default",
        "ggml.tokens": [oracle.id_to_piece(n) for n in range(count)],
        "ggml.scores": [float(oracle.get_score(n)) for n in range(count)],
        "ggml.token_type": [int(kind) for kind in kinds],
        "ggml.bos_token_id": oracle.bos_id(),
        "ggml.eos_token_id": oracle.eos_id(),
        "ggml.unknown_token_id": oracle.unk_id(),
    }
    codec = TextCodec(write(tmp_path / "m.gguf", values))
    for text in (*TEXTS[1:], *random_texts(200)):
        ids = oracle.encode(text)
        assert codec.encode(text, special=False) == ids, text
        assert codec.encode(text) == [oracle.bos_id(), *ids]
        assert codec.decode(ids) == text


def test_a_run_of_characters_without_bytes_is_one_unknown_token(tmp_path: Path) -> None:
    """As in sentencepiece."""
    tokens = ["<unk>", "a", "b", "ab"]
    values = {"ggml.model": "llama", "ggml.tokens": tokens, "ggml.scores": [0.0, -1.0, -2.0, 0.0]}
    file = write(tmp_path / "m.gguf", {**values, "ggml.add_space_prefix": False, "ggml.unknown_token_id": 0})
    assert TextCodec(file).encode("xxayyyabz", special=False) == [0, 1, 0, 3, 0]


def test_unknown_characters_become_the_token_that_the_file_names(tmp_path: Path) -> None:
    tokens, scores = ["a", "b", "ab", "<?>"], [-1.0, -2.0, 0.0, 0.0]
    values = {"ggml.model": "llama", "ggml.tokens": tokens, "ggml.scores": scores, "ggml.add_space_prefix": False}
    file = write(tmp_path / "m.gguf", {**values, "ggml.unknown_token_id": 3})
    assert TextCodec(file).encode("xab", special=False) == [3, 2]


@pytest.mark.parametrize("kind", [TokenType.USER_DEFINED, TokenType.CONTROL])
def test_marks_are_found_in_the_text_as_it_was_given(kind: TokenType, tmp_path: Path) -> None:
    values = {"ggml.model": "llama", "ggml.tokens": ["x", "\u2581", "a b"], "ggml.scores": [0.0] * 3}
    codec = TextCodec(write(tmp_path / "m.gguf", {**values, "ggml.token_type": [1, 1, int(kind)]}))
    assert codec.encode("xa b", special=False) == [1, 0, 2]


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"ggml.model": "t5", "ggml.tokens": ["a"]}, "a vocabulary of the kind 't5'; wanted gpt2 or llama"),
        ({"ggml.model": "gpt2"}, "says tokenizer.ggml.tokens = None; wanted a value of kind list"),
        (
            {"ggml.model": "gpt2", "ggml.tokens": ["a", "b", "ab"], "ggml.merges": ["a b"], "ggml.pre": "tekken"},
            "cuts text by the rule 'tekken' .*; wanted one of llama-bpe, qwen2, dbrx",
        ),
    ],
)
def test_a_tokenizer_that_we_lack_is_named(values: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=text):
        TextCodec(write(tmp_path / "m.gguf", values))


SMALL = {"ggml.model": "gpt2", "ggml.pre": "gpt-2", "ggml.tokens": ["a", "b", "ab"], "ggml.merges": ["a b"]}
PIECES = {"ggml.model": "llama", "ggml.tokens": ["a", "b", "ab"], "ggml.scores": [0.0, 0.0, -1.0]}


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({**SMALL, "ggml.bos_token_id": 3}, "says tokenizer.ggml.bos_token_id = 3; wanted 0 to 2; download it again"),
        ({**SMALL, "ggml.eos_token_id": "x"}, "eos_token_id = 'x'; wanted 0 to 2"),
        ({**SMALL, "ggml.padding_token_id": 9999}, "padding_token_id = 9999; wanted 0 to 2"),
        ({**PIECES, "ggml.unknown_token_id": 3}, "unknown_token_id = 3; wanted 0 to 2"),
        ({**SMALL, "ggml.tokens": ["a", "b", "ab", "b"]}, "has the token 'b' twice"),
        ({**SMALL, "ggml.merges": ["x y"]}, "has a damaged tokenizer: Exception .*out of vocabulary"),
        ({**SMALL, "ggml.merges": ["ab"]}, "has a damaged tokenizer"),
        ({**SMALL, "ggml.merges": [1, 2]}, "has a damaged tokenizer: AttributeError"),
        ({**SMALL, "ggml.token_type": 3}, "has a damaged tokenizer: TypeError"),
        ({**SMALL, "ggml.pre": [1]}, "has a damaged tokenizer: TypeError"),
        ({**SMALL, "chat_template": 3}, "has a damaged tokenizer: TypeError a chat template that is not text"),
        ({**PIECES, "ggml.scores": [0.0]}, "has a damaged tokenizer: IndexError"),
        ({**PIECES, "ggml.scores": ["a", "b", "c"]}, "has a damaged tokenizer: TypeError"),
    ],
)
def test_a_damaged_tokenizer_is_an_error_of_one_line(values: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=text) as error:
        TextCodec(write(tmp_path / "m.gguf", values))
    assert "\n" not in str(error.value)


def test_control_tokens_that_end_a_turn_end_a_text_too(tmp_path: Path) -> None:
    tokens = ["a", "<|end_of_text|>", "<|eot_id|>", "<|im_end|>", "<|endoftext|>"]
    values = {**SMALL, "ggml.tokens": tokens, "ggml.merges": ["a a"], "ggml.eos_token_id": 1}
    kinds = [int(kind) for kind in (TokenType.NORMAL, *[TokenType.CONTROL] * 2, TokenType.NORMAL, TokenType.CONTROL)]
    assert eos_token_ids(write(tmp_path / "m.gguf", {**values, "ggml.token_type": kinds})) == {1, 2, 4}
    assert eos_token_ids(write(tmp_path / "n.gguf", values)) == {1}
    with pytest.raises(CheckpointError, match=r"eot_token_id = \[1, 2\]; wanted 0 to"):
        eos_token_ids(write(tmp_path / "o.gguf", {**values, "ggml.eot_token_id": [1, 2]}))


def test_the_vocabulary_is_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, kinds = ["a", "b", "ab", "<|end|>", "<|im_end|>"], [1, 1, 1, int(TokenType.CONTROL), int(TokenType.CONTROL)]
    values = {**SMALL, "ggml.tokens": tokens, "ggml.merges": ["a b"], "ggml.eos_token_id": 3, "ggml.token_type": kinds}
    file, read = write(tmp_path / "m.gguf", values), list[list[str]]()
    whole = _Reader._texts
    monkeypatch.setattr(_Reader, "_texts", lambda self, count: read.append(whole(self, count)) or read[-1])
    assert eos_token_ids(file) == {3, 4} and end_tokens(read_header(file)) == (3, 4)
    TextCodec(file)
    assert [each for each in read if each] == [tokens, ["a b"]]


def test_texts_that_were_left_out_are_those_of_a_whole_read(tmp_path: Path) -> None:
    tokens = ["a", "", "\u00e9\u4f60", "b" * 300]
    file = write(tmp_path / "m.gguf", {**SMALL, "ggml.tokens": tokens, "ggml.merges": ["a a"]})
    lazy, whole = read_header(file), read_header(file, texts=True)
    assert TOKENS not in lazy.metadata and whole.metadata[TOKENS] == tokens and not whole.left_out
    for header in (lazy, whole):
        assert header.some_texts(TOKENS, range(9)) == dict(enumerate(tokens))
        assert header.some_texts(TOKENS, [2, 7]) == {2: tokens[2]}
        assert header.some_texts(TOKENS, []) == header.some_texts("tokenizer.ggml.none", [0]) == {}


@pytest.mark.parametrize("kind", [TokenType.NORMAL, TokenType.USER_DEFINED, TokenType.CONTROL])
def test_marks_are_matched_whole_and_control_tokens_alone_are_left_out_of_texts(
    kind: TokenType, tmp_path: Path
) -> None:
    values = {**SMALL, "ggml.tokens": ["a", "b", "ab", "ba"], "ggml.token_type": [1, 1, 1, int(kind)]}
    codec = TextCodec(write(tmp_path / "m.gguf", values))
    ids = codec.encode("aba", special=False)
    assert ids == ([2, 0] if kind is TokenType.NORMAL else [0, 3])
    assert codec.decode([0, 3]) == ("a" if kind is TokenType.CONTROL else "aba")
    assert codec.special_ids == ({3} if kind is TokenType.CONTROL else set())


@pytest.mark.parametrize(
    ("pre", "expected"), [("llama-bpe", [3]), ("llama3", [3]), ("qwen2", [2, 0]), ("gpt-2", [2, 0])]
)
def test_by_the_rules_of_llama_3_a_word_that_is_a_token_needs_no_merges(
    pre: str, expected: list[int], tmp_path: Path
) -> None:
    values = {**SMALL, "ggml.pre": pre, "ggml.tokens": ["a", "b", "ab", "aba"], "ggml.merges": ["a b"]}
    codec = TextCodec(write(tmp_path / "m.gguf", values))
    assert codec.encode("aba", special=False) == expected


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
@pytest.mark.parametrize("bos", [True, False])
@pytest.mark.parametrize("eos", [True, False])
def test_a_prompt_stands_between_the_ends_that_the_file_asks_for(
    kind: str, bos: bool, eos: bool, tmp_path: Path
) -> None:
    own: dict[str, Any] = SMALL if kind == "gpt2" else {**PIECES, "ggml.scores": [0.0] * 5}
    ends = {"ggml.bos_token_id": 3, "ggml.eos_token_id": 4, "ggml.add_bos_token": bos, "ggml.add_eos_token": eos}
    values = {**own, **ends, "ggml.tokens": ["a", "b", "ab", "<s>", "</s>"], "ggml.add_space_prefix": False}
    ids = TextCodec(write(tmp_path / "m.gguf", values)).encode("ab")
    assert ids == [*([3] if bos else []), 2, *([4] if eos else [])]


def test_a_template_gets_the_special_tokens_that_a_file_names(tmp_path: Path) -> None:
    kinds = {"bos": "a", "eos": "b", "unknown": "ab", "padding": "c"}
    named = {f"ggml.{name}_token_id": place for place, name in enumerate(kinds)}
    template = "{{ bos_token }} {{ eos_token }} {{ unk_token }} {{ pad_token }}"
    values = {**SMALL, "ggml.tokens": list(kinds.values()), "chat_template": template}
    assert TextCodec(write(tmp_path / "m.gguf", values | named)).render_chat([]) == "a b ab c"
    assert TextCodec(write(tmp_path / "n.gguf", values)).render_chat([]) == "   "


def test_several_templates_keep_their_names(tmp_path: Path) -> None:
    base = {"ggml.model": "gpt2", "ggml.pre": "gpt-2", "ggml.tokens": ["a", "b", "ab"], "ggml.merges": ["a b"]}
    named = {"chat_template": "one", "chat_template.tool_use": "two", "chat_templates": ["tool_use"]}
    codec = TextCodec(write(tmp_path / "m.gguf", {**base, **named}))
    assert codec.template.source() == "one" and codec.template.source(tools=True) == "two"
    codec = TextCodec(write(tmp_path / "n.gguf", {**base, **named, "chat_templates": ["rag", "tool_use"]}))
    assert codec.template.sources == {"default": "one", "tool_use": "two"}
    assert gguf.Keys.Tokenizer.CHAT_TEMPLATE == "tokenizer.chat_template"
