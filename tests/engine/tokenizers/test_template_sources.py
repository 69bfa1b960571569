"""Which of a checkpoint's chat templates is used, what is known of its text, and the special tokens
that it may name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from sglcore.engine.tokenizers.chat_template import ChatTemplate, TextError

TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}


def folder_with(folder: Path, settings: dict[str, Any], files: dict[str, str]) -> Path:
    """Write a tokenizer with settings and files of templates."""
    Tokenizer(models.WordLevel({"[UNK]": 0, "<s>": 1}, unk_token="[UNK]")).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    for name, text in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    return folder


def loaded(folder: Path) -> ChatTemplate:
    return ChatTemplate.load(folder, json.loads((folder / "tokenizer_config.json").read_text()))


NAMED = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "talk"}]
JINJA, MORE = "chat_template.jinja", "additional_chat_templates/tool_use.jinja"


@pytest.mark.parametrize(
    ("setting", "files"),
    [
        ("talk", {}),
        (NAMED, {}),
        (NAMED[::-1], {}),
        (NAMED[1:], {}),
        ("talk", {JINJA: "file"}),
        (None, {JINJA: "file"}),
        (None, {JINJA: "file", MORE: "more"}),
        ("talk", {JINJA: "file", MORE: "more"}),
        (NAMED, {JINJA: "file", MORE: "more"}),
    ],
    ids=str,
)
def test_the_template_is_the_one_that_transformers_takes(setting: Any, files: dict[str, str], tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {} if setting is None else {"chat_template": setting}, files)
    oracle, template = PreTrainedTokenizerFast.from_pretrained(folder), loaded(folder)
    assert template.source() == oracle.get_chat_template()
    assert template.source(tools=True) == oracle.get_chat_template(tools=[TOOL])
    for tools in (None, [], [TOOL]):
        assert template.render([], tools=tools) == template.source(tools=bool(tools))


def test_a_file_replaces_the_setting_of_its_name_alone(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, {"chat_template": NAMED}, {MORE: "more", "additional_chat_templates/rag.jinja": "r"})
    (folder / "additional_chat_templates" / "notes.txt").write_text("no template")
    assert loaded(folder).sources == {"default": "talk", "tool_use": "more", "rag": "r"}
    (folder / "additional_chat_templates" / "default.jinja").write_text("other")
    assert loaded(folder).source() == "other"
    (folder / JINJA).write_text("file")
    assert loaded(folder).source() == "file" and loaded(folder).source(tools=True) == "more"


@pytest.mark.parametrize(
    ("setting", "files", "wanted"),
    [
        (None, {}, "saved"),
        ("talk", {}, "talk"),
        (NAMED, {}, "talk"),
        (NAMED[:1], {}, None),
        (None, {JINJA: "file"}, "file"),
        (None, {MORE: "more"}, "saved"),
    ],
    ids=str,
)
def test_a_processors_file_is_read_where_the_settings_have_no_template(
    setting: Any, files: dict[str, str], wanted: str | None, tmp_path: Path
) -> None:
    saved = {"chat_template.json": json.dumps({"chat_template": "saved"})}
    folder = folder_with(tmp_path, {} if setting is None else {"chat_template": setting}, {**saved, **files})
    assert loaded(folder).source() == wanted


def test_a_conversation_without_tools_needs_a_template_of_its_own() -> None:
    template = ChatTemplate({"tool_use": "tools"}, {})
    assert template.source() is None and template.render([], tools=[TOOL]) == "tools"
    assert template.variables() == frozenset() and template.literals() == ""
    for tools in (None, []):
        with pytest.raises(TextError, match="no chat template; give a prompt instead of messages"):
            template.render([], tools=tools)


def test_an_empty_template_writes_nothing() -> None:
    template = ChatTemplate({"default": ""}, {})
    assert template.render([{"role": "user", "content": "a"}]) == ""
    assert template.variables() == frozenset() and template.literals() == ""


BOTH = ChatTemplate(
    {
        "default": "{% set own = 3 %}one{% for m in messages %}{{ m.content ~ end_mark }}{% endfor %}{{ own }}two",
        "tool_use": "{% macro f(t) %}three{{ t | tojson }}{% endmacro %}{{ f(tools) if thinking == 'four' else '' }}",
    },
    {},
)


def test_the_variables_and_the_text_of_a_template_are_those_of_the_one_that_is_used() -> None:
    assert {"messages", "end_mark"} <= BOTH.variables() and not {"tools", "thinking"} & BOTH.variables()
    assert {"tools", "thinking"} <= BOTH.variables(tools=True)
    assert not {"messages", "end_mark"} & BOTH.variables(tools=True)
    assert [line for line in BOTH.literals().splitlines() if line] == ["one", "two"]
    assert [line for line in BOTH.literals(tools=True).splitlines() if line] == ["three", "four"]
    alone = BOTH.replaced("only {{ x }}")
    assert alone.variables() == alone.variables(tools=True) == {"x"} and alone.literals(tools=True) == "only "


def test_what_a_template_sets_itself_and_does_not_read_is_no_variable_of_callers() -> None:
    assert ChatTemplate({"default": "{% set own = given %}"}, {}).variables() == {"given"}
    assert ChatTemplate({"default": "{% for m in given %}{% endfor %}"}, {}).variables() == {"given"}


@pytest.mark.parametrize("source", ["{% if %}", "{{ x | nothing }}", "{{ 'a' }", "{% endfor %}"])
def test_a_template_that_can_not_be_parsed_is_told_by_each_use_of_it(source: str) -> None:
    template = ChatTemplate({"default": "fine", "tool_use": source}, {})
    assert template.render([]) == "fine" and template.literals() == "fine"
    for use in (lambda: template.render([], tools=[TOOL]), lambda: template.variables(tools=True)):
        for _ in range(2):
            with pytest.raises(TextError, match="the chat template cannot be read: "):
                use()


@pytest.mark.parametrize("is_begun", [False, True])
def test_an_answer_is_begun_where_that_is_asked_for(is_begun: bool) -> None:
    template = ChatTemplate({"default": "{{ messages | length }}{{ add_generation_prompt }}"}, {})
    assert template.render([{}, {}], add_generation_prompt=is_begun) == f"2{is_begun}"
    assert template.render(({},)) == "1True"


def test_messages_that_are_no_list_are_one_to_the_template() -> None:
    template = ChatTemplate({"default": "{{ messages + tools }}", "tool_use": "{{ messages + tools }}"}, {})
    assert template.render(({"a": 1},), tools=({"b": 2},)) == "[{'a': 1}, {'b': 2}]"


def test_every_setting_of_a_special_token_is_named_and_no_other(tmp_path: Path) -> None:
    settings = {
        **{"bos_token": "<s>", "image_token": {"content": "<i>"}, "pad_token": None, "cls_token": "", "x_tokens": "x"},
        **{"add_bos_token": True, "sep_token": {"special": True}, "mask_token": {"content": None}, "unk_token": 3},
    }
    found = ChatTemplate.load(tmp_path, settings)
    assert found.special_tokens == {"bos_token": "<s>", "image_token": "<i>"}
    names = " ".join(settings)
    source = "".join(f"{{{{ {name} is defined }}}} " for name in names.split())
    wanted = [str(name in found.special_tokens) for name in settings]
    assert found.replaced(source).render([]).split() == wanted


def test_what_a_template_is_made_of_does_not_change_with_its_callers_values() -> None:
    sources, tokens = {"default": "{{ bos_token }}"}, {"bos_token": "<s>"}
    template = ChatTemplate(sources, tokens)
    sources["default"], tokens["bos_token"] = "other", "<t>"
    assert template.render([]) == template.replaced("{{ bos_token }}").render([]) == "<s>"
