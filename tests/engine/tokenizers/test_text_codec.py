"""A checkpoint's prompts, the settings of a converted tokenizer, and how far texts are read."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers

from sglcore.core.errors import ConfigError
from sglcore.engine.start import embedded_model
from sglcore.engine.tokenizers.chat_template import ChatTemplate, TextError
from sglcore.engine.tokenizers.template_sandbox import MAX_WIDTH
from sglcore.engine.tokenizers.text_codec import TextCodec
from sglcore.engine.tokenizers.text_length import LEAST_PIECE, MOST_SPLIT, USUAL, beginning_over, refuse_longer
from sglcore.schedule.request_errors import ContextError
from tests.engine.tokenizers.test_tokenizer_files import write_lists


def words() -> Tokenizer:
    """Return a tokenizer with a token for each `a` between spaces."""
    found = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    found.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return found


def codec_with(folder: Path, prompts: dict[str, object] | None) -> TextCodec:
    words().save(str(folder / "tokenizer.json"))
    if prompts is not None:
        (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    return TextCodec(folder)


@pytest.mark.parametrize(
    ("default", "name", "wanted"),
    [
        (None, None, "fox"),
        ("query", None, "Find: fox"),
        ("document", None, "fox"),
        ("query", "document", "fox"),
        (None, "query", "Find: fox"),
        (None, "document", "fox"),
        ("query", "query", "Find: fox"),
    ],
)
def test_a_text_follows_the_named_prompt_or_the_default_one(
    default: str | None, name: str | None, wanted: str, tmp_path: Path
) -> None:
    prompts = {"query": "Find: ", "document": ""}
    codec = codec_with(tmp_path, {"prompts": prompts, "default_prompt_name": default})
    assert codec.prompted("fox", name) == wanted


@pytest.mark.parametrize("name", ["passage", ""])
def test_a_prompt_that_the_checkpoint_lacks_is_refused_with_those_it_has(name: str, tmp_path: Path) -> None:
    codec = codec_with(tmp_path, {"prompts": {"query": "Find: ", "document": ""}, "default_prompt_name": "query"})
    with pytest.raises(TextError, match=f"no prompt named '{name}'; wanted query, document"):
        codec.prompted("fox", name)
    codec = codec_with(tmp_path, {})
    assert codec.prompted("fox") == "fox"
    with pytest.raises(TextError, match=f"no prompt named '{name}'; wanted none: the checkpoint has no prompts"):
        codec.prompted("fox", name)


def test_settings_of_the_checkpoint_come_before_those_of_the_conversion(tmp_path: Path) -> None:
    write_lists(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    converted = TextCodec(tmp_path).settings
    assert converted["eos_token"] == "<|endoftext|>"
    record = {"__type": "AddedToken", "content": "<|endoftext|>", "lstrip": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": record, "chat_template": "T"}))
    codec = TextCodec(tmp_path)
    assert codec.settings == {**converted, "eos_token": record, "chat_template": "T"}
    assert codec.template.source() == "T"


def test_a_tokenizer_file_that_is_damaged_is_named(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    with pytest.raises(ConfigError, match=f"{re.escape(str(tmp_path))}/tokenizer.json cannot be read: .*download"):
        TextCodec(tmp_path)


@pytest.mark.parametrize("most", [1, 100, 3000])
def test_a_long_text_is_read_up_to_the_piece_that_has_too_many_tokens(most: int) -> None:
    tokenizer, size = words(), USUAL * most + LEAST_PIECE
    pieces = next(n for n in range(1, 99) if n * (size // 2 - MOST_SPLIT) > most)
    text = "a " * (4 * size)
    assert beginning_over(tokenizer, text, most) == pieces * size
    with pytest.raises(ContextError, match=f"has {8 * size} characters, and the first {pieces * size} of .*{most}\\W"):
        refuse_longer(tokenizer, text, most)


@pytest.mark.parametrize(("more", "is_read"), [(0, False), (1, True)])
def test_a_text_of_twice_the_usual_length_is_not_encoded(more: int, is_read: bool) -> None:
    size = USUAL * 10 + LEAST_PIECE
    text = "a " * size + "a" * more
    assert beginning_over(words(), text, 10) == (size if is_read else len(text))


def test_a_text_of_few_tokens_is_never_too_long() -> None:
    text = " " * 100_000
    assert beginning_over(words(), text, 1) == len(text)
    refuse_longer(words(), text, 1)
    few = ("b" * 4096 + " ") * 30
    assert beginning_over(words(), few, 1) == len(few)


def test_text_that_can_not_be_encoded_is_the_callers_error() -> None:
    codec = TextCodec(embedded_model())
    for call in (lambda: codec.encode("a\ud800"), lambda: codec.encode_texts("a", "\ud800")):
        with pytest.raises(TextError, match="wanted text that UTF-8 can encode"):
            call()


@pytest.mark.parametrize(
    "source",
    ["{{ '\\t'.expandtabs(tabsize=N) }}", "{{ 'x\\ny' | indent(width=N) }}", "{{ 'x y' | wordwrap(width=N) }}"]
    + ["{{ 'x' | center(width=N) }}", "{{ '\\t'.expandtabs(N) }}", "{{ N * 'x' }}", "{{ (N * [1]) | length }}"],
)
def test_a_width_has_its_limit_under_its_name_too(source: str) -> None:
    def rendered(width: int) -> str:
        return ChatTemplate({"default": source.replace("N", str(width))}, {}).render([])

    assert rendered(MAX_WIDTH)
    with pytest.raises(TextError, match=f"{MAX_WIDTH}\\b"):
        rendered(MAX_WIDTH + 1)
