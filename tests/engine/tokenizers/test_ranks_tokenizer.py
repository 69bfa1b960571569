"""Tokenizers stored as BPE rank files, compared with tiktoken on the same files."""

from __future__ import annotations

import base64
import json
import sys
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from tokenizers import Tokenizer, models, pre_tokenizers, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from sglcore.core.errors import ConfigError
from sglcore.engine.tokenizers.text_codec import TextCodec
from tests.engine.tokenizers.test_converted_tokenizer import grown
from tests.engine.tokenizers.test_gguf_tokenizer import TEXTS, random_texts

HAN = (
    r"[\p{Han}]+",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'d)?",
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'d)?",
    r"\p{N}{1,3}",
    r" ?[^\s\p{L}\p{N}]+[\r\n]*",
    r"\s*[\r\n]+",
    r"\s+(?!\S)",
    r"\s+",
)
"""Kimi's pattern, which splits Chinese characters from other letters."""
CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Mistral's pattern, with one digit per token."""
LISTED = {0: ("[BOS]", True), 1: ("[EOS]", True), 3: ("<|tool|>", False), 6: ("<|im_end|>", True)}
"""Added tokens by their offset after the ranks: the text, and whether it is special."""
SAMPLES = (*TEXTS, *random_texts(60), "\u4e2d\u6587English\u6df7\u5408 1234567890", "Caf\u00e9's  \r\n\r\n\t x ")


@cache
def ranks() -> dict[bytes, int]:
    """The ranks of a small vocabulary: first all bytes in order, as mistral-common requires, then
    the merges in order."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        [*TEXTS, *random_texts(300), *["there were 1234 caf\u00e9s, it's \u4e2d\u6587"] * 20], trainer
    )
    byte_of = {character: value for value, character in bytes_to_unicode().items()}
    by_id = sorted(tokenizer.get_vocab().items(), key=lambda entry: entry[1])
    merged = [bytes(byte_of[each] for each in text) for text, _ in by_id if len(text) > 1]
    return {token: rank for rank, token in enumerate([*(bytes([value]) for value in range(256)), *merged])}


def write_ranks(folder: Path, code: str | None, *, name: str = "tiktoken.model") -> tiktoken.Encoding:
    """Write a folder with a rank file; returns the tokenizer that tiktoken makes."""
    size = len(ranks())
    lines = (b"%s %d" % (base64.b64encode(token), rank) for token, rank in ranks().items())
    (folder / name).write_bytes(b"\n".join(lines) + b"\n")
    (folder / "config.json").write_text(json.dumps({"model_type": "deepseek_v3", "eos_token_id": size + 1}))
    listed = {str(size + place): {"content": text, "special": special} for place, (text, special) in LISTED.items()}
    facts = {"tokenizer_class": "TikTokenTokenizer", "added_tokens_decoder": listed, "eos_token": "[EOS]"}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    if code is not None:
        (folder / "tokenization_kimi.py").write_text(code)
    names = {text: size + place for place, (text, _) in LISTED.items()}
    return tiktoken.Encoding(name="own", pat_str="|".join(HAN), mergeable_ranks=ranks(), special_tokens=names)


def stated(how: str = "joined") -> str:
    """Return code that contains the pattern and exits if it is run."""
    parts = ",\n".join(f'        r"""{part}"""' for part in HAN)
    value = f'"|".join([\n{parts}\n    ])' if how == "joined" else f'r"""{"|".join(HAN)}"""'
    return f"raise SystemExit('this was run')\nclass TikTokenTokenizer:\n    pat_str = {value}\n"


@pytest.mark.parametrize("name", ["tiktoken.model", "tokenizer.model"])
@pytest.mark.parametrize("how", ["joined", "whole"])
def test_a_file_of_ranks_reads_and_writes_as_by_tiktoken(name: str, how: str, tmp_path: Path) -> None:
    oracle = write_ranks(tmp_path, stated(how), name=name)
    codec = TextCodec(tmp_path)
    for text in (*SAMPLES, "a<|tool|>b[EOS]", "<|im_end|>\n\u4f60"):
        ids = oracle.encode(text, allowed_special="all")
        assert codec.encode(text) == ids, text
        assert codec.decode(ids, skip_special_tokens=False) == oracle.decode(ids) == grown(codec, ids, skip=False)
    first = len(ranks())
    assert codec.special_ids == {first + place for place in (0, 1, 2, 4, 5, 6)}
    assert codec.tokenizer.id_to_token(first + 2) == f"<|reserved_token_{first + 2}|>"
    assert codec.template.special_tokens["eos_token"] == "[EOS]"


@pytest.mark.parametrize(
    ("code", "count"),
    [
        (None, 0),
        ("pat_str = 'a' + str(1)\nother = 'b'", 0),
        ("pat_str = 'unfinished", 0),
        ("pat_str = 'a'\nPAT_STR = 'b'", 2),
    ],
)
def test_ranks_without_one_stated_pattern_are_refused(code: str | None, count: int, tmp_path: Path) -> None:
    write_ranks(tmp_path, code)
    with pytest.raises(
        ConfigError, match=rf"only ranks, and {count} patterns.*tokenization_\*\.py, which is read and not"
    ):
        TextCodec(tmp_path)


ORDINARY = r"(?i:'s|'t|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
MARKS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *(f"<|extra_{number}|>" for number in range(7)))
NORMALIZED = "def tokenize(self, text):\n    return unicodedata.normalize('NFC', text)\n"
LISTS: dict[str, str] = {
    "numbered": "tuple(enumerate(((ENDOFTEXT, START, '<|im_end|>',) + EXTRAS), start=FIRST))",
    "behind the ranks": "(ENDOFTEXT, START, '<|im_end|>',) + EXTRAS",
    "listed": "[ENDOFTEXT, START] + ['<|im_end|>'] + list(f'<|extra_{i}|>' for i in range(7))",
}
"""The lists of special tokens in the code of Qwen's first models and of Hunyuan's."""


def marked(specials: str, *, first: int | None = None, normalized: str = NORMALIZED, more: str = "") -> str:
    """Return code with such a list; it exits if it is run."""
    half = ORDINARY.index("| ?")
    return (
        "raise SystemExit('this was run')\nimport tiktoken, unicodedata\n"
        f'PAT_STR = r"""{ORDINARY[:half]}""" \\\n          r"""{ORDINARY[half:]}"""\n'
        "ENDOFTEXT = '<|endoftext|>'\nSTART = '<|im_start|>'\nEXTRAS = tuple((f'<|extra_{i}|>' for i in range(7)))\n"
        f"FIRST = {len(ranks()) if first is None else first}\n"
        f"SPECIAL_TOKENS = {specials}\n{normalized}{more}"
    )


def write_marked(folder: Path, name: str, code: str) -> tiktoken.Encoding:
    """Write a folder with added tokens in its code only; returns the tokenizer that tiktoken
    makes."""
    write_ranks(folder, code, name=name)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "QWenTokenizer"}))
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen", "eos_token_id": len(ranks()) + 2}))
    ids = {text: len(ranks()) + place for place, text in enumerate(MARKS)}
    return tiktoken.Encoding(name="own", pat_str=ORDINARY, mergeable_ranks=ranks(), special_tokens=ids)


@pytest.mark.parametrize("specials", LISTS)
@pytest.mark.parametrize("name", ["qwen.tiktoken", "hy.tiktoken"])
def test_special_tokens_and_the_form_of_texts_are_those_that_the_code_beside_the_ranks_states(
    name: str, specials: str, tmp_path: Path
) -> None:
    oracle = write_marked(tmp_path, name, marked(LISTS[specials]))
    codec = TextCodec(tmp_path)
    for text in (*SAMPLES, "A\u0301 e\u0302\u1100\u1161", "<|im_start|>user\nhi<|im_end|><|extra_6|>"):
        formed = unicodedata.normalize("NFC", text)
        ids = oracle.encode(formed, allowed_special="all")
        assert codec.encode(text) == ids, text
        assert codec.decode(ids, skip_special_tokens=False) == formed == grown(codec, ids, skip=False)
    assert codec.special_ids == set(range(len(ranks()), len(ranks()) + len(MARKS)))


def test_texts_stay_as_they_are_where_the_code_beside_the_ranks_puts_them_into_no_form(tmp_path: Path) -> None:
    oracle = write_marked(tmp_path, "qwen.tiktoken", marked(LISTS["numbered"], normalized=""))
    assert TextCodec(tmp_path).encode("A\u0301") == oracle.encode("A\u0301") != oracle.encode("\u00c1")


def test_a_token_that_the_settings_list_goes_before_what_the_code_beside_the_ranks_states(tmp_path: Path) -> None:
    write_marked(tmp_path, "hy.tiktoken", marked(LISTS["numbered"]))
    own = {str(len(ranks()) + 1): {"content": "<|mine|>", "special": False}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": own}))
    codec = TextCodec(tmp_path)
    assert codec.encode("<|mine|><|im_end|>") == [len(ranks()) + 1, len(ranks()) + 2]
    assert len(ranks()) + 1 not in codec.special_ids


@pytest.mark.parametrize(
    ("code", "found"),
    [
        (
            marked(LISTS["numbered"], first=300),
            r"ranks, and .* special token '<\|endoftext\|>' the id 300; wanted ids after",
        ),
        (
            marked(LISTS["numbered"], more="unicodedata.normalize('NFD', '')"),
            r"forms \['NFC', 'NFD'\]; wanted one of NFC",
        ),
        (
            marked(LISTS["numbered"], normalized="unicodedata.normalize(form, '')"),
            r"forms \['form'\]; wanted one of NFC",
        ),
        (marked(LISTS["numbered"], more="special_tokens = ('a', 'b')"), r"2 lists of special tokens .*wanted one"),
        ("PAT_STR = make()", r"0 patterns .*wanted one pat_str in a file tokenization_\*\.py"),
    ],
)
def test_code_beside_ranks_that_states_no_tokenizer_is_refused_with_the_remedy(
    code: str, found: str, tmp_path: Path
) -> None:
    write_marked(tmp_path, "qwen.tiktoken", code)
    with pytest.raises(
        ConfigError, match=f"{found}.*tokenizer.json next to the weights, or start with --skip-tokenizer"
    ):
        TextCodec(tmp_path)


@pytest.mark.parametrize(
    "value",
    [
        "tuple(x for x in range(10**9))",
        "tuple(range(10**9))",
        "tuple(f'{i}' for i in range(1000000000))",
        "tuple(f'{i}' for i in range(10_000)) + ('a',)",
        "tuple(str(i) for i in range(3))",
        "('a',) + ['b'][0]",
        "open('/etc/passwd').read()",
        "('a', None)",
        "(('a', 1),)",
        "()",
        "{'a'}",
        "'a'",
        "tuple(f'<|{a}|>' for a in range(9) if a != 3)",
        *("tuple(f'<|{a:02}|>' for a in range(9))", "tuple(f'<|{a!r}|>' for a in range(9))"),
    ],
)
def test_what_is_no_list_of_constants_is_no_special_token(value: str, tmp_path: Path) -> None:
    write_marked(tmp_path, "qwen.tiktoken", marked(value))
    with pytest.raises(ConfigError, match=rf"eos_token_id {len(ranks()) + 2}; wanted .*added_tokens_decoder"):
        TextCodec(tmp_path)


def test_ranks_that_tiktoken_cuts_in_another_way_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_ranks(tmp_path, stated())
    real = tiktoken.Encoding
    monkeypatch.setattr(tiktoken, "Encoding", lambda **how: real(**{**how, "pat_str": CASED}))
    with pytest.raises(ConfigError, match=r"conversion of .*tiktoken\.model cuts .* as by tiktoken"):
        TextCodec(tmp_path)


@pytest.mark.parametrize("damage", ["missing", "twice", "text"])
def test_a_damaged_file_of_ranks_is_refused_with_the_line(damage: str, tmp_path: Path) -> None:
    write_ranks(tmp_path, stated())
    file = tmp_path / "tiktoken.model"
    lines = file.read_bytes().splitlines()
    lines[300] = {"missing": b"", "twice": lines[299].split()[0] + b" 300", "text": b"!? 300"}[damage]
    file.write_bytes(b"\n".join(lines))
    number = 302 if damage == "missing" else 301
    with pytest.raises(ConfigError, match=rf"line {number} of .*tiktoken\.model is .*the rank 300"):
        TextCodec(tmp_path)


def test_a_file_of_ranks_that_changes_is_read_anew(tmp_path: Path) -> None:
    write_ranks(tmp_path, stated())
    before = TextCodec(tmp_path).tokenizer.get_vocab_size()
    file = tmp_path / "tiktoken.model"
    file.write_bytes(file.read_bytes() + base64.b64encode(b"qzqz") + b" %d\n" % len(ranks()))
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    moved = {str(int(place) + 1): token for place, token in config["added_tokens_decoder"].items()}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "added_tokens_decoder": moved}))
    assert TextCodec(tmp_path).tokenizer.get_vocab_size() == before + 1


def test_ranks_without_the_end_of_the_checkpoint_are_refused(tmp_path: Path) -> None:
    write_ranks(tmp_path, stated())
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ConfigError, match=rf"eos_token_id {len(ranks()) + 1}; wanted .*added_tokens_decoder"):
        TextCodec(tmp_path)


SPECIAL = ("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<pad>")


def write_tekken(folder: Path, **more: Any) -> tiktoken.Encoding:
    """Write a folder with a tekken.json that has nine entries more than its tokenizer uses, and 32
    special tokens with six of them named. Returns tiktoken's tokenizer, with ids that start at
    0."""
    taken = dict(list(ranks().items())[:-9])
    entries = [{"rank": rank, "token_bytes": base64.b64encode(token).decode()} for token, rank in ranks().items()]
    entries[-1]["token_bytes"] = base64.b64encode(b"{}").decode()  # would change how a probe is split
    content = {
        "config": {
            "pattern": CASED,
            "num_vocab_tokens": len(entries),
            "default_vocab_size": len(taken) + 32,
            "default_num_special_tokens": 32,
            "version": "v11",
        },
        "vocab": entries,
        "special_tokens": [{"rank": rank, "token_str": text, "is_control": True} for rank, text in enumerate(SPECIAL)],
        **more,
    }
    (folder / "tekken.json").write_text(json.dumps(content))
    (folder / "config.json").write_text(json.dumps({"model_type": "mistral", "eos_token_id": 2}))
    return tiktoken.Encoding(name="own", pat_str=CASED, mergeable_ranks=taken, special_tokens={})


def test_a_tekken_file_reads_and_writes_as_by_tiktoken_behind_its_special_tokens(tmp_path: Path) -> None:
    oracle, codec = write_tekken(tmp_path), TextCodec(tmp_path)
    for text in SAMPLES:
        ids = [32 + rank for rank in oracle.encode_ordinary(text)]
        assert codec.encode(text) == [1, *ids] and codec.encode(text, special=False) == ids, text
        assert codec.decode([1, *ids]) == text == grown(codec, [1, *ids], skip=True)
    assert codec.encode("[INST]a[/INST]", special=False)[::2] == [3, 4]
    assert codec.encode_texts("a", "b")[0] == [*codec.encode("a"), *codec.encode("b")]
    assert codec.special_ids == set(range(32)) and codec.template.special_tokens["eos_token"] == "</s>"
    assert codec.template.source() is None


def test_the_chat_template_that_is_made_of_a_tekken_file_is_used_unless_the_folder_has_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tekken(tmp_path)
    monkeypatch.setattr(
        "transformers.integrations.mistral.tokenizer._resolve_chat_template", lambda *_: "{{ bos_token }}"
    )
    assert TextCodec(tmp_path).render_chat([{"role": "user", "content": "hi"}]) == "<s>"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "set {{ eos_token }}"}))
    assert TextCodec(tmp_path).render_chat([{"role": "user", "content": "hi"}]) == "set </s>"
    (tmp_path / "chat_template.jinja").write_text("own")
    assert TextCodec(tmp_path).render_chat([{"role": "user", "content": "hi"}]) == "own"


def test_an_old_tekken_file_without_special_tokens_names_the_library_that_knows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tekken(tmp_path, special_tokens=None)
    monkeypatch.setitem(sys.modules, "mistral_common", None)
    with pytest.raises(ConfigError, match=r"tekken\.json needs mistral_common: .*pip install mistral-common"):
        TextCodec(tmp_path)


@pytest.mark.parametrize("missing", ["transformers", "tiktoken"])
@pytest.mark.parametrize("kind", ["tekken.json", "tiktoken.model"])
def test_a_library_that_is_not_installed_is_named(
    kind: str, missing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tekken(tmp_path) if kind == "tekken.json" else write_ranks(tmp_path, stated())
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=rf"{kind} needs {missing}: .*sglcore\[slow-tokenizers\]"):
        TextCodec(tmp_path)


def test_a_damaged_tekken_file_is_refused_with_the_reason(tmp_path: Path) -> None:
    write_tekken(tmp_path)
    content = json.loads((tmp_path / "tekken.json").read_text())
    missing = {**content, "vocab": [entry for entry in content["vocab"] if entry["rank"] != 7]}
    for damaged in ({**content, "vocab": content["vocab"][:300]}, missing, {**content, "config": {}}, []):
        (tmp_path / "tekken.json").write_text(json.dumps(damaged))
        with pytest.raises(ConfigError, match=r"cannot convert .*tekken\.json: .*download it again"):
            TextCodec(tmp_path)
