"""Tokenizers of folders without tokenizer.json, compared with transformers' for the same folder and
with sentencepiece."""

from __future__ import annotations

import io
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
from transformers import AutoTokenizer

from sglcore.core.errors import ConfigError
from sglcore.engine.tokenizers.detokenizer import IncrementalDetokenizer
from sglcore.engine.tokenizers.text_codec import TextCodec
from tests.engine.tokenizers.test_gguf_tokenizer import TEXTS, random_texts

SAMPLES = (
    *TEXTS,
    *random_texts(60),
    "a \u00e9\u4e2d<|im_end|>\u4f60 b",
    "<s>x</s> y<unk>",
    "  \u00a0 \U0001f468\u200d\U0001f469",
)
MARK, END = "<|im_end|>", "</s>"
FACTS = {"bos_token": "<s>", "eos_token": END, "unk_token": "<unk>", "add_bos_token": True, "add_eos_token": False}
T5 = {
    "model_type": "unigram",
    "normalization_rule_name": "nmt_nfkc",
    "remove_extra_whitespaces": True,
    "byte_fallback": False,
    **{"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1},
}
KINDS: dict[str, tuple[str, str | None, str, dict[str, Any]]] = {
    "llama": ("llama", "LlamaTokenizer", "tokenizer.model", {}),
    "not-legacy": ("llama", "LlamaTokenizer", "tokenizer.model", {}),
    "gemma": ("gemma2", "GemmaTokenizer", "tokenizer.model", {"add_dummy_prefix": False}),
    "t5": ("t5", "T5Tokenizer", "spiece.model", T5),
    "none": ("mistral", "LlamaTokenizer", "tokenizer.model", {}),
    "unknown": ("internlm2", "InternLM2Tokenizer", "tokenizer.model", {}),
    "no-prefix": ("internlm2", "InternLM2Tokenizer", "tokenizer.model", {"add_dummy_prefix": False}),
    "silent": ("mistral", None, "tokenizer.model", {}),
}
"""The model type, the tokenizer class (None: no tokenizer_config.json), the file name, and the
training options."""
OWN_CLASS = ("llama", "not-legacy", "gemma", "t5")
"""Kinds with a tokenizer class that transformers converts by special rules; for the other kinds it
puts no space before the text."""


@cache
def trained(**how: Any) -> bytes:
    """Return the file of a small trained sentencepiece model."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([*TEXTS[1:], *random_texts(300), *["there was a time when there were three"] * 20]),
        model_writer=model,
        minloglevel=2,
        vocab_size=420,
        hard_vocab_limit=False,
        **{
            "model_type": "bpe",
            "byte_fallback": True,
            "normalization_rule_name": "identity",
            "remove_extra_whitespaces": False,
            **how,
        },
    )
    return model.getvalue()


def write(folder: Path, kind: str) -> sentencepiece.SentencePieceProcessor:
    """Write a folder of a kind; returns its model file as loaded by sentencepiece."""
    model_type, name, file, how = KINDS[kind]
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "eos_token_id": 2}))
    (folder / file).write_bytes(trained(**how))
    oracle = sentencepiece.SentencePieceProcessor(model_proto=trained(**how))
    if name is not None:
        mark = {str(oracle.get_piece_size()): {"content": MARK, "special": True}}
        facts = {"tokenizer_class": name, "added_tokens_decoder": mark, **FACTS}
        if kind == "not-legacy":
            facts["legacy"] = False
        (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    return oracle


def grown(codec: TextCodec, ids: list[int], *, skip: bool) -> str:
    """Return the text of tokens that arrive one by one."""
    text = IncrementalDetokenizer(codec, [], skip_special=skip, include_stop=False)
    return "".join([*(text.push([token]) for token in ids), text.finish()])


@pytest.mark.parametrize("kind", OWN_CLASS)
def test_a_folder_with_a_file_of_pieces_alone_reads_and_writes_as_transformers_does(kind: str, tmp_path: Path) -> None:
    write(tmp_path, kind)
    codec, oracle = TextCodec(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in SAMPLES:
        for special in (True, False):
            ids = oracle.encode(text, add_special_tokens=special)
            assert codec.encode(text, special=special) == ids, text
            for skip in (True, False):
                whole = oracle.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
                assert codec.decode(ids, skip_special_tokens=skip) == whole
                assert grown(codec, ids, skip=skip) == whole
    mark = oracle.convert_tokens_to_ids(MARK)
    assert mark in codec.special_ids and codec.encode(f"a{MARK}", special=False)[-1] in (mark, oracle.eos_token_id)
    assert codec.settings["eos_token"] == codec.template.special_tokens["eos_token"] == END


@pytest.mark.parametrize("named", [(), ("bos_token",), tuple(FACTS)], ids=len)
def test_special_tokens_that_no_settings_name_are_those_of_the_conversion(
    named: tuple[str, ...], tmp_path: Path
) -> None:
    """A tokenizer_config.json may name none, some or all of the special tokens, along with other
    keys."""
    write(tmp_path, "llama")
    file = tmp_path / "tokenizer_config.json"
    whole = json.loads(file.read_text())
    file.write_text(json.dumps({name: value for name, value in whole.items() if name not in FACTS or name in named}))
    oracle, codec = AutoTokenizer.from_pretrained(tmp_path), TextCodec(tmp_path)
    wanted = {name: str(text) for name, text in oracle.special_tokens_map.items() if isinstance(text, str)}
    assert wanted.keys() >= {"bos_token", "eos_token"}
    found = codec.template.special_tokens
    assert {name: found.get(name) for name in wanted} == wanted
    assert codec.settings["tokenizer_class"] == whole["tokenizer_class"]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in OWN_CLASS])
def test_a_file_of_pieces_whose_class_is_unknown_is_read_as_by_sentencepiece(kind: str, tmp_path: Path) -> None:
    oracle = write(tmp_path, kind)
    codec = TextCodec(tmp_path)
    for text in (*TEXTS[1:5], *TEXTS[6:], *random_texts(60)):
        ids = oracle.encode(text)
        assert codec.encode(text, special=False) == ids, text
        assert codec.decode(ids) == oracle.decode(ids)
        assert grown(codec, ids, skip=True) == oracle.decode(ids)
    assert codec.encode("a") == ([1] if KINDS[kind][1] else []) + oracle.encode("a")
    assert codec.settings["bos_token"] == "<s>"


def test_byte_level_lists_without_a_tokenizer_json_are_read_too(tmp_path: Path) -> None:
    from sglcore.engine.start import embedded_model

    own = TextCodec(embedded_model())
    model = json.loads(own.tokenizer.to_str())["model"]
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    (tmp_path / "vocab.json").write_text(json.dumps(model["vocab"]))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    codec, oracle = TextCodec(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    for text in SAMPLES:
        ids = oracle.encode(text)
        assert codec.encode(text) == ids
        assert codec.decode(ids) == text == grown(codec, ids, skip=False)


def test_a_conversion_that_cuts_otherwise_than_sentencepiece_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "llama")
    (tmp_path / "tokenizer.model").write_bytes(trained(model_type="unigram"))
    with pytest.raises(ConfigError, match=r"tokenizer\.model cuts .* as by sentencepiece; save a tokenizer\.json"):
        TextCodec(tmp_path)


def test_a_tokenizer_without_the_checkpoints_end_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "silent")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mistral", "eos_token_id": [2, 5000]}))
    with pytest.raises(ConfigError, match=r"eos_token_id 5000; wanted .* \(added_tokens_decoder\)"):
        TextCodec(tmp_path)


def test_an_end_in_a_hole_of_the_vocabulary_is_none_and_one_behind_all_holes_is(tmp_path: Path) -> None:
    """A vocabulary may skip numbers, so that it has fewer tokens than its highest number
    suggests."""
    from sglcore.engine.start import embedded_model

    model = json.loads((embedded_model() / "tokenizer.json").read_text())["model"]
    last = max(model["vocab"].values())
    moved = {token: number + 9 * (number == last) for token, number in model["vocab"].items()}
    (tmp_path / "vocab.json").write_text(json.dumps(moved))
    (tmp_path / "merges.txt").write_text("#version: 0.2\n" + "\n".join(" ".join(pair) for pair in model["merges"]))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "eos_token_id": last + 9}))
    codec = TextCodec(tmp_path)
    assert codec.tokenizer.id_to_token(last + 9) is not None and codec.tokenizer.get_vocab_size() <= last + 9
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2", "eos_token_id": [last + 9, last]}))
    with pytest.raises(ConfigError, match=f"eos_token_id {last};"):
        TextCodec(tmp_path)


@pytest.mark.parametrize("library", ["transformers", "sentencepiece"])
def test_a_library_that_is_not_installed_is_named_with_the_remedy(
    library: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path, "llama")
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ConfigError, match=rf"tokenizer\.model needs {library}: .*sglcore\[slow-tokenizers\]"):
        TextCodec(tmp_path)


def test_what_is_no_tokenizer_is_refused_with_the_file_that_was_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(
        ConfigError, match=r"no tokenizer in .*wanted tokenizer\.json, or one of .*tokenizer\.model.*--skip"
    ):
        TextCodec(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"\x0a\xffdamaged")
    with pytest.raises(ConfigError, match=r"cannot convert .*tokenizer\.model: .*download it again"):
        TextCodec(tmp_path)
