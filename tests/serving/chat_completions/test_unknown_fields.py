"""Unknown fields break no client; fields with a meaning in other servers are refused by name."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest

from sglcore.engine.outputs import TextDelta
from sglcore.serving.apis.anthropic.body import MessagesRequest
from sglcore.serving.apis.openai.body import ChatBody, CompletionBody
from sglcore.serving.apis.others.llama_body import LlamaCompletionBody
from sglcore.serving.apis.others.sglang import SglangSampling
from sglcore.serving.apis.responses.body import ResponsesRequest
from sglcore.serving.apis.unknown import NEUTRAL, REASONS, UnknownFields, refuse_foreign
from sglcore.serving.chat.chat_frontend import ChatFrontend
from sglcore.serving.replicas.server_errors import InvalidRequest
from tests.serving.stubs import Application, call, gives, make_frontend

MESSAGE = {"role": "user", "content": "a", "mood": "gay"}
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [MESSAGE, MESSAGE]},
    "/v1/messages": {"messages": [MESSAGE, MESSAGE], "max_tokens": 5},
    "/v1/responses": {"input": [MESSAGE, MESSAGE]},
}


def speaks(*, strict: bool = False) -> ChatFrontend:
    frontend = make_frontend(gives(TextDelta("r", 0, "fine", (5,), "stop")))
    frontend.config = replace(frontend.config, strict_fields=strict)
    return frontend


@pytest.fixture(scope="module")
def served() -> dict[bool, Application]:
    """An application that reports unknown fields, and one (True) that refuses them."""
    return {strict: Application(speaks(strict=strict)) for strict in (False, True)}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_what_nobody_knows_is_told_in_a_header_a_counter_and_the_log(
    path: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    frontend, body = speaks(), {**BODIES[path], "temprature": 1, "user_profile\x00": 2, "stream": stream}
    with caplog.at_level(logging.INFO, "sglcore.serving"):
        answer = call(frontend, "POST", path, body)
    listed = next((name for name in ("messages", "input") if name in body), None)
    names = ["temprature", "user_profile?", *([f"{listed}[0].mood"] if listed else [])]
    assert answer.status_code == 200 and "fine" in answer.text
    assert answer.headers["x-sglcore-warnings"] == f"unknown: {', '.join(names)}"
    assert f'sglcore_unknown_fields_total{{endpoint="{path}"}} {len(names)}.0' in frontend.metrics.page().decode()
    assert [record.message for record in caplog.records] == [f"id=- {path} has unknown fields: {', '.join(names)}"]


def test_unknown_fields_stand_before_those_without_effect_and_reach_no_template() -> None:
    body = {**BODIES["/v1/chat/completions"], "user": "u"}
    assert (
        call(speaks(), "POST", "/v1/chat/completions", body).headers["x-sglcore-warnings"]
        == "unknown: messages[0].mood; ignored: user"
    )
    plain = {"messages": [{"role": "user", "content": "a"}]}
    counts = [call(speaks(), "POST", "/tokenize", {"messages": found["messages"]}).json() for found in (body, plain)]
    assert counts[0]["count"] > counts[1]["count"] and "gay" not in str(counts)


@pytest.mark.parametrize("path", BODIES)
def test_strict_fields_refuses_them_with_the_name_that_was_meant(path: str) -> None:
    frontend = speaks(strict=True)
    known = {**BODIES[path], **({"messages": [{"role": "user", "content": "a"}]} if "messages" in BODIES[path] else {})}
    known |= {"input": "a"} if "input" in known else {}
    assert call(frontend, "POST", path, known).status_code == 200
    refused = call(frontend, "POST", path, {**known, "temprature": 1})
    assert refused.status_code == 400 and "temprature; did you mean temperature?" in refused.text
    far = call(frontend, "POST", path, {**known, "mood": 1})
    assert "unknown field mood; leave it out" in far.text


@pytest.mark.parametrize(
    ("path", "field", "value", "said"),
    [
        ("/v1/completions", "n_predict", 3, "use max_tokens"),
        ("/v1/completions", "messages", [MESSAGE], "use prompt"),
        ("/v1/completions", "input", "b", "use prompt"),
        ("/v1/completions", "repeat_penalty", 1.5, "use repetition_penalty"),
        ("/v1/completions", "n_probs", 3, "use logprobs"),
        ("/v1/completions", "top_logprobs", 3, "use logprobs"),
        ("/v1/completions", "stop_sequences", ["a"], "use stop"),
        ("/v1/completions", "min_new_tokens", 3, "use min_tokens"),
        ("/v1/completions", "sampling_seed", 3, "use seed"),
        ("/v1/chat/completions", "output_format", {"a": 1}, "use response_format"),
        ("/v1/completions", "guided_decoding", {"regex": "a"}, "use structured_outputs"),
        ("/v1/chat/completions", "max_new_tokens", 3, "use max_tokens"),
        ("/v1/chat/completions", "num_predict", 3, "use max_tokens"),
        ("/v1/chat/completions", "prompt", "b", "use messages"),
        ("/v1/chat/completions", "output_config", {"a": 1}, "use response_format"),
        ("/v1/chat/completions", "format", "json", "use response_format"),
        ("/v1/chat/completions", "functions", [{"name": "a"}], "use tools"),
        ("/v1/chat/completions", "thinking", {"type": "enabled"}, "use reasoning_effort"),
        ("/v1/chat/completions", "think", True, "use reasoning_effort"),
        ("/v1/messages", "instructions", "a", "use system"),
        ("/v1/messages", "reasoning", {"effort": "low"}, "use thinking"),
        ("/v1/responses", "function_call", "auto", "use tool_choice"),
        ("/v1/responses", "reasoning_effort", "low", "use reasoning"),
        ("/v1/responses", "n", 2, "would change the text"),
        ("/v1/chat/completions", "max_output_tokens", 3, "use max_tokens"),
        ("/v1/chat/completions", "enable_thinking", True, "use chat_template_kwargs"),
        ("/v1/responses", "grammar", "root ::= x", "would change the text"),
        ("/v1/messages", "stop", ["a"], "use stop_sequences"),
        ("/v1/responses", "max_tokens", 3, "use max_output_tokens"),
        ("/v1/responses", "response_format", {"type": "json_object"}, "use text"),
        ("/v1/responses", "stop_token_ids", [5], "would change the text"),
        ("/v1/chat/completions", "typical_p", 0.5, "would change the text"),
        ("/v1/chat/completions", "use_beam_search", True, REASONS["use_beam_search"]),
    ],
)
@pytest.mark.parametrize("strict", [False, True])
def test_what_would_change_the_text_elsewhere_is_refused(
    served: dict[bool, Application], path: str, field: str, value: Any, said: str, strict: bool
) -> None:
    answer = served[strict].send("POST", path, {**BODIES[path], field: value})
    assert answer.status_code == 400 and said in answer.json()["error"]["message"], answer.text
    assert answer.json()["error"].get("param", field) == field


@pytest.mark.parametrize("path", BODIES)
def test_values_that_change_nothing_are_let_through(served: dict[bool, Application], path: str) -> None:
    neutral = {name: value for name, value in NEUTRAL.items() if name != "tool_choice"} | {"mirostat": 0, "lora": []}
    answer = served[False].send("POST", path, {**BODIES[path], **neutral})
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize(
    ("field", "off", "on"),
    [
        ("num_beams", 1, 4),
        ("early_stopping", False, True),
        ("typical", 1.0, 0.9),
        ("penalty_last_n", -1, 64),
        ("top_a", 0, 0.2),
        ("dynatemp_range", 0.0, 0.5),
        ("smoothing_factor", 0, 0.3),
        ("samplers", [], ["top_k"]),
        ("truncate_prompt_tokens", None, 5),
        ("logits_processors", [], ["a"]),
        ("custom_logit_processor", "", "a"),
        ("return_tokens_as_token_ids", False, True),
        ("lora_request", {}, {"id": 1}),
        ("prompt_embeds", None, "a"),
        ("input_embeds", [], [[0.5]]),
        ("multi_modal_data", {}, {"image": "a"}),
        ("audio", None, {"voice": "a"}),
        ("audio_data", [], ["a"]),
        ("video_data", [], ["a"]),
        ("images", [], ["a"]),
        ("web_search_options", {}, {"a": 1}),
        ("sampling_params", {}, {"top_k": 1}),
        ("options", {}, {"top_k": 1}),
        ("template", "", "a"),
        ("context", [], [1]),
        ("chat_template", "", "a"),
        ("documents", [], [{"text": "a"}]),
        ("thinking_token_budget", 0, 5),
        ("tools", [], [{"type": "function"}]),
        ("functions", [], [{"name": "a"}]),
        ("function_call", "", "auto"),
        ("reasoning_effort", "", "low"),
        ("instructions", "", "a"),
        ("beam_width", 1, 2),
        ("length_penalty", 1.0, 0.6),
        ("typical_p", 1.0, 0.9),
        ("tfs_z", 1, 0.95),
        ("top_n_sigma", -1, 1.5),
        ("repeat_last_n", -1, 64),
        ("adaptive_target", -1.0, 0.4),
        ("mirostat", 0, 2),
    ],
)
def test_what_is_lacking_is_let_through_where_it_is_off_and_nowhere_else(
    served: dict[bool, Application], field: str, off: Any, on: Any
) -> None:
    statuses = [
        served[False].send("POST", "/v1/completions", {"prompt": "a", field: value}).status_code
        for value in (off, None, on)
    ]
    assert statuses == [200, 200, 400]


@pytest.mark.parametrize(
    ("field", "off", "on"),
    [("temperature", 1.0, 0.5), ("use_beam_search", False, True), ("lora_path", None, "a"), ("image_data", [], ["a"])],
)
def test_beside_the_object_that_has_the_sampling_it_is_the_same(
    served: dict[bool, Application], field: str, off: Any, on: Any
) -> None:
    kept, refused = (served[False].send("POST", "/generate", {"text": "a", field: value}) for value in (off, on))
    assert kept.status_code == 200, kept.text
    assert refused.status_code == 400 and refused.json()["error"]["param"] == field, refused.text


def test_so_many_unknown_fields_are_named_and_no_more() -> None:
    body = {**BODIES["/v1/completions"], **{f"field_{place}": 1 for place in range(5000)}}
    answer = call(speaks(), "POST", "/v1/completions", body)
    assert answer.status_code == 200 and len(answer.headers["x-sglcore-warnings"]) < 1100


OFF: dict[str, Any] = {
    **dict.fromkeys(("n", "best_of", "num_beams", "beam_width", "length_penalty", "typical_p", "typical", "tfs_z"), 1),
    **dict.fromkeys(("temperature", "top_p", "repetition_penalty", "repeat_penalty"), 1.0),
    **dict.fromkeys(("top_k", "top_n_sigma", "repeat_last_n", "penalty_last_n", "adaptive_target"), -1),
    **{"skip_special_tokens": True, "add_generation_prompt": True, "tool_choice": "auto"},
}
"""The value at which a field does nothing, if that is not null, false, 0 or empty."""


@pytest.mark.parametrize("name", OFF)
def test_a_field_that_an_endpoint_lacks_may_have_the_value_at_which_it_does_nothing(name: str) -> None:
    for value in (OFF[name], None, False, 0, "", [], {}):
        refuse_foreign({name: value}, frozenset(), generates=True)
    for value in (2, 0.5, "required"):
        with pytest.raises(InvalidRequest) as refused:
            refuse_foreign({name: value}, frozenset(), generates=True)
        assert refused.value.param == name
    assert NEUTRAL.keys() == OFF.keys()


@pytest.mark.parametrize("count", [31, 32, 33, 40])
def test_the_first_32_unknown_fields_are_recorded_by_60_characters_of_their_names(count: int) -> None:
    fields, body = UnknownFields(), {f"{place:02}" + "x" * 58 * (1 + place % 2): 1 for place in range(count)}
    for model in (dict, list):
        fields.take(model, body, frozenset())
    assert fields.places(body)[:count] == [name[:60] for name in list(body)[:32]]
    assert len(fields.places(body)) == min(32, 2 * count) and len(list(body)[1]) == 118


GENERATING = (CompletionBody, ChatBody, MessagesRequest, ResponsesRequest, LlamaCompletionBody, SglangSampling)
SAYS_NOTHING = {
    *("model", "stream", "stream_options", "priority", "return_token_ids", "return_tokens", "return_progress"),
    *("parallel_tool_calls", "modalities", "include", "store", "background", "conversation", "metadata"),
    *("context_management", "moderation", "mcp_servers", "container", "thread", "previous_response_id"),
    *("truncation", "add_special_tokens"),
}
"""Fields that change no text, or that no other server has under this name."""


@pytest.mark.parametrize("own", GENERATING)
@pytest.mark.parametrize("other", GENERATING)
def test_what_changes_the_text_at_one_endpoint_is_never_dropped_at_another(own: Any, other: Any) -> None:
    names = other.known - other.ignored - own.known - SAYS_NOTHING
    let_through = set[str]()
    for name in names:
        try:
            refuse_foreign({name: "other"}, own.known, generates=True)
        except InvalidRequest as error:
            assert error.param == name
        else:
            let_through.add(name)
    assert not let_through


def test_a_body_that_is_no_object_and_an_endpoint_that_makes_no_text_have_no_foreign_fields() -> None:
    refuse_foreign([{"top_k": 5}], frozenset(), generates=True)
    refuse_foreign({"top_k": 5}, frozenset(), generates=False)
    with pytest.raises(InvalidRequest, match="use input"):
        refuse_foreign({"prompt": "a"}, frozenset({"input"}), generates=False)


def test_places_are_those_of_each_object_and_each_name_of_a_kind_counts_once() -> None:
    inner = [{"a": 1, "x": {}}, {"a": 2, "b": {"c": 0}}]
    body = {"list": inner, "x": 1}
    fields = UnknownFields()
    fields.take(dict, body, frozenset({"list"}))
    for each in inner:
        fields.take(list, each, frozenset())
    fields.take(set, inner[1]["b"], frozenset())  # pyright: ignore[reportArgumentType]
    assert fields.places(body) == ["x", "list[0].a", "list[0].x", "list[1].b", "list[1].b.c"]
    assert UnknownFields().places(body) == []
    with pytest.raises(InvalidRequest, match="unknown field x; leave it out") as refused:
        fields.refuse(body)
    assert (refused.value.param, refused.value.code) == ("x", "unknown_field")
    UnknownFields().refuse(body)


@pytest.mark.parametrize(
    ("name", "near"), [("temprature", "temperature"), ("stops", "stop"), ("stop_", "stop"), ("st", ""), ("mood", "")]
)
def test_a_name_is_suggested_where_one_is_much_alike(name: str, near: str) -> None:
    fields = UnknownFields()
    fields.take(dict, {name: 1}, frozenset({"temperature", "stop"}))
    with pytest.raises(InvalidRequest, match=f"did you mean {near}\\?" if near else "leave it out"):
        fields.refuse({name: 1})
