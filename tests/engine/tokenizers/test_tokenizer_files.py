"""Which file of a folder a tokenizer is made from, and what its library says of that file."""

from __future__ import annotations

import base64
import json
import sys
import unicodedata
from collections.abc import Sequence
from logging import INFO
from pathlib import Path
from typing import Any, get_args

import pytest
import tiktoken
from transformers import AutoTokenizer
from transformers.utils import logging

from sglcore.core.errors import ConfigError
from sglcore.engine.model_download import TOKENIZER_FILES
from sglcore.engine.start import embedded_model
from sglcore.engine.tokenizers.converted_tokenizer import FILES, _spelled
from sglcore.engine.tokenizers.text_codec import TextCodec
from sglcore.engine.tokenizers.tiktoken_tokenizer import _tekken, has_ranks
from sglcore.engine.tokenizers.tokenizer_code import Form
from tests.engine.tokenizers.test_converted_tokenizer import SAMPLES, trained, write
from tests.engine.tokenizers.test_ranks_tokenizer import (
    LISTS,
    marked,
    ranks,
    stated,
    write_marked,
    write_ranks,
    write_tekken,
)

TEXT = "there were  three\n\n times"


def write_lists(folder: Path) -> None:
    """Write the embedded tokenizer as a byte-level list."""
    model = json.loads((embedded_model() / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(model["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))


def test_of_several_files_the_one_with_most_facts_is_read(tmp_path: Path) -> None:
    """A folder of a later file has all earlier ones too."""
    write_lists(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    found = [TextCodec(tmp_path).encode(TEXT, special=False)]
    write(tmp_path, "llama")
    found.append(TextCodec(tmp_path).encode(TEXT, special=False))
    write_ranks(tmp_path, stated())
    found.append(TextCodec(tmp_path).encode(TEXT, special=False))
    oracle = write_tekken(tmp_path)
    found.append(TextCodec(tmp_path).encode(TEXT, special=False))
    assert found[0] == TextCodec(embedded_model()).encode(TEXT, special=False)
    assert found[3] == [32 + rank for rank in oracle.encode_ordinary(TEXT)]
    assert len({tuple(each) for each in found}) == 4


def test_all_that_a_tokenizer_is_made_of_is_downloaded() -> None:
    beside = {"merges.txt", "added_tokens.json", "special_tokens_map.json", "tokenization_*.py"}
    assert set(TOKENIZER_FILES) == {*FILES, *beside}
    assert {"tokenizer.model", "spiece.model", "sentencepiece.bpe.model", "spm.model"} < set(FILES)
    assert {"tekken.json", "tiktoken.model", "qwen.tiktoken", "hy.tiktoken", "vocab.json", "vocab.txt"} < set(FILES)


def test_a_list_of_word_pieces_is_read_as_transformers_does(tmp_path: Path) -> None:
    letters = "abcdefghijklmnopqrstuvwxyz0123456789.,'"
    words = [
        "[PAD]",
        "[UNK]",
        "[CLS]",
        "[SEP]",
        "[MASK]",
        *letters,
        *(f"##{each}" for each in letters),
        "there",
        "##re",
    ]
    (tmp_path / "vocab.txt").write_text("\n".join(words) + "\n")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    codec, oracle = TextCodec(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in SAMPLES:
        ids = oracle.encode(text)
        assert codec.encode(text) == ids and codec.decode(ids) == oracle.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
    assert codec.template.special_tokens["cls_token"] == "[CLS]"


def test_code_of_a_checkpoint_is_never_run(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    file = tmp_path / "tokenizer_config.json"
    facts = json.loads(file.read_text())
    file.write_text(json.dumps({**facts, "auto_map": {"AutoTokenizer": ["own.Own", "own.Own"]}}))
    ran = tmp_path / "ran"
    (tmp_path / "own.py").write_text(f"open({str(ran)!r}, 'w')\nfrom transformers import LlamaTokenizer as Own\n")
    try:
        TextCodec(tmp_path)
    except ConfigError:
        pass
    assert not ran.exists()


@pytest.mark.parametrize("is_damaged", [False, True])
def test_the_log_level_of_transformers_stays_as_it_was(is_damaged: bool, tmp_path: Path) -> None:
    write(tmp_path, "llama")
    if is_damaged:
        (tmp_path / "tokenizer.model").write_bytes(b"\x0a\xffdamaged")
    before = logging.get_verbosity()
    logging.set_verbosity_info()
    try:
        TextCodec(tmp_path)
        assert not is_damaged
    except ConfigError:
        assert is_damaged
    finally:
        found = logging.get_verbosity()
        logging.set_verbosity(before)
    assert found == INFO


def test_a_class_without_a_fast_tokenizer_is_refused_by_its_name(tmp_path: Path) -> None:
    write_lists(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "ctrl"}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "CTRLTokenizer"}))
    with pytest.raises(ConfigError, match=r"no fast tokenizer for .*vocab\.json: found CTRLTokenizer; save a tokeni"):
        TextCodec(tmp_path)


def test_a_library_below_transformers_is_named_by_its_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path, "llama")
    monkeypatch.setitem(sys.modules, "google.protobuf", None)
    with pytest.raises(ConfigError, match=r" has no tokenizer\.json, and tokenizer\.model needs protobuf: .*slow-tok"):
        TextCodec(tmp_path)


def test_what_a_tekken_file_needs_is_told_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_tekken(tmp_path, special_tokens=None)
    monkeypatch.setitem(sys.modules, "mistral_common", None)
    with pytest.raises(ConfigError) as refused:
        TextCodec(tmp_path)
    assert refused.value.found.startswith(f"{tmp_path} has no tokenizer.json, and tekken.json needs mistral_common")


def test_a_text_of_a_tekken_file_is_cut_between_tokens_and_of_two_texts_the_second_is_another_segment(
    tmp_path: Path,
) -> None:
    write_tekken(tmp_path)
    codec = TextCodec(tmp_path)
    ids = codec.encode(TEXT, special=False)
    for count in range(1, len(ids)):
        found = codec.first_tokens(TEXT, count)
        assert codec.encode(found, special=False) == ids[:count], count
    joined, segments = codec.encode_texts("a", "b c")
    assert segments == [0, 0, 0, *[1] * (len(joined) - 3)]


@pytest.mark.parametrize("form", get_args(Form))
def test_a_text_is_put_into_the_form_that_the_code_beside_the_ranks_names(form: Form, tmp_path: Path) -> None:
    normalized = f"def tokenize(self, text):\n    return unicodedata.normalize({form!r}, text)\n"
    oracle = write_marked(tmp_path, "qwen.tiktoken", marked(LISTS["numbered"], normalized=normalized))
    codec = TextCodec(tmp_path)
    for text in ("A\u0301 e\u0302 \u00c1", "\ufb01n \uff21\uff11 \u00bd x\u00b2", "\u1100\u1161 \uac00", "plain"):
        formed = unicodedata.normalize(form, text)
        assert codec.encode(text) == oracle.encode(formed, allowed_special="all"), text
        assert codec.decode(codec.encode(text)) == formed


def entries(*tokens: bytes) -> list[dict[str, Any]]:
    return [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for rank, token in enumerate(tokens)]


@pytest.mark.parametrize(
    ("config", "special", "kept", "first"),
    [
        ({"default_vocab_size": 6, "default_num_special_tokens": 3}, ["<s>"], 3, 3),
        ({"default_vocab_size": 7, "default_num_special_tokens": 3}, ["<s>"], 4, 3),
        ({"default_vocab_size": 6}, ["<s>", "</s>"], 4, 2),
        ({"default_vocab_size": 3, "default_num_special_tokens": 0}, ["<s>", "</s>"], 1, 2),
        ({"default_num_special_tokens": 3}, None, 4, 3),
        ({"default_vocab_size": 4}, None, 4, 0),
        ({}, ["<s>"], 4, 1),
    ],
    ids=str,
)
def test_a_tekken_file_has_as_many_tokens_as_its_settings_say(
    config: dict[str, Any], special: Sequence[str] | None, kept: int, first: int
) -> None:
    content = {
        "config": {"pattern": "x", **config},
        "vocab": entries(b"a", b"b", b"ab", b"ba"),
        "special_tokens": special,
    }
    found = _tekken(content)
    assert (found.pattern, found.first_id, found.form) == ("x", first, None)
    assert found.ranks == dict(list({b"a": 0, b"b": 1, b"ab": 2, b"ba": 3}.items())[:kept])


def test_a_tekken_file_with_too_few_tokens_is_refused_with_the_numbers() -> None:
    config = {"pattern": "x", "default_vocab_size": 8, "default_num_special_tokens": 3}
    with pytest.raises(ValueError, match="8 tokens, 3 of them special, and 4 entries"):
        _tekken({"config": config, "vocab": entries(b"a", b"b", b"ab", b"ba"), "special_tokens": []})


@pytest.mark.parametrize(
    ("content", "wanted"),
    [
        (b"YQ== 0\nYg== 1\n", True),
        (b"YQ== 0", True),
        (b"", False),
        (b"\nYQ== 0\n", False),
        (b"YQ==\n", False),
        (b"YQ== 0 1\n", False),
        (b"YQ== -1\n", False),
        (b"YQ== x\n", False),
        (b"Y 0\n", False),
        (b"!? 0\n", False),
    ],
)
def test_a_file_of_ranks_is_known_by_its_first_line(content: bytes, wanted: bool, tmp_path: Path) -> None:
    file = tmp_path / "tokenizer.model"
    assert not has_ranks(file) and not has_ranks(tmp_path)
    file.write_bytes(content)
    assert has_ranks(file) is wanted


def test_pieces_are_no_ranks(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(trained())
    assert not has_ranks(tmp_path / "tokenizer.model")


def test_a_listed_token_is_special_unless_it_says_otherwise_and_is_text_as_it_stands(tmp_path: Path) -> None:
    """Texts are put into a form, and added tokens are not."""
    write_marked(tmp_path, "qwen.tiktoken", marked(LISTS["numbered"]))
    first = len(ranks())
    listed = {str(first): {"content": "<|e\u0301|>"}, str(first + 1): {"content": "<|b|>", "special": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": listed}))
    codec = TextCodec(tmp_path)
    assert codec.encode("<|e\u0301|><|b|>") == [first, first + 1] and first not in codec.encode("<|\u00e9|>")
    assert first in codec.special_ids and first + 1 not in codec.special_ids


@pytest.mark.parametrize("missing", [[255], [3, 7]])
def test_ranks_without_a_token_for_each_byte_are_refused_with_the_first_one(missing: list[int], tmp_path: Path) -> None:
    write_ranks(tmp_path, stated())
    others = {bytes([value]): b"\xff" * (10 + value) for value in missing}
    lines = (b"%s %d" % (base64.b64encode(others.get(token, token)), rank) for token, rank in ranks().items())
    (tmp_path / "tiktoken.model").write_bytes(b"\n".join(lines))
    with pytest.raises(ConfigError, match=f"there is no token for {len(missing)} bytes, such as {missing[0]}; downl"):
        TextCodec(tmp_path)


@pytest.mark.parametrize("by", ["transformers", "tiktoken"])
def test_a_pattern_that_a_library_can_not_read_is_refused_with_the_reason(
    by: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(**_: object) -> None:
        raise ValueError("no such\npattern")

    write_ranks(tmp_path, "PAT_STR = '('\n" if by == "transformers" else stated())
    if by == "tiktoken":
        monkeypatch.setattr(tiktoken, "Encoding", refuse)
    reason = "no such pattern" if by == "tiktoken" else ""
    with pytest.raises(ConfigError, match=rf"transformers cannot convert .*tiktoken\.model: .*{reason}; download it"):
        TextCodec(tmp_path)


def test_unknown_characters_that_stand_together_count_as_one_whatever_they_are_called() -> None:
    given = ["[X]", "<unk>", "a", "<unk>", "b", "b", "[X]", "[X]", "[X]"]
    assert _spelled(given, {"[X]", "<unk>"}) == ["<unk>", "a", "<unk>", "b", "b", "<unk>"]
    assert _spelled(given[1:5], set()) == given[1:5] and _spelled([], {"<unk>"}) == []
