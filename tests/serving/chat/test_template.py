"""Chat templates: rendered as transformers does, in a sandbox that cannot be hung, filled or
escaped."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from sglcore.core.errors import ConfigError
from sglcore.engine.tokenizers.chat_template import ChatTemplate, TextError
from sglcore.engine.tokenizers.template_bounds import Bounds
from sglcore.engine.tokenizers.template_sandbox import MAX_BITS, MAX_WIDTH
from sglcore.engine.tokenizers.text_codec import TextCodec
from tests.serving.chat.checkpoints import FAMILIES, make_codec

TALK = [{"role": "user", "content": "Grüße <b>"}, {"role": "assistant", "content": "ja"}]

BOUNDS = Bounds(steps=20_000, made=1_000_000, output=500_000)


def render(source: str, **variables: object) -> str:
    return ChatTemplate({"default": source}, {"bos_token": "<s>"}).render(TALK, variables=variables)


@pytest.mark.parametrize("name", FAMILIES)
def test_templates_render_as_transformers_renders_them(name: str) -> None:
    source = FAMILIES[name].template
    tools: list[Any] = [{"type": "function", "function": {"name": "f", "description": "é <&>", "parameters": {}}}]
    for given in (None, tools):
        expected, _ = render_jinja_template(
            [TALK], tools=given, chat_template=source, add_generation_prompt=True, bos_token="<s>"
        )
        assert ChatTemplate({"default": source}, {"bos_token": "<s>"}).render(TALK, tools=given) == expected[0]


@pytest.mark.parametrize("tools", [None, [], [{"type": "function"}]], ids=str)
@pytest.mark.parametrize(
    "variables", [{}, {"bos_token": "B", "documents": [{"text": "d"}]}, {"documents": []}], ids=str
)
def test_values_that_a_template_gets_are_those_of_transformers(
    tools: list[Any] | None, variables: dict[str, Any]
) -> None:
    source = "{{ bos_token }} {{ tools is none }} {{ documents is none }} {{ documents }} {{ unknown is defined }}"
    given = {"bos_token": "<s>", **variables}
    expected, _ = render_jinja_template([TALK], tools=tools or None, chat_template=source, **given)
    template = ChatTemplate({"default": source}, {"bos_token": "<s>"})
    assert template.render(TALK, tools=tools, variables=variables) == expected[0]


def test_what_templates_use_is_there() -> None:
    source = (
        "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}"
        "{% generation %}{{ m.content }}{% endgeneration %}{% break %}{% endfor %}"
        "{{ bos_token }}{{ {'a': '<é>'} | tojson }}{{ [1, 2] | tojson(indent=2) }}{{ strftime_now('%Y') | length }}"
    )
    assert render(source) == 'ja<s>{"a": "<é>"}[\n  1,\n  2\n]4'


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("{% for a in range(1000) %}{% for b in range(1000) %}{% endfor %}{% endfor %}", str(BOUNDS.steps)),
        (
            "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
            str(BOUNDS.steps),
        ),
        ("{% for a in [[[]]] recursive %}{{ loop([a, a]) if loop.depth < 50 }}{% endfor %}", str(BOUNDS.steps)),
        ("{% for a in range(200000) %}{% endfor %}", "100000"),
        (
            "{% set n = namespace(s='ab') %}{% for a in range(90) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
            str(BOUNDS.made),
        ),
        (
            "{% set n = namespace(s='ab') %}{% for a in range(90) %}{% set n.s = n.s + n.s %}{% endfor %}",
            str(BOUNDS.made),
        ),
        (
            "{% set n = namespace(s='ab') %}{% for a in range(90) %}"
            "{% set b %}{{ n.s }}{{ n.s }}{% endset %}{% set n.s = b %}{% endfor %}",
            str(BOUNDS.made),
        ),
        (
            "{% set s = 'x' * 50000 %}{% for a in range(90) %}{{ ((s ~ s) | length) ~ '' }}{% endfor %}",
            str(BOUNDS.made),
        ),
        ("{% for a in range(1000) %}" + "x" * 1000 + "{% endfor %}", str(BOUNDS.output)),
        ("{{ 'x' * 1000000000 }}", "100000"),
        ("{{ 'x'.ljust(1000000000) }}", "100000"),
        ("{{ 'x' | center(1000000000) }}", "100000"),
        ("{{ '%999999999d' % 1 }}", "100000"),
        ("{{ '{:999999999}'.format(1) }}", "100000"),
        ("{{ '{:{}}'.format(1, 999999999) }}", "100000"),
        ("{{ '%999999999d' | format(1) }}", "100000"),
        ("{{ '%*d' % (999999999, 1) }}", "100000"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{% for a in [1] recursive %}{{ loop(range(30000)) if loop.depth0 == 0 }}{% endfor %}", str(BOUNDS.steps)),
        ("{{ 9 ** (9 ** 9) }}", "4096"),
        ("{% set n = namespace(i=9) %}{% for a in range(60) %}{% set n.i = n.i * n.i %}{% endfor %}", "4096"),
    ],
)
def test_a_template_that_does_too_much_is_stopped_with_the_number(source: str, said: str) -> None:
    with pytest.raises(TextError, match=rf"\b{said}\b"):
        ChatTemplate({"default": source}, {}, BOUNDS).render(TALK)


@pytest.mark.parametrize(
    "source",
    [
        *("{{ 'x'.ljust(N) }}", "{{ 'x'.rjust(N) }}", "{{ 'x'.center(N) }}", "{{ '7'.zfill(N) }}"),
        *("{{ '\\t'.expandtabs(N) }}", "{{ 'x' | center(N) }}", "{{ 'x' | center(width=N) }}"),
        *("{{ 'x\\ny' | indent(N) }}", "{{ 'x y' | wordwrap(N) }}", "{{ 'x' * N }}", "{{ ([1] * N) | length }}"),
    ],
)
def test_text_is_as_wide_as_the_limit_and_no_wider(source: str) -> None:
    assert render(source.replace("N", str(MAX_WIDTH)))
    with pytest.raises(TextError, match=str(MAX_WIDTH)):
        render(source.replace("N", str(MAX_WIDTH + 1)))


@pytest.mark.parametrize(
    ("source", "most"),
    [("{{ 3 ** N }}", MAX_BITS // 2), ("{{ (2 ** 2000) * (2 ** 2000) * (2 ** N) }}", MAX_BITS - 4002)],
)
def test_numbers_are_as_long_as_the_limit_and_no_longer(source: str, most: int) -> None:
    assert render(source.replace("N", str(most)))
    with pytest.raises(TextError, match=str(MAX_BITS)):
        render(source.replace("N", str(most + 1)))


@pytest.mark.parametrize(
    ("source", "limit", "needed"),
    [
        ("{% for item in given %}{% endfor %}", "steps", 51),
        ("{{ given }}", "made", 50),
        ("{% for item in given %}x{% endfor %}", "output", 50),
    ],
)
def test_work_as_large_as_a_bound_is_done_and_no_larger(source: str, limit: str, needed: int) -> None:
    def done(most: int) -> str:
        template = ChatTemplate({"default": source}, {}, replace(BOUNDS, **{limit: most}))
        return template.render(TALK, variables={"given": "x" * 50})

    assert done(needed) in ("", "x" * 50)
    with pytest.raises(TextError, match=f"more than {needed - 1} "):
        done(needed - 1)


@pytest.mark.parametrize(
    "form", ["", "ensure_ascii=true", "separators=(',', ':')", "sort_keys=true", "indent=3, separators=('; ', '=')"]
)
def test_json_has_the_form_that_transformers_gives_it(form: str) -> None:
    source = "{{ {'b': 'é<&>', 'a': [1, none]} | tojson(FORM) }}".replace("FORM", form)
    expected, _ = render_jinja_template([TALK], chat_template=source)
    assert render(source) == expected[0]


def test_json_is_indented_by_a_few_blanks_at_most() -> None:
    found = [render("{{ [1] | tojson(indent=N) }}".replace("N", str(blanks))) for blanks in (0, 4, 10**9)]
    assert found == ["[\n1\n]", "[\n    1\n]", f"[\n{' ' * 16}1\n]"]


def test_special_tokens_are_text_or_records_and_stay_with_another_template(tmp_path: Path) -> None:
    settings = {"bos_token": "<s>", "eos_token": {"content": "</s>", "lstrip": False}, "pad_token": None, "unk": "u"}
    source = "{{ bos_token }}{{ eos_token }}{{ pad_token }}{{ unk }}"
    template = make_codec(tmp_path, source, settings=settings).template
    assert template.render(TALK) == "<s></s>"
    assert template.replaced("other " + source).render(TALK) == "other <s></s>"


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__ }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{{ raise_exception('not today') }}",
        "{{ nothing.at.all }}",
        "{% if %}",
    ],
)
def test_a_template_can_not_leave_the_sandbox_and_its_errors_are_the_callers(source: str) -> None:
    with pytest.raises(TextError):
        render(source)


def test_callers_can_not_replace_the_messages_or_the_template() -> None:
    names = (
        "messages",
        "tools",
        "chat_template",
        "raise_exception",
        "add_generation_prompt",
        "strftime_now",
        "tokenize",
    )
    for name in names:
        with pytest.raises(TextError, match=name) as error:
            render("{{ messages }}", **{name: "x"})
        assert error.value.field == "chat_template_kwargs"


def test_a_function_that_makes_filler_text_is_not_there() -> None:
    assert render("{{ lipsum is defined }}") == "False"


def test_another_template_replaces_the_one_for_tools_too() -> None:
    template = ChatTemplate({"default": "D", "tool_use": "T"}, {}).replaced("other")
    assert template.render(TALK) == template.render(TALK, tools=[{}]) == "other"


@pytest.mark.parametrize(
    "work", ["{% for a in range(15000) %}{% endfor %}", "{% set s = 'x' * 60000 ~ 'y' * 60000 %}" * 2]
)
def test_a_rendering_leaves_no_count_behind(work: str) -> None:
    template = ChatTemplate({"default": f"{work}."}, {}, BOUNDS)
    assert [template.render(TALK) for _ in range(4)] == ["."] * 4


@pytest.mark.parametrize(
    "name",
    [
        *("chat_template.jinja", "additional_chat_templates/tool_use.jinja", "chat_template.json"),
        *("tokenizer_config.json", "tokenizer.json"),
    ],
)
def test_a_file_of_a_checkpoint_that_is_no_utf8_is_refused_by_its_name(name: str, tmp_path: Path) -> None:
    make_codec(tmp_path, None)
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b'{"chat_template": "\xff"}')
    with pytest.raises(ConfigError, match=f"{re.escape(str(tmp_path / name))} cannot be read"):
        TextCodec(tmp_path)


def test_templates_are_found_in_every_place_a_checkpoint_keeps_them(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T{{ tools | length }}"}]
    template = make_codec(tmp_path / "named", None, settings={"chat_template": named}).template
    assert (template.render(TALK), template.render(TALK, tools=[{}])) == ("D", "T1")
    folder = tmp_path / "files"
    (folder / "additional_chat_templates").mkdir(parents=True)
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("F")
    (folder / "chat_template.jinja").write_text("é")
    template = make_codec(folder, "from the settings").template
    assert (template.render(TALK), template.render(TALK, tools=[{}])) == ("é", "F")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "chat_template.json").write_text(json.dumps({"chat_template": "S"}))
    assert make_codec(tmp_path / "saved", None).template.render(TALK) == "S"
    assert make_codec(tmp_path / "saved", "from the settings").template.render(TALK) == "from the settings"
    with pytest.raises(TextError, match="no chat template"):
        make_codec(tmp_path / "none", None).template.render(TALK)
