"""Ollama's bodies as conversations and parameters, branch by branch, and its description of the
model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from sglcore.config.server_config import ServerConfig
from sglcore.sampling.params import SamplingParams
from sglcore.serving.apis.ollama import models
from sglcore.serving.apis.ollama.body import AnswerFields, OllamaChatBody, OllamaGenerateBody, OllamaOptions
from sglcore.serving.apis.ollama.names import served_name, tagged
from sglcore.serving.apis.ollama.request import (
    _check_penalties,
    chat_request,
    params_of,
    plain_prompt,
    text_request,
    unread,
)
from sglcore.serving.apis.ollama.route import _unit
from sglcore.serving.chat.run import ChatRequest
from sglcore.serving.replicas.server_errors import InvalidRequest

FRONTEND: Any = SimpleNamespace(
    config=ServerConfig(max_logprobs=5), sampling={"temperature": 0.7, "repetition_penalty": 1.25}, names=("a", "b:7b")
)
USER: Any = {"role": "user", "content": "q"}


def params(**given: Any) -> SamplingParams:
    return params_of(AnswerFields.model_validate(given), FRONTEND)


def chat(*messages: Any, **given: Any) -> ChatRequest:
    return chat_request(OllamaChatBody.model_validate({"messages": list(messages) or [USER], **given}), FRONTEND)


def made(name: str, **more: Any) -> dict[str, Any]:
    return {"function": {"name": name, "arguments": {"ü": 1}}, **more}


@pytest.mark.parametrize(
    ("options", "name", "wanted"),
    [
        ({}, "max_tokens", None),
        ({"num_predict": 3}, "max_tokens", 3),
        ({"num_predict": -1}, "max_tokens", None),
        ({"num_predict": -2}, "max_tokens", None),
        ({"repeat_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"repetition_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"repeat_penalty": 1.5, "repetition_penalty": 1.1}, "repetition_penalty", 1.5),
        ({}, "repetition_penalty", 1.25),
        ({}, "temperature", 0.7),
        ({"temperature": 0}, "temperature", 0),
        ({"stop": []}, "stop", ()),
        ({"stop": ""}, "stop", ()),
        ({"stop": ["x", "y"]}, "stop", ("x", "y")),
        ({"min_p": 0.5, "top_k": -1}, "min_p", 0.5),
    ],
)
def test_an_option_is_a_parameter(options: Any, name: str, wanted: Any) -> None:
    assert getattr(params(options=options), name) == wanted
    if not options:
        assert getattr(params(options=None), name) == wanted


@pytest.mark.parametrize("options", [{"num_predict": -3}, {"repeat_penalty": 0}, {"repeat_last_n": -2}])
def test_an_option_out_of_its_range_is_refused(options: Any) -> None:
    with pytest.raises(ValidationError):
        OllamaOptions.model_validate(options)


@pytest.mark.parametrize(
    ("given", "logprobs"),
    [({}, None), ({"logprobs": True}, 0), ({"logprobs": True, "top_logprobs": 5}, 5), ({"logprobs": False}, None)],
)
def test_log_probabilities_are_asked_for_as_in_a_chat(given: Any, logprobs: int | None) -> None:
    assert params(**given).logprobs == logprobs


@pytest.mark.parametrize(
    ("penalties", "named"),
    [
        ({}, []),
        ({"repeat_penalty": 1.0, "presence_penalty": 0, "frequency_penalty": 0.0}, []),
        ({"repeat_penalty": 1.1}, ["repeat_penalty"]),
        ({"repetition_penalty": 0.9}, ["repetition_penalty"]),
        ({"presence_penalty": -1}, ["presence_penalty"]),
        ({"frequency_penalty": 1}, ["frequency_penalty"]),
        ({"repeat_penalty": 2, "frequency_penalty": 1}, ["repeat_penalty", "frequency_penalty"]),
    ],
)
@pytest.mark.parametrize("window", [None, -1, 0, 64])
def test_a_window_of_penalties_may_be_named_where_no_penalty_is_active(
    penalties: Any, named: list[str], window: int | None
) -> None:
    options = OllamaOptions.model_validate({**penalties, "repeat_last_n": window})
    assert ("repeat_last_n" in options.warnings()) == (window not in (None, -1))
    if window in (None, -1) or not named:
        return _check_penalties(options)
    names = " and ".join(f"options.{name}" for name in named)
    with pytest.raises(InvalidRequest, match=f"repeat_last_n is {window} with {names};") as refused:
        _check_penalties(options)
    assert refused.value.param == "options.repeat_last_n"


@pytest.mark.parametrize(
    ("last", "continues"),
    [
        (USER, False),
        ({"role": "assistant", "content": "It"}, True),
        ({"role": "assistant", "content": ""}, False),
        ({"role": "assistant"}, False),
        ({"role": "assistant", "content": "It", "tool_calls": [made("f")]}, False),
        ({"role": "tool", "content": "r"}, False),
    ],
)
def test_an_answer_with_text_and_without_calls_is_gone_on_with(last: Any, continues: bool) -> None:
    found = chat(USER, last)
    assert (found.continue_final_message, found.add_generation_prompt) == (continues, not continues)


def test_calls_and_answers_without_an_id_are_matched_by_name_and_order() -> None:
    called = {"role": "assistant", "content": "", "tool_calls": [made("f"), made("g", id="mine"), made("f")]}
    answers = [
        {"role": "tool", "content": "1", "tool_name": "f"},
        {"role": "tool", "content": "2", "tool_call_id": "mine"},
        {"role": "tool", "content": "3", "tool_name": ""},
        {"role": "tool", "content": "4", "tool_name": "h"},
        {"role": "tool", "content": "5"},
        {"role": "tool", "content": "6", "tool_name": "f"},
        {"role": "tool", "content": "7", "tool_call_id": "other"},
    ]
    _, asked, *found = chat(USER, called, *answers).messages
    assert [each["id"] for each in asked["tool_calls"]] == ["call00001", "mine", "call00003"]
    assert {each["function"]["arguments"] for each in asked["tool_calls"]} == {'{"ü": 1}'}
    assert [(each.get("tool_call_id"), each.get("name")) for each in found] == [
        ("call00001", "f"),
        ("mine", "g"),
        ("call00003", "f"),
        (None, "h"),
        (None, None),
        (None, "f"),
        ("other", None),
    ]


def test_messages_have_their_thoughts_and_tools_lose_what_has_no_effect() -> None:
    turn = {"role": "assistant", "content": "a", "thinking": "Hm."}
    tool = {"function": {"name": "f", "description": "d", "parameters": {}, "strict": True}}
    found = chat({"role": "system", "content": ""}, turn, {**turn, "thinking": ""}, USER, tools=[tool])
    assert found.messages[:3] == [
        {"role": "system", "content": ""},
        {"role": "assistant", "content": "a", "reasoning_content": "Hm."},
        {"role": "assistant", "content": "a"},
    ]
    function = {"name": "f", "description": "d", "parameters": {}}
    assert (found.tools, found.tool_choice) == ([{"type": "function", "function": function}], "auto")
    assert (chat(tools=[]).tools, chat().tool_choice, chat().form) == (None, "none", "format")


def text(**given: Any) -> OllamaGenerateBody:
    return OllamaGenerateBody.model_validate({"prompt": "q", **given})


@pytest.mark.parametrize(
    ("given", "wanted"),
    [({}, ["q"]), ({"system": ""}, ["q"]), ({"system": "s"}, ["s", "q"]), ({"prompt": None}, [""])],
)
def test_a_text_is_a_conversation_of_at_most_two_messages_without_tools(given: Any, wanted: list[str]) -> None:
    found = text_request(text(**given), FRONTEND)
    assert [each["content"] for each in found.messages] == wanted
    assert [each["role"] for each in found.messages] == ["system", "user"][-len(wanted) :]
    assert (found.tool_choice, found.form, found.add_generation_prompt) == ("none", "format", True)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, None),
        ({"raw": False}, None),
        ({"raw": False, "suffix": "", "system": "s"}, None),
        ({"raw": True}, "q"),
        ({"raw": True, "system": ""}, "q"),
    ],
)
def test_a_raw_text_alone_is_continued_as_it_is(given: Any, wanted: str | None) -> None:
    assert plain_prompt(text(**given), FRONTEND) == wanted


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"raw": True, "suffix": "b"}, "suffix"),
        ({"raw": True, "system": "s"}, "system"),
        ({"suffix": "b", "system": "s"}, "system"),
        ({"images": ["a"]}, "images"),
        ({"template": "t"}, "template"),
        ({"context": [1]}, "context"),
    ],
)
def test_a_text_that_can_not_be_had_is_refused_by_its_field(given: Any, param: str) -> None:
    for make in (plain_prompt, text_request):
        with pytest.raises(InvalidRequest) as refused:
            make(text(**given), FRONTEND)
        assert refused.value.param == param


BOTH, ONE = ("enable_thinking", "thinking"), ("thinking",)


@pytest.mark.parametrize(
    ("think", "values", "unread_by"),
    [
        (None, None, ()),
        (False, {"enable_thinking": False, "thinking": False}, (BOTH,)),
        (True, {"enable_thinking": True, "thinking": True}, (BOTH,)),
        (
            "high",
            {"enable_thinking": True, "thinking": True, "reasoning_effort": "high"},
            (("reasoning_effort",), (*BOTH, "reasoning_effort")),
        ),
    ],
)
def test_thinking_is_told_where_the_template_reads_none_of_its_variables(
    think: Any, values: Any, unread_by: tuple[tuple[str, ...], ...]
) -> None:
    assert chat(think=think).chat_template_kwargs == values
    assert text_request(text(think=think), FRONTEND).chat_template_kwargs == values
    body = AnswerFields.model_validate({"think": think})
    for ignored in ((), ONE, BOTH, ("reasoning_effort",), (*BOTH, "reasoning_effort")):
        is_told = ignored in unread_by or (isinstance(think, bool) and set(ignored) >= set(BOTH))
        assert unread(body, ignored) == (["think"] if is_told else []), ignored


def test_ignored_fields_are_named_by_their_place() -> None:
    given = {"keep_alive": 0, "shift": False, "options": {"num_ctx": 1, "num_gpu": 0, "low_vram": False}}
    wanted = ("keep_alive", "shift", "options.low_vram", "options.num_ctx", "options.num_gpu")
    assert AnswerFields.model_validate(given).warnings() == wanted


@pytest.mark.parametrize(
    ("asked", "wanted"),
    [(None, "a"), ("", "a"), ("a", "a"), ("a:latest", "a"), ("b:7b", "b:7b"), ("b", None), ("a:7b", None)],
)
def test_a_name_is_served_with_and_without_the_usual_tag(asked: str | None, wanted: str | None) -> None:
    if wanted is not None:
        assert served_name(FRONTEND, asked) == wanted
        return
    with pytest.raises(InvalidRequest, match="a:latest, b:7b") as refused:
        served_name(FRONTEND, asked)
    assert (refused.value.status, refused.value.code) == (404, "model_not_found")
    assert [tagged(name) for name in ("a", "a:latest", "b:7b")] == ["a:latest", "a:latest", "b:7b"]


CARD: Any = SimpleNamespace(
    format="gguf",
    family="llama",
    parameters=1_500_000_000,
    precision="Q4",
    sizes={"context_length": 1, "block_count": 2},
    num_bytes=9,
    digest="d",
    modified=0.5,
)


def with_model(**more: Any) -> Any:
    form = SimpleNamespace(tool_parser=None, reasoning_parser=None)
    known = {"context": 64, "tools": None, "thinking": None, "tokens": {}, **more}
    form.tool_parser, form.reasoning_parser = known["tools"], known["thinking"]
    template = SimpleNamespace(source=lambda: None)
    codec = SimpleNamespace(template=template, tokenizer=SimpleNamespace(token_to_id=known["tokens"].get))
    info = SimpleNamespace(max_model_len=known["context"], generates=True, limits={})
    return SimpleNamespace(names=("a", "b:7b"), info=info, sampling=FRONTEND.sampling, codec=codec, format=form)


def test_a_model_is_described_by_its_card_and_by_what_is_served() -> None:
    found = models.shown(with_model(), CARD, "a")
    assert found["model_info"] == {
        "general.architecture": "llama",
        "general.parameter_count": 1_500_000_000,
        "llama.context_length": 64,
        "llama.block_count": 2,
    }
    assert found["modelfile"].splitlines() == [
        "FROM a:latest",
        "PARAMETER temperature 0.7",
        "PARAMETER repeat_penalty 1.25",
    ]
    assert [line.split() for line in found["parameters"].splitlines()] == [
        ["temperature", "0.7"],
        ["repeat_penalty", "1.25"],
    ]
    assert (found["template"], found["modified_at"]) == ("", "1970-01-01T00:00:00.500000Z")
    details = {"parent_model": "", "format": "gguf", "family": "llama", "families": ["llama"]}
    assert found["details"] == {**details, "parameter_size": "1.5B", "quantization_level": "Q4"}
    unknown = SimpleNamespace(**{**vars(CARD), "parameters": None})
    assert models.details(unknown)["parameter_size"] == ""  # pyright: ignore[reportArgumentType]
    assert "general.parameter_count" not in models.shown(with_model(), unknown, "a")["model_info"]  # pyright: ignore[reportArgumentType]


def test_each_name_is_listed_with_its_files_and_runs_once_the_model_is_there() -> None:
    frontend = with_model()
    (first, second) = models.files(frontend, CARD)["models"]
    assert (
        [each["name"] for each in (first, second)]
        == [each["model"] for each in (first, second)]
        == ["a:latest", "b:7b"]
    )
    assert (first["size"], first["digest"], first["modified_at"]) == (9, "d", "1970-01-01T00:00:00.500000Z")
    (run, _) = models.runs(frontend, CARD)["models"]
    assert (run["size_vram"], run["context_length"], run["expires_at"]) == (9, 64, models.NEVER)
    frontend.info = None
    assert models.runs(frontend, CARD) == {"models": []}


FIM = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>")


@pytest.mark.parametrize(
    ("known", "wanted"),
    [
        ({}, []),
        ({"tools": "hermes"}, ["tools"]),
        ({"thinking": "think"}, ["thinking"]),
        ({"tokens": dict.fromkeys(FIM, 0)}, ["insert"]),
        ({"tokens": dict.fromkeys(FIM[:2], 1)}, []),
        (
            {"tokens": dict.fromkeys(("<PRE>", "<SUF>", "<MID>"), 5), "tools": "a", "thinking": "b"},
            ["insert", "tools", "thinking"],
        ),
    ],
)
def test_a_model_can_do_what_its_tokens_and_its_template_say(known: Any, wanted: list[str]) -> None:
    assert models.capabilities(with_model(**known)) == ["completion", *wanted]


def test_a_vector_has_length_one_unless_it_is_zero() -> None:
    assert _unit(np.array([3.0, 4.0])).tolist() == [0.6, 0.8] and _unit(np.zeros(2)).tolist() == [0.0, 0.0]
