"""Anthropic's bodies as conversations, branch by branch, and which of their fields are reported as
without effect."""

from __future__ import annotations

import time
from typing import Any

import pytest
from pydantic import ValidationError

from sglcore.sampling.params import SamplingParams
from sglcore.serving.apis.anthropic.body import UNTHREADED, MessagesRequest
from sglcore.serving.apis.anthropic.events import MessageWriter, error_body
from sglcore.serving.apis.anthropic.models import model_card
from sglcore.serving.apis.anthropic.request import message_request, unused
from sglcore.serving.chat.run import ChatRequest
from sglcore.serving.replicas.server_errors import Failure, InvalidRequest
from tests.serving.scripted import CACHED, PROMPT, Script, ScriptedGeneration
from tests.serving.stubs import Application, make_frontend

USER: Any = {"role": "user", "content": "q"}
TOOL: Any = {"name": "f", "input_schema": {"type": "object"}}
MADE: Any = {"type": "tool_use", "id": "c", "name": "f", "input": {}}
RESULT: Any = {"type": "tool_result", "tool_use_id": "c"}
CACHE = {"cache_control": {"type": "ephemeral"}}
SCHEMA, OTHER = {"enum": [1]}, {"enum": [2]}


def body(**given: Any) -> MessagesRequest:
    return MessagesRequest.model_validate({"max_tokens": 5, "messages": [USER], **given})


def asked(**given: Any) -> ChatRequest:
    return message_request(body(**given))


def talk(*messages: tuple[str, Any], **given: Any) -> ChatRequest:
    return asked(messages=[{"role": role, "content": content} for role, content in messages], **given)


def text(*words: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": word} for word in words]


CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("messages", "wanted"),
    [
        ([("user", "")], [("user", text(""))]),
        ([("user", [])], [("user", text(""))]),
        (
            [("user", "a"), ("system", "b"), ("user", "c")],
            [("user", text("a")), ("system", text("b")), ("user", text("c"))],
        ),
        ([("system", "a"), ("system", "b")], [("system", text("a")), ("system", text("b"))]),
        (
            [("user", "a"), ("assistant", ""), ("user", "b")],
            [("user", text("a")), ("assistant", ""), ("user", text("b"))],
        ),
        (
            [("user", "a"), ("assistant", [{"type": "redacted_thinking", "data": "x"}]), ("user", "b")],
            [("user", text("a")), ("assistant", ""), ("user", text("b"))],
        ),
        ([("user", "a"), ("assistant", text("b", "c"))], [("user", text("a")), ("assistant", "bc")]),
    ],
)
def test_each_turn_is_a_message(messages: Any, wanted: Any) -> None:
    found = talk(*messages).messages
    assert [(each["role"], each["content"]) for each in found] == wanted


def test_a_result_stands_where_it_was_given_between_the_texts() -> None:
    blocks = [*text("a"), {**RESULT, "content": "r"}, *text("b", "c")]
    _, called, *rest = talk(("user", "q"), ("assistant", [MADE]), ("user", blocks)).messages
    assert called == {"role": "assistant", "tool_calls": [CALL]}
    assert [(each["role"], each["content"]) for each in rest] == [
        ("user", text("a")),
        ("tool", "r"),
        ("user", text("b", "c")),
    ]
    assert rest[1]["tool_call_id"] == "c"


@pytest.mark.parametrize(
    ("given", "wanted"), [({}, ""), ({"content": None}, ""), ({"content": ""}, ""), ({"content": text("r")}, text("r"))]
)
def test_a_result_may_be_empty(given: Any, wanted: Any) -> None:
    assert talk(("user", "q"), ("assistant", [MADE]), ("user", [{**RESULT, **given}])).messages[-1]["content"] == wanted


def test_a_result_belongs_to_any_call_before_it_and_to_no_later_one() -> None:
    turns: list[tuple[str, Any]] = [("user", "q"), ("assistant", [MADE]), ("user", "wait"), ("assistant", "yes")]
    assert talk(*turns, ("user", [RESULT])).messages[-1]["tool_call_id"] == "c"
    with pytest.raises(InvalidRequest, match="'c' that was not made") as refused:
        talk(("user", [RESULT]), ("assistant", [MADE]), ("user", "q"))
    assert refused.value.param == "messages[0].content[0].tool_use_id"


def test_thoughts_and_texts_of_one_turn_are_joined_unchanged() -> None:
    thoughts = [{"type": "thinking", "thinking": word} for word in ("a", "b")]
    blocks = [thoughts[0], *text("x "), thoughts[1], *text("y"), MADE, {**MADE, "id": "d", "input": {"ü": 1}}]
    _, turn, _ = talk(("user", "q"), ("assistant", blocks), ("user", "go")).messages
    assert (turn["reasoning_content"], turn["content"]) == ("ab", "x y")
    assert [each["function"]["arguments"] for each in turn["tool_calls"]] == ["{}", '{"ü": 1}']


@pytest.mark.parametrize(
    ("last", "continues"),
    [(("user", "q"), False), (("assistant", "b"), True), (("system", "s"), False)],
)
def test_an_answer_at_the_end_alone_is_gone_on_with(last: Any, continues: bool) -> None:
    found = talk(("user", "q"), last)
    assert (found.continue_final_message, found.add_generation_prompt) == (continues, not continues)


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([("user", "q"), ("assistant", [MADE])], "messages[1]"),
        ([("user", "q"), ("user", "r"), ("assistant", "a"), ("assistant", [MADE])], "messages[3]"),
        ([("user", "q"), ("assistant", [RESULT])], "messages[1].content[0]"),
        ([("user", "q"), ("assistant", [*text("a"), MADE, RESULT])], "messages[1].content[2]"),
        ([("user", [*text("a"), MADE])], "messages[0].content[1]"),
        ([("user", "q"), ("assistant", [MADE]), ("user", [{**RESULT, "content": [*text("a"), {"type": "image"}]}])],
         "messages[2].content[0].content[1]"),
    ],
)  # fmt: skip
def test_a_turn_that_can_not_be_read_is_refused_at_its_place(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        talk(*messages)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("system", "wanted"), [(None, []), ("", []), ([], []), ("s", ["s"]), (text("a", "b"), [text("a", "b")])]
)
def test_the_system_text_comes_first_if_there_is_one(system: Any, wanted: Any) -> None:
    found = asked(system=system).messages
    assert [each["content"] for each in found] == [*wanted, text("q")]
    assert [each["role"] for each in found] == [*["system"] * len(wanted), "user"]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, {}),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, {"enable_thinking": True, "thinking": True}),
        ({"thinking": {"type": "disabled"}}, {"enable_thinking": False, "thinking": False}),
        ({"thinking": {"type": "adaptive"}}, {}),
        ({"output_config": {"effort": "low"}}, {"reasoning_effort": "low"}),
        (
            {"output_config": {"effort": "low"}, "chat_template_kwargs": {"reasoning_effort": "high", "a": 1}},
            {"reasoning_effort": "high", "a": 1},
        ),
        (
            {"thinking": {"type": "enabled"}, "chat_template_kwargs": {"thinking": False}},
            {"enable_thinking": True, "thinking": False},
        ),
    ],
)
def test_thinking_and_effort_are_variables_of_the_template_and_its_own_come_first(given: Any, wanted: Any) -> None:
    assert asked(**given).chat_template_kwargs == wanted


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, ("auto", True, None)),
        ({"tool_choice": {"type": "auto"}}, ("auto", True, None)),
        ({"tool_choice": {"type": "none"}}, ("none", True, None)),
        ({"tool_choice": {"type": "any", "disable_parallel_tool_use": False}}, ("required", True, None)),
        ({"tool_choice": {"type": "auto", "disable_parallel_tool_use": True}}, ("auto", False, None)),
        (
            {"tool_choice": {"type": "tool", "name": "f"}},
            ({"type": "function", "function": {"name": "f"}}, True, None),
        ),
        ({"thinking": {"type": "adaptive", "budget_tokens": 9}}, ("auto", True, 9)),
    ],
)
def test_a_choice_of_tools_and_a_budget_are_asked_for(given: Any, wanted: Any) -> None:
    found = asked(tools=[TOOL], **given)
    assert (found.tool_choice, found.parallel_tool_calls, found.thinking_token_budget) == wanted


def test_a_tool_has_the_fields_that_it_was_given() -> None:
    full = {**TOOL, "type": "custom", "description": "d", "strict": False}
    function = {"name": "f", "parameters": {"type": "object"}}
    assert asked(tools=[TOOL, full]).tools == [
        {"type": "function", "function": function},
        {"type": "function", "function": {**function, "description": "d", "strict": False}},
    ]
    assert asked(tools=[]).tools is None


def form(schema: Any) -> Any:
    return {"type": "json_schema", "schema": schema}


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, None),
        ({"output_config": {"format": form(SCHEMA)}}, SCHEMA),
        ({"output_format": form(OTHER)}, OTHER),
        ({"output_config": {"effort": "low"}, "output_format": form(OTHER)}, OTHER),
        ({"output_config": {"format": form(SCHEMA)}, "output_format": form(OTHER)}, SCHEMA),
    ],
)
def test_the_format_has_an_old_and_a_new_name_of_which_the_new_one_counts(given: Any, wanted: Any) -> None:
    found = asked(**given)
    grammar = found.params.grammar
    assert (None if grammar is None else grammar.text) == (None if wanted is None else str(wanted).replace("'", '"'))
    assert found.form == "output_config.format.schema"


def test_limits_and_stops_are_those_of_the_body() -> None:
    found = asked(stop_sequences=["x"], temperature=0.5, top_k=3).params
    assert (found.max_tokens, found.stop, found.temperature, found.top_k) == (5, ("x",), 0.5, 3)
    assert asked(stop_sequences=[]).params.stop == ()
    for wrong in (
        {"max_tokens": 0},
        {"stop_sequences": "x"},
        {"messages": []},
        {"thinking": {"type": "enabled", "budget_tokens": 0}},
    ):
        with pytest.raises(ValidationError):
            body(**wrong)


@pytest.mark.parametrize(
    ("given", "param", "code"),
    [
        ({"mcp_servers": [{}]}, "mcp_servers", "unsupported_parameter"),
        ({"container": "c"}, "container", "unsupported_parameter"),
        ({"thread": {}}, "thread", UNTHREADED),
        ({"tools": [TOOL, {"type": "bash"}]}, "tools[1]", "unsupported_value"),
        ({"system": [*text("s"), {"type": "image"}]}, "system[1]", "unsupported_value"),
        ({"tool_choice": {"type": "tool"}}, "tool_choice.name", None),
    ],
)
def test_what_a_message_can_not_have_is_refused_by_its_field(given: Any, param: str, code: str | None) -> None:
    with pytest.raises(InvalidRequest) as refused:
        asked(**given)
    assert (refused.value.param, refused.value.code) == (param, code)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, []),
        ({"thinking": {"type": "enabled", "display": "full"}}, ["thinking.display"]),
        ({"tools": [{**TOOL, "strict": True}]}, ["tools.strict"]),
        ({"tools": [{**TOOL, "strict": False}]}, []),
        ({"tools": [TOOL, {**TOOL, "strict": True}, TOOL]}, ["tools.strict"]),
        ({"tools": [{**TOOL, "strict": True}], "tool_choice": {"type": "auto"}}, ["tools.strict"]),
        ({"tools": [{**TOOL, "strict": True}], "tool_choice": {"type": "any"}}, []),
        ({"tools": [{**TOOL, "strict": True}], "tool_choice": {"type": "tool", "name": "f"}}, []),
        ({"tools": [{**TOOL, **CACHE, "defer_loading": True}]}, ["tools.cache_control", "tools.defer_loading"]),
        ({"system": [{**text("s")[0], **CACHE}]}, ["content.cache_control"]),
        ({"system": [*text("s"), {**text("s")[0], **CACHE}]}, ["content.cache_control"]),
        ({"system": text("s")}, []),
        ({"messages": [{"role": "user", "content": [{**text("s")[0], **CACHE}]}]}, ["content.cache_control"]),
        ({"messages": [USER, {"role": "assistant", "content": [{**MADE, **CACHE}]}]}, ["content.cache_control"]),
        ({"messages": [{"role": "user", "content": [{**RESULT, **CACHE}]}]}, ["content.cache_control"]),
        ({"messages": [{"role": "user", "content": [{**RESULT, "is_error": True}]}]}, ["content.is_error"]),
        ({"messages": [{"role": "user", "content": [{**RESULT, "is_error": False}]}]}, []),
        (
            {"messages": [{"role": "assistant", "content": [{"type": "redacted_thinking", "data": "x"}]}]},
            ["content.redacted_thinking"],
        ),
        ({"metadata": {}, "service_tier": "auto", **CACHE}, ["cache_control", "metadata", "service_tier"]),
    ],
)
def test_a_field_without_effect_is_told(given: Any, told: list[str]) -> None:
    assert unused(body(**given)) == told


@pytest.mark.parametrize(
    ("reason", "cause", "tokens", "wanted"),
    [
        ("stop", None, 2, ("end_turn", None)),
        ("stop", 7, 2, ("end_turn", None)),
        ("stop", "x", 2, ("stop_sequence", "x")),
        ("length", None, 64 - len(PROMPT) - 1, ("max_tokens", None)),
        ("length", None, 64 - len(PROMPT), ("model_context_window_exceeded", None)),
        ("stop", None, 64 - len(PROMPT), ("end_turn", None)),
        ("tool_calls", "x", 2, ("tool_use", None)),
    ],
)
def test_an_ending_has_its_reason(reason: str, cause: Any, tokens: int, wanted: tuple[str, str | None]) -> None:
    writer: Any = object.__new__(MessageWriter)
    writer._reason, writer._max_model_len = reason, 64
    output = ScriptedGeneration(Script(), SamplingParams()).output
    output.outputs[0].stop_cause, output.outputs[0].token_ids = cause, [1] * tokens
    found = writer._ending(output)
    assert (found["stop_reason"], found["stop_sequence"]) == wanted and output.cached_tokens == CACHED


def test_an_error_has_a_code_for_clients_that_know_another_way_alone() -> None:
    for code, details in ((UNTHREADED, {"error_code": UNTHREADED}), ("other", None), (None, None)):
        error = error_body(Failure(400, "no", "any", "a", code))["error"]
        assert error.get("details") == details and error["message"] == "no"


def test_a_model_was_made_at_a_time_of_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    try:
        found = [model_card("m", created)["created_at"] for created in (0, 1_700_000_000)]
    finally:
        monkeypatch.undo()
        time.tzset()
    assert found == ["1970-01-01T00:00:00Z", "2023-11-14T22:13:20Z"]


def test_a_count_names_what_it_ignores_and_refuses_models_that_are_not_served() -> None:
    served = Application(make_frontend())
    plain = {"messages": [USER]}
    counts = []
    for more in ({}, {"system": "s"}, {"model": "demo", "speed": "fast", **CACHE}):
        answer = served.send("POST", "/v1/messages/count_tokens", {**plain, **more})
        counts.append((answer.json()["input_tokens"], answer.headers.get("x-sglcore-warnings")))
    assert counts[0] == (counts[0][0], None) != counts[1] and counts[1][1] is None
    assert counts[2] == (counts[0][0], "ignored: cache_control, speed")
    refused = served.send("POST", "/v1/messages/count_tokens", {**plain, "model": "other"})
    assert (refused.status_code, refused.json()["error"]["type"]) == (404, "not_found_error")
