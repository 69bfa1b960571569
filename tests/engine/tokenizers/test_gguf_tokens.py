"""What the tokenizer of a GGUF file does where its metadata leaves something out, and with tokens
of every type."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from gguf import TokenType

from sglcore.core.errors import CheckpointError
from sglcore.engine.tokenizers.text_codec import TextCodec
from tests.engine.tokenizers.test_gguf_tokenizer import SMALL, write

LETTERS = {"ggml.tokens": ["a", "b", "!", "a!b", "ab"], "ggml.scores": [0.0, -1.0, -2.0, -3.0, -4.0]}
KINDS: dict[str, dict[str, Any]] = {
    "gpt2": {"ggml.model": "gpt2", "ggml.pre": "gpt-2", "ggml.tokens": LETTERS["ggml.tokens"], "ggml.merges": ["a b"]},
    "llama": {"ggml.model": "llama", "ggml.add_space_prefix": False, **LETTERS},
}


def codec_of(folder: Path, values: dict[str, Any]) -> TextCodec:
    return TextCodec(write(folder / "m.gguf", values))


def test_bytes_without_a_rule_that_cuts_texts_are_refused_with_the_known_rules(tmp_path: Path) -> None:
    values = {key: value for key, value in SMALL.items() if key != "ggml.pre"}
    known = "llama-bpe, qwen2, dbrx, gpt-2, smollm, llama3, llama-v3, smaug-bpe, deepseek-r1-qwen, chatglm-bpe, glm4, "
    with pytest.raises(
        CheckpointError, match=re.escape(f"the rule 'none' (tokenizer.ggml.pre); wanted one of {known}")
    ):
        codec_of(tmp_path, values)


@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize("kind", sorted(TokenType))
def test_tokens_of_two_types_alone_are_matched_whole(kind: TokenType, model: str, tmp_path: Path) -> None:
    codec = codec_of(tmp_path, {**KINDS[model], "ggml.token_type": [1, 1, 1, int(kind), 1]})
    is_mark = kind in (TokenType.CONTROL, TokenType.USER_DEFINED)
    assert codec.encode("a!bab", special=False) == ([3, 4] if is_mark else [0, 2, 1, 4])
    assert codec.special_ids == ({3} if kind is TokenType.CONTROL else set())


@pytest.mark.parametrize("model", KINDS)
@pytest.mark.parametrize("kinds", [None, [1], [1, 1, 1], [1, 1, 1, 3], [1, 1, 1, 4]])
def test_tokens_without_a_type_are_ordinary(kinds: list[int] | None, model: str, tmp_path: Path) -> None:
    codec = codec_of(tmp_path, {**KINDS[model], **({} if kinds is None else {"ggml.token_type": kinds})})
    is_mark = kinds is not None and len(kinds) == 4
    assert codec.encode("a!bab", special=False) == ([3, 4] if is_mark else [0, 2, 1, 4])
    assert codec.decode([4]) == "ab" and codec.special_ids == ({3} if kinds == [1, 1, 1, 3] else set())


def test_unknown_characters_become_the_first_token_where_the_file_names_none(tmp_path: Path) -> None:
    codec = codec_of(tmp_path, {**KINDS["llama"], "ggml.tokens": ["?", "b", "!", "a!b", "ab"]})
    assert codec.encode("xb!yy", special=False) == [0, 1, 2, 0]


@pytest.mark.parametrize(("prefix", "is_put"), [(None, True), (True, True), (False, False)])
def test_a_blank_is_put_before_a_text_and_taken_from_it_unless_the_file_says_not_to(
    prefix: bool | None, is_put: bool, tmp_path: Path
) -> None:
    tokens = ["<unk>", "\u2581", "a", "\u2581a"]
    values: dict[str, Any] = {"ggml.model": "llama", "ggml.tokens": tokens, "ggml.scores": [0.0, -1.0, -2.0, 0.0]}
    codec = codec_of(tmp_path, {**values, **({} if prefix is None else {"ggml.add_space_prefix": prefix})})
    assert codec.encode("a a", special=False) == ([3, 3] if is_put else [2, 3])
    assert codec.encode(" a", special=False) == ([1, 3] if is_put else [3])
    assert codec.decode([3, 3]) == ("a a" if is_put else " a a")
    assert codec.decode([1, 3]) == (" a" if is_put else "  a") and codec.decode([2]) == "a"


ENDS = {"ggml.bos_token_id": 0, "ggml.eos_token_id": 1}
PREFIXED = {"llama", "gpt2 llama-bpe", "gpt2 llama3", "gpt2 llama-v3", "gpt2 smaug-bpe"}
"""Vocabularies whose prompts begin with BOS, if the file does not say whether they do."""


@pytest.mark.parametrize("asks", [None, True, False])
@pytest.mark.parametrize(
    "name",
    ["llama", *(f"gpt2 {pre}" for pre in ("llama-bpe", "llama3", "llama-v3", "smaug-bpe", "gpt-2", "qwen2", "glm4"))],
)
def test_a_prompt_has_the_ends_that_are_usual_unless_the_file_decides(
    name: str, asks: bool | None, tmp_path: Path
) -> None:
    model, _, pre = name.partition(" ")
    values = {**KINDS[model], **({"ggml.pre": pre} if pre else {}), **ENDS}
    asked = {} if asks is None else {"ggml.add_bos_token": asks, "ggml.add_eos_token": asks}
    begins = name in PREFIXED if asks is None else asks
    ids = codec_of(tmp_path, {**values, **asked}).encode("!")
    assert ids == [*([0] if begins else []), 2, *([1] if asks else [])]


@pytest.mark.parametrize("missing", ["bos", "eos"])
def test_an_end_that_has_no_token_is_not_put_to_a_prompt(missing: str, tmp_path: Path) -> None:
    asked = {"ggml.add_bos_token": True, "ggml.add_eos_token": True}
    named = {key: value for key, value in ENDS.items() if missing not in key}
    ids = codec_of(tmp_path, {**KINDS["llama"], **asked, **named}).encode("!")
    assert ids == ([2, 1] if missing == "bos" else [0, 2])


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, {}),
        ({"chat_template": ""}, {}),
        ({"chat_template": "one"}, {"default": "one"}),
        ({"chat_template.rag": "two", "chat_templates": ["rag"]}, {"rag": "two"}),
        ({"chat_template": "", "chat_template.rag": "two", "chat_templates": ["rag"]}, {"rag": "two"}),
        ({"chat_template": "one", "chat_template.rag": "two"}, {"default": "one"}),
        ({"chat_template": "one", "chat_templates": ["rag"]}, {"default": "one"}),
    ],
    ids=str,
)
def test_the_templates_are_those_that_the_file_lists_and_its_own(
    given: dict[str, Any], wanted: dict[str, str], tmp_path: Path
) -> None:
    assert codec_of(tmp_path, {**SMALL, **given}).template.sources == wanted


def test_a_named_template_that_is_no_text_is_damage(tmp_path: Path) -> None:
    values = {**SMALL, "chat_template": "one", "chat_template.rag": 3, "chat_templates": ["rag"]}
    with pytest.raises(CheckpointError, match="damaged tokenizer: TypeError a chat template that is not text"):
        codec_of(tmp_path, values)


def test_a_piece_is_made_of_its_parts_with_the_best_score_first(tmp_path: Path) -> None:
    tokens, scores = ["a", "b", "c", "ab", "bc", "abc"], [-9.0, -9.0, -9.0, -2.0, -1.0, -3.0]
    values: dict[str, Any] = {"ggml.model": "llama", "ggml.tokens": tokens, "ggml.add_space_prefix": False}
    assert codec_of(tmp_path, {**values, "ggml.scores": scores}).encode("abca", special=False) == [5, 0]
    worse = [*scores[:5], -99.0]
    assert codec_of(tmp_path, {**values, "ggml.scores": worse}).encode("abca", special=False) == [5, 0]
    for pair, wanted in (([-1.0, -5.0], [3, 2, 4]), ([-5.0, -1.0], [0, 4, 4])):
        own = {**values, "ggml.tokens": tokens[:5], "ggml.scores": [*scores[:3], *pair]}
        assert codec_of(tmp_path, own).encode("abcbc", special=False) == wanted


LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "smaug-bpe")
OTHERS = ("qwen2", "deepseek-r1-qwen", "dbrx", "chatglm-bpe", "glm4", "gpt-2", "gpt2", "olmo", "smollm", "refact")


@pytest.mark.parametrize("pre", [*LLAMA3, *OTHERS])
def test_a_word_that_no_merges_make_is_a_token_by_the_rules_of_llama_3_alone(pre: str, tmp_path: Path) -> None:
    values = {**SMALL, "ggml.pre": pre, "ggml.tokens": ["a", "b", "ab", "aba"], "ggml.merges": ["a b"]}
    assert codec_of(tmp_path, values).encode("aba", special=False) == ([3] if pre in LLAMA3 else [2, 0])
