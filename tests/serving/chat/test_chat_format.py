"""A checkpoint's chat format: conversations to prompts, and answers to deltas."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sglcore.core.errors import ConfigError
from sglcore.engine.start import embedded_model
from sglcore.engine.tokenizers.chat_template import TextError
from sglcore.engine.tokenizers.text_codec import TextCodec
from sglcore.serving.chat.format import CUT, ChatFormat
from sglcore.serving.chat.parsers.delta import calls_of, text_of
from tests.serving.chat.checkpoints import FAMILIES, HERMES, codec_of, make_codec

TOOLS = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}]
USER = {"role": "user", "content": "Hi"}


def called(arguments: Any, **given: Any) -> dict[str, Any]:
    """An assistant message with a call."""
    function = {"name": "f", "arguments": arguments}
    return {"role": "assistant", "tool_calls": [{"id": "abcdefghi", "type": "function", "function": function}], **given}


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.tools])
@pytest.mark.parametrize("given", ['{"a": "é"}', {"a": "é"}], ids=["text", "object"])
def test_calls_of_earlier_turns_are_written_as_the_template_writes_them(
    formats: dict[str, ChatFormat], name: str, given: Any
) -> None:
    found = formats[name]
    text = found.render(
        [USER, called(given, content=None, refusal=None)], tools=TOOLS, add_generation_prompt=False
    ).text
    answer = text[text.rindex("Hi") :]
    assert "None" not in answer and "é" in answer
    opening = found.render([USER], tools=TOOLS, add_generation_prompt=True).text
    start = len(opening) if text.startswith(opening) else text.rindex("Hi") + 2
    if name != "llama" or text.startswith(opening):
        deltas = found.stream(tools=TOOLS, reasoning_open=False).whole(text[start:])
        assert [(call.name, json.loads(call.arguments)) for call in calls_of(deltas)] == [("f", {"a": "é"})]


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.tools])
def test_a_call_whose_arguments_are_no_object_is_shown_to_the_model(formats: dict[str, ChatFormat], name: str) -> None:
    for wrong in ('{"city": Rome', '{"a": "b', "[1]", "nothing", "1", "null"):
        text = formats[name].render([USER, called(wrong)], tools=TOOLS).text
        assert wrong in text or json.dumps(wrong)[1:-1] in text


@pytest.mark.parametrize("name", [name for name, family in FAMILIES.items() if family.tools])
@pytest.mark.parametrize("mark", ["[", '{"a":'])
def test_a_call_whose_arguments_nest_deeper_than_is_read_is_shown_to_the_model(
    formats: dict[str, ChatFormat], name: str, mark: str
) -> None:
    deep = mark * 100_000
    text = formats[name].render([USER, called(deep)], tools=TOOLS).text
    assert deep in text or json.dumps(deep)[1:-1] in text


def test_a_call_without_a_name_is_the_callers_error(formats: dict[str, ChatFormat]) -> None:
    with pytest.raises(TextError, match=r"messages\[1\].tool_calls .*function\.name"):
        formats["hermes"].render([USER, {"role": "assistant", "tool_calls": [{"id": "x"}]}], tools=TOOLS)


def test_tools_without_a_parser_are_refused_with_the_reason(formats: dict[str, ChatFormat]) -> None:
    for found in (formats["plain"], ChatFormat.detect(TextCodec(embedded_model()))):
        for call in (
            lambda found=found: found.render([USER], tools=TOOLS),
            lambda found=found: found.tool_grammar(TOOLS, "required"),
        ):
            with pytest.raises(TextError, match="no place for tools"):
                call()
        with pytest.raises(TextError, match="no place for tools"):
            found.render([USER, called("{}")])
        assert "Hi" in found.render([USER], tools=TOOLS, tool_choice="none").text
        assert "Hi" in found.render([USER], tools=[]).text


def test_without_tools_a_call_is_content(formats: dict[str, ChatFormat]) -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for given in ({"tools": None}, {"tools": TOOLS, "tool_choice": "none"}):
        deltas = formats["hermes"].stream(reasoning_open=False, **given).whole(text)
        assert text_of(deltas, "content") == text


def test_parts_of_text_are_joined_and_others_are_refused_by_name(formats: dict[str, ChatFormat]) -> None:
    def rendered(*parts: Any) -> str:
        return formats["plain"].render([{"role": "user", "content": list(parts)}]).text

    one, two = ({"type": "text", "text": word} for word in ("one", "two"))
    assert "one\ntwo<|im_end|>" in rendered(one, two)
    for kind in ("image_url", "input_audio", "file"):
        with pytest.raises(TextError, match=rf"messages\[0\].content holds a part of type '{kind}'"):
            rendered(one, {"type": kind})
    for wrong in ("text", {"type": "text"}, {"text": "x"}, 5):
        with pytest.raises(TextError, match=r"messages\[0\]"):
            rendered(wrong)
    for wrong in (5, {"type": "text"}):
        with pytest.raises(TextError):
            formats["plain"].render([{"role": "user", "content": wrong}])
    with pytest.raises(TextError, match="no role"):
        formats["plain"].render([{"content": "x"}])


def test_a_template_that_reads_parts_gets_parts(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    found = ChatFormat.detect(make_codec(tmp_path, template))
    assert found.render([USER]).text == "[Hi]"
    assert found.render([{"role": "user", "content": [{"type": "text", "text": "a"}] * 2}]).text == "[a][a]"
    final = {"role": "assistant", "content": "go on"}
    options: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    assert found.render([USER, final], **options).text == "[Hi][go on"


PARTS = "{% for m in messages %}<{{ m.role }}>{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.mark.parametrize("name", ["parts", "plain", "hermes", "thinking"])
@pytest.mark.parametrize("words", [["one"], ["one", "two"], ["one", "two", "three"]], ids=len)
def test_a_message_that_goes_on_is_the_beginning_of_the_whole_one(
    formats: dict[str, ChatFormat], name: str, words: list[str], tmp_path: Path
) -> None:
    """And it contains all of the message, whether its content is a text or parts, as in the
    finished one."""
    found = formats[name] if name in formats else ChatFormat.detect(make_codec(tmp_path, PARTS))
    parts = [{"type": "text", "text": word} for word in words]
    for content in (parts, "\n".join(words)) if len(words) > 1 else (parts, words[0]):
        talk = [USER, {"role": "assistant", "content": content}]
        whole = found.render(talk, add_generation_prompt=False).text
        begun = found.render(talk, add_generation_prompt=False, continue_final_message=True).text
        assert whole.startswith(begun) and begun.endswith(words[-1]), content
        assert [begun.count(word) for word in words] == [1] * len(words), content


@pytest.mark.parametrize("name", ["parts", *FAMILIES])
@pytest.mark.parametrize("thoughts", [None, "Hm."])
def test_a_message_that_says_nothing_is_told_as_an_empty_one(
    formats: dict[str, ChatFormat], name: str, thoughts: str | None, tmp_path: Path
) -> None:
    found = formats[name] if name in formats else ChatFormat.detect(make_codec(tmp_path, PARTS))
    empty: dict[str, Any] = {"role": "assistant", "content": "", "reasoning_content": thoughts}
    missing = {field: value for field, value in empty.items() if field != "content"}
    texts = {found.render([USER, said, USER]).text for said in (empty, missing, {**missing, "content": None})}
    assert len(texts) == 1 and "None" not in texts.pop()


def test_a_last_message_can_go_on(formats: dict[str, ChatFormat]) -> None:
    found = formats["hermes"]
    options: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}
    talk = [USER, {"role": "assistant", "content": "The answer is "}]
    assert found.render(talk, **options).text.endswith("<|im_start|>assistant\nThe answer is ")
    thinking = [USER, {"role": "assistant", "content": "<think>Well, "}]
    assert found.render(thinking, **options).reasoning_open
    assert not found.render([USER, {"role": "assistant", "content": "<think>a</think>b"}], **options).reasoning_open
    with pytest.raises(TextError, match="both true"):
        found.render(talk, continue_final_message=True)
    with pytest.raises(TextError, match="no content"):
        found.render([USER, called("{}")], **options)
    with pytest.raises(TextError, match="no content"):
        found.render([], **options)


def test_a_prompt_that_ends_inside_reasoning_says_so(formats: dict[str, ChatFormat]) -> None:
    assert formats["thinking"].render([USER]).reasoning_open
    assert formats["deepseek fenced"].render([USER]).reasoning_open
    assert not formats["hermes"].render([USER]).reasoning_open
    assert not formats["thinking"].render([USER], add_generation_prompt=False).reasoning_open
    tricky = [{"role": "user", "content": "what is <think>"}]
    assert not formats["hermes"].render(tricky).reasoning_open


def test_template_variables_are_passed_on_and_unread_ones_are_named(formats: dict[str, ChatFormat]) -> None:
    found = formats["hermes"].render([USER], chat_template_kwargs={"enable_thinking": False, "speed": 1})
    assert found.text.endswith("<think>\n\n</think>\n\n") and not found.reasoning_open
    assert found.ignored == ("speed",)
    with pytest.raises(TextError, match="messages"):
        formats["hermes"].render([USER], chat_template_kwargs={"messages": []})


def test_documents_are_named_like_any_variable_where_the_template_does_not_read_them(tmp_path: Path) -> None:
    for reads in (True, False):
        template = "{% for m in messages %}{{ m.content }}{% endfor %}" + "{{ documents }}" * reads
        found = ChatFormat.detect(make_codec(tmp_path, template))
        rendered = found.render([USER], chat_template_kwargs={"documents": ["one"]})
        assert ("one" in rendered.text, rendered.ignored) == ((True, ()) if reads else (False, ("documents",)))
        assert found.render([USER]).ignored == ()


def test_markers_that_are_special_tokens_are_decoded_and_others_hidden(formats: dict[str, ChatFormat]) -> None:
    assert formats["hermes"].skip_special_tokens and not formats["mistral named"].skip_special_tokens
    deltas = formats["mistral named"].stream(tools=TOOLS, reasoning_open=False).whole("Hm[TOOL_CALLS]f[ARGS]{}</s>")
    assert text_of(deltas, "content") == "Hm"
    assert len(calls_of(deltas)[0].call_id) == 9


def test_ids_are_new_each_time(formats: dict[str, ChatFormat]) -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>' * 2
    found = calls_of(formats["hermes"].stream(tools=TOOLS, reasoning_open=False).whole(text))
    assert len({call.call_id for call in found}) == 2 and all(call.call_id.startswith("call_") for call in found)


def test_calls_are_numbered_for_a_template_that_has_their_names_from_their_ids(formats: dict[str, ChatFormat]) -> None:
    def result(call_id: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": call_id, "content": "r"}

    first, second = called("{}", content=None), called("{}", content=None)
    third = called("{}", content=None)
    talk = [USER, first, result("abcdefghi"), second, result("abcdefghi"), result("unknown"), third]
    text = formats["kimi"].render(talk, tools=TOOLS).text
    begun = [part.partition("<|tool_call_argument_begin|>")[0] for part in text.split("<|tool_call_begin|>")[1:]]
    assert begun == ["functions.f:0", "functions.f:1", "functions.f:2"]
    told = [part.partition("\n")[0] for part in text.split("## Return of ")[1:]]
    assert told == ["functions.f:0", "functions.f:1", "unknown"]
    assert first["tool_calls"][0]["id"] == "abcdefghi"


def test_messages_are_changed_for_templates_that_refuse_them_alone(formats: dict[str, ChatFormat]) -> None:
    def those(name: str) -> set[str]:
        return {family for family, found in formats.items() if getattr(found.form, name)}

    assert (those("joined"), those("described"), those("single")) == ({"harmony"}, {"harmony"}, {"harmony", "llama"})
    assert (those("numbered"), those("write")) == (
        {"kimi"},
        {"granite", "granite token", "granite thinking", "lfm2 silent"},
    )


def test_a_template_that_refuses_thoughts_gets_no_other_form(tmp_path: Path) -> None:
    refuses = "{%- if m.reasoning_content %}{{ raise_exception('no thoughts') }}{% endif %}{%- for c in"
    form = ChatFormat.detect(make_codec(tmp_path, HERMES.replace("{%- for c in", refuses))).form
    assert not form.joined and not form.described


@pytest.mark.parametrize(("name", "begin"), [("harmony", "to=functions."), ("llama", '{"name": "')])
def test_several_calls_are_told_one_by_one_to_a_template_that_writes_one(
    formats: dict[str, ChatFormat], name: str, begin: str
) -> None:
    def result(call_id: str) -> dict[str, Any]:
        return {"role": "tool", "tool_call_id": call_id, "content": f"result {call_id}"}

    calls = [{"id": each, "type": "function", "function": {"name": f"f_{each}", "arguments": "{}"}} for each in "ab"]
    talk = [USER, called("{}"), result("abcdefghi"), {"role": "assistant", "content": "So.", "tool_calls": calls}]
    text = formats[name].render([*talk, result("b"), result("a"), result("c"), USER], tools=TOOLS).text
    told = re.findall(rf"(?<={re.escape(begin)})f\w*|result \w+", text[text.index("Hi") :])
    assert told == ["f", "result abcdefghi", "f_a", "result a", "f_b", "result b", "result c"]


def test_calls_are_written_for_a_template_that_writes_none(formats: dict[str, ChatFormat], tmp_path: Path) -> None:
    found = formats["granite"]
    assert "this server writes <|tool_call|>" in found.tool_reason
    text = found.render([USER, called('{"a": "é"}', content="So."), {"role": "tool", "content": "r"}], tools=TOOLS).text
    assert 'So.<|tool_call|>[{"name": "f", "arguments": {"a": "é"}}]<|end_of_text|>' in text
    with pytest.raises(ConfigError, match="hermes cannot be used: .* writes no tool calls"):
        ChatFormat.detect(codec_of("granite", tmp_path), tool_parser="hermes")
    silent = make_codec(tmp_path / "silent", "{{ tools }}{% for m in messages %}{{ m.content }}{% endfor %}")
    found = ChatFormat.detect(silent)
    assert found.tool_reason == "this checkpoint's chat template writes no tool calls" and not found.rows[0].downgrade


def test_earlier_reasoning_is_under_each_of_its_names(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.reasoning_content }}|{{ m.reasoning }}|{{ m.thinking }}{% endfor %}"
    found = ChatFormat.detect(make_codec(tmp_path, template))
    for name in ("reasoning", "reasoning_content"):
        assert found.render([{"role": "assistant", "content": "c", name: "r"}]).text == "r|r|r"


def test_a_variable_is_read_if_the_template_reads_it_that_writes_the_prompt(tmp_path: Path) -> None:
    for_tools = HERMES.replace("enable_thinking", "speed")
    both = [{"name": "default", "template": HERMES}, {"name": "tool_use", "template": for_tools}]
    found = ChatFormat.detect(make_codec(tmp_path, None, settings={"chat_template": both}))
    given: dict[str, Any] = {"chat_template_kwargs": {"z": 1, "speed": False, "enable_thinking": False, "a": 1}}
    assert found.render([USER], **given).ignored == ("a", "speed", "z")
    assert found.render([USER], tools=TOOLS, **given).ignored == ("a", "enable_thinking", "z")
    assert found.render([USER], tools=TOOLS, tool_choice="none", **given).ignored == ("a", "speed", "z")
    assert found.render([USER], tools=[], **given).ignored == ("a", "speed", "z")


def test_tools_that_may_not_be_called_are_neither_shown_nor_read(formats: dict[str, ChatFormat]) -> None:
    text = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for choice, is_offered in (("auto", True), ("required", True), ({"name": "f"}, True), ("none", False)):
        shown = formats["hermes"].render([USER], tools=TOOLS, tool_choice=choice).text
        assert ("Tools: " in shown) is is_offered
        read = formats["hermes"].stream(tools=TOOLS, reasoning_open=False, tool_choice=choice).whole(text)
        assert bool(calls_of(read)) is is_offered and text_of(read, "content") == ("" if is_offered else text)
    assert formats["plain"].render([USER], tools=TOOLS, tool_choice="none").text.endswith("assistant\n")


def test_a_message_that_holds_the_mark_of_its_own_end_goes_on_after_it(formats: dict[str, ChatFormat]) -> None:
    content = f"one{CUT}two"
    found = formats["plain"].render(
        [USER, {"role": "assistant", "content": content}], add_generation_prompt=False, continue_final_message=True
    )
    assert found.text.endswith(content)


def test_a_template_that_drops_the_last_message_can_not_go_on_with_it(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    found = ChatFormat.detect(make_codec(tmp_path, template))
    for last in ({"role": "assistant", "content": "x"}, {"role": "assistant", "content": ""}):
        with pytest.raises(TextError, match="leaves out the end of the last message"):
            found.render([USER, last], add_generation_prompt=False, continue_final_message=True)
