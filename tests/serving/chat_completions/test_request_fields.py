"""Fields of completions and chats: their bounds, the one form that constrains an answer, and the
request that a body becomes."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from sglcore.config.server_config import ServerConfig
from sglcore.sampling.params import SamplingError, SamplingParams
from sglcore.serving.apis.checks import check_limit, refuse_fields
from sglcore.serving.apis.openai.body import ChatBody, CompletionBody
from sglcore.serving.apis.openai.request import chat_request, completion_request
from sglcore.serving.apis.request_params import (
    LONGEST_STOP,
    MOST_IDS,
    MOST_STOPS,
    SamplingFields,
    alternatives,
    completed,
    generation_params,
)
from sglcore.serving.chat.run import ChatRequest
from sglcore.serving.replicas.server_errors import InvalidRequest

MESSAGES = [{"role": "user", "content": "How is it?"}]
CONFIG = ServerConfig(max_prompts=4, max_n=3, max_logprobs=5)


def completion(**given: Any) -> CompletionBody:
    return CompletionBody.model_validate({"prompt": "a", **given})


def params_of(**given: Any) -> tuple[SamplingParams, str]:
    return generation_params(completion(**given), ServerConfig(), max_tokens=5, logprobs=None)


def chat(**given: Any) -> ChatRequest:
    return chat_request(ChatBody.model_validate({"messages": MESSAGES, **given}), CONFIG, "chatcmpl-1")


EDGES: dict[str, tuple[float | int, ...]] = {
    "temperature": (-0.01, 0, 0.5, 100.0),
    "top_p": (0, 0.01, 1, 1.01),
    "top_k": (-2, -1, 0, 2**31 - 1, 2**31),
    "min_p": (-0.01, 0, 1, 1.01),
    "xtc_probability": (-0.01, 0, 1, 1.01),
    "xtc_threshold": (-0.01, 0, 1, 1.01),
    "dry_multiplier": (-0.01, 0, 1000, 1000.5),
    "dry_base": (0.99, 1, 1000, 1000.5),
    "dry_allowed_length": (0, 1, 2**31 - 1, 2**31),
    "dry_penalty_last_n": (-2, -1, 0, 2**31 - 1, 2**31),
    "presence_penalty": (-2.01, -2, 2, 2.01),
    "frequency_penalty": (-2.01, -2, 2, 2.01),
    "repetition_penalty": (0, 0.01, 50),
    "min_tokens": (-1, 0, 5, 2**31),
    "seed": (-2, 0, 2**64 - 1),
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in EDGES.items() for value in values])
def test_a_field_takes_the_values_that_its_parameter_takes(name: str, value: float) -> None:
    try:
        wanted = getattr(SamplingParams(**{name: value}), name)  # pyright: ignore[reportArgumentType]
    except SamplingError:
        with pytest.raises(ValidationError):
            SamplingFields.model_validate({name: value})
        return
    assert getattr(params_of(**{name: value})[0], name) == wanted


@pytest.mark.parametrize("value", [7, -7, 2**31 - 1, 1 - 2**31])
def test_a_priority_may_be_above_and_below_zero(value: int) -> None:
    assert params_of(priority=value)[0].priority == value
    with pytest.raises(ValidationError):
        completion(priority=2**31 if value > 0 else -(2**31))


@pytest.mark.parametrize(
    ("name", "fits", "over"),
    [
        ("stop", ["x"] * MOST_STOPS, ["x"] * (MOST_STOPS + 1)),
        ("stop", "x" * LONGEST_STOP, "x" * (LONGEST_STOP + 1)),
        ("stop", ["x" * LONGEST_STOP], ["x" * (LONGEST_STOP + 1)]),
        ("bad_words", ["x"] * MOST_STOPS, ["x"] * (MOST_STOPS + 1)),
        ("bad_words", ["x" * LONGEST_STOP], ["x" * (LONGEST_STOP + 1)]),
        ("stop_token_ids", [1] * MOST_IDS, [1] * (MOST_IDS + 1)),
        ("allowed_token_ids", list(range(MOST_IDS)), [1] * (MOST_IDS + 1)),
        ("allowed_token_ids", [0], []),
        ("logit_bias", dict.fromkeys(map(str, range(MOST_IDS)), 1), dict.fromkeys(map(str, range(MOST_IDS + 1)), 1)),
        ("guided_choice", ["a"], []),
        ("n", 2.0, 2.5),
        ("stop_token_ids", [3.0], [True]),
        ("logit_bias", {"5": -1.5}, {"5": float("inf")}),
    ],
)
def test_a_field_takes_as_much_as_its_limit_and_no_more(name: str, fits: Any, over: Any) -> None:
    assert len(params_of(**{name: fits})) == 2
    with pytest.raises(ValidationError):
        completion(**{name: over})


def test_a_number_may_be_as_large_as_its_limit() -> None:
    check_limit("n", None, 0)
    check_limit("n", 3, 3)
    for what, said in (("", "n is 4; wanted at most 3"), ("prompts", "n has 4 prompts; wanted at most 3")):
        with pytest.raises(InvalidRequest, match=said) as refused:
            check_limit("n", 4, 3, what)
        assert (refused.value.param, refused.value.code) == ("n", "limit_exceeded")


@pytest.mark.parametrize(
    ("fits", "over", "param"),
    [
        ({"prompt": ["a"] * 4}, {"prompt": ["a"] * 5}, "prompt"),
        ({"n": 3}, {"n": 4}, "n"),
        ({"prompt": ["a"] * 2, "n": 2}, {"prompt": ["a"] * 2, "n": 3}, "n"),
        ({"logprobs": 5}, {"logprobs": 6}, "logprobs"),
        ({"prompt_logprobs": 5}, {"prompt_logprobs": 6}, "prompt_logprobs"),
    ],
)
def test_a_completion_keeps_to_the_limits_of_its_server(fits: Any, over: Any, param: str) -> None:
    completion_request(completion(**fits), CONFIG)
    with pytest.raises(InvalidRequest) as refused:
        completion_request(completion(**over), CONFIG)
    assert (refused.value.param, refused.value.code) == (param, "limit_exceeded")


def test_a_single_prompt_may_have_more_samples_than_a_request_prompts() -> None:
    config = ServerConfig(max_prompts=2, max_n=3)
    assert completion_request(completion(n=3), config).params.n == 3


@pytest.mark.parametrize(
    ("logprobs", "top", "wanted"),
    [(None, None, None), (False, None, None), (False, 0, None), (True, None, 0), (True, 0, 0), (True, 5, 5)],
)
def test_a_chat_shows_as_many_alternatives_as_it_asks_for(logprobs: Any, top: Any, wanted: int | None) -> None:
    assert alternatives(logprobs, top, CONFIG) == wanted
    assert chat(logprobs=logprobs, top_logprobs=top).params.logprobs == wanted
    for asked, code in (((True, 6), "limit_exceeded"), ((None, 1), None)):
        with pytest.raises(InvalidRequest) as refused:
            alternatives(*asked, CONFIG)
        assert (refused.value.param, refused.value.code) == ("top_logprobs", code)


@pytest.mark.parametrize(
    ("given", "allowed", "words"),
    [
        ({"bad_words": ["a"]}, (), ("a",)),
        ({"allowed_token_ids": [0, 5]}, (0, 5), ()),
        ({"bad_words": ["a"], "allowed_token_ids": [5]}, (5,), ("a",)),
    ],
)
def test_rules_of_tokens_may_come_alone_or_together(given: Any, allowed: Any, words: Any) -> None:
    rules = params_of(**given)[0].token_rules
    assert rules is not None and (rules.allowed, rules.bad_words) == (allowed, words)
    assert params_of(bad_words=[])[0].token_rules is None


def test_fields_become_the_parameters_of_the_same_name() -> None:
    given: dict[str, Any] = {
        "n": 2,
        "stop": ["x"],
        "stop_token_ids": [7],
        "stop_regex": ["a+"],
        "priority": -3,
        "skip_special_tokens": False,
        "include_stop_str_in_output": True,
        "prompt_logprobs": 0,
        "ignore_eos": True,
        "min_tokens": 1,
        "seed": 0,
        "temperature": 0.0,
    }
    params, _ = params_of(**given, logit_bias={"5": -1})
    found = {name: getattr(params, name) for name in given}
    assert found == {name: tuple(each) if isinstance(each, list) else each for name, each in given.items()}
    assert dict(params.logit_bias) == {5: -1.0} and params.max_tokens == 5
    assert params_of(stop="x")[0].stop == ("x",) and params_of(stop_regex="a+")[0].stop_regex == ("a+",)
    assert params_of(seed=-1)[0].seed is None


def test_the_checkpoint_gives_what_a_request_leaves_out_and_nothing_that_it_says() -> None:
    said = completed(completion(temperature=0.0, top_k=None), {"temperature": 0.7, "top_k": 5, "min_p": 0.1})
    assert (said.temperature, said.top_k, said.min_p, said.top_p) == (0.0, 5, 0.1, None)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"return_progress": True}, ("return_progress",)),
        ({"return_progress": True, "stream": True}, ()),
        ({"return_progress": False}, ()),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, ("stream_options.include_obfuscation",)),
        ({"stream": True, "stream_options": {"include_obfuscation": False}}, ()),
        ({"user": "", "store": False, "metadata": {}}, ("metadata", "store", "user")),
        ({"user": None}, ()),
    ],
)
def test_a_field_without_effect_is_told(given: Any, told: tuple[str, ...]) -> None:
    assert completion(**given).warnings() == told


@pytest.mark.parametrize(
    ("choice", "is_told"), [(None, True), ("auto", True), ("none", True), ("required", False), ("f", False)]
)
@pytest.mark.parametrize("strict", [None, False, True])
def test_a_strict_tool_is_told_unless_a_call_must_come(choice: Any, is_told: bool, strict: Any) -> None:
    tools = [{"type": "function", "function": {"name": name, "strict": name == "f" and strict}} for name in "gf"]
    named = {"type": "function", "function": {"name": "f"}} if choice == "f" else choice
    body = ChatBody.model_validate({"messages": MESSAGES, "tools": tools, "tool_choice": named})
    assert body.warnings() == (("tools.function.strict",) if is_told and strict else ())


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"stream": True, "prompt_logprobs": 0}, "prompt_logprobs"),
        ({"stream_options": {}}, "stream_options"),
        ({"stream": False, "stream_options": {}}, "stream_options"),
    ],
)
def test_what_only_a_stream_or_a_whole_answer_has_is_refused_in_the_other(given: Any, param: str) -> None:
    for make in (lambda: completion_request(completion(**given), CONFIG), lambda: chat(**given)):
        with pytest.raises(InvalidRequest) as refused:
            make()
        assert refused.value.param == param


def test_a_chat_that_says_nothing_of_it_has_the_defaults() -> None:
    plain = chat()
    assert (plain.tool_choice, plain.tools, plain.parallel_tool_calls, plain.progress) == ("none", None, True, False)
    assert (plain.add_generation_prompt, plain.continue_final_message) == (True, False)
    assert (plain.chat_template_kwargs, plain.thinking_token_budget) == (None, None)
    assert (plain.request_id, plain.params.max_tokens, plain.params.logprobs) == ("chatcmpl-1", None, None)


@pytest.mark.parametrize(
    ("given", "name", "wanted"),
    [
        ({"parallel_tool_calls": False}, "parallel_tool_calls", False),
        ({"parallel_tool_calls": True}, "parallel_tool_calls", True),
        ({"return_progress": True, "stream": True}, "progress", True),
        ({"return_progress": True}, "progress", False),
        ({"stream": True}, "progress", False),
        ({"thinking_token_budget": 0}, "thinking_token_budget", 0),
        ({"continue_final_message": True}, "continue_final_message", True),
        ({"continue_final_message": True}, "add_generation_prompt", False),
        ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt", True),
        ({"add_generation_prompt": False}, "add_generation_prompt", False),
        ({"reasoning_effort": "low"}, "chat_template_kwargs", {"reasoning_effort": "low"}),
        ({"chat_template_kwargs": {}}, "chat_template_kwargs", None),
        (
            {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high", "a": 1}},
            "chat_template_kwargs",
            {"reasoning_effort": "high", "a": 1},
        ),
        ({"tools": []}, "tools", None),
        ({"tools": []}, "tool_choice", "none"),
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tool_choice", "auto"),
        ({"tool_choice": "auto"}, "tool_choice", "auto"),
        (
            {"tool_choice": {"type": "function", "function": {"name": "f"}}},
            "tool_choice",
            {"type": "function", "function": {"name": "f"}},
        ),
        (
            {"tools": [{"type": "function", "function": {"name": "f" * 128, "strict": True, "parameters": {}}}]},
            "tools",
            [{"type": "function", "function": {"name": "f" * 128, "parameters": {}}}],
        ),
    ],
)
def test_a_chat_asks_for_what_its_body_says(given: Any, name: str, wanted: Any) -> None:
    assert getattr(chat(**given), name) == wanted


@pytest.mark.parametrize("name", ["", "f" * 129, "a b", "ä"])
def test_a_function_has_a_name_of_letters_of_at_most_128(name: str) -> None:
    with pytest.raises(ValidationError):
        chat(tools=[{"type": "function", "function": {"name": name}}])


def test_a_limit_of_tokens_has_two_names_that_must_agree() -> None:
    assert [chat(**{name: 7}).params.max_tokens for name in ("max_tokens", "max_completion_tokens")] == [7, 7]
    assert chat(max_tokens=7, max_completion_tokens=7).params.max_tokens == 7
    with pytest.raises(InvalidRequest, match="differ") as refused:
        chat(max_tokens=7, max_completion_tokens=8)
    assert refused.value.param == "max_completion_tokens"
    for name in ("max_tokens", "max_completion_tokens"):
        with pytest.raises(ValidationError):
            chat(**{name: 0})


@pytest.mark.parametrize(
    ("given", "name", "wanted"),
    [
        ({}, "max_tokens", 16),
        ({"max_tokens": 3}, "max_tokens", 3),
        ({"max_tokens": 0, "echo": True}, "max_tokens", 1),
        ({"logprobs": 0}, "logprobs", 0),
        ({"logprobs": 0}, "prompt_logprobs", None),
        ({"logprobs": 0, "echo": True}, "prompt_logprobs", 0),
        ({"logprobs": 2, "echo": True}, "prompt_logprobs", 2),
        ({"logprobs": 2, "echo": True, "prompt_logprobs": 4}, "prompt_logprobs", 4),
        ({"logprobs": 4, "echo": True, "prompt_logprobs": 2}, "prompt_logprobs", 4),
        ({"echo": True}, "prompt_logprobs", None),
        ({"best_of": 1}, "n", 1),
        ({"best_of": 2, "n": 2}, "n", 2),
        ({"suffix": ""}, "n", 1),
    ],
)
def test_a_completion_asks_for_what_its_body_says(given: Any, name: str, wanted: Any) -> None:
    assert getattr(completion_request(completion(**given), CONFIG).params, name) == wanted


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"suffix": "b"}, "suffix"),
        ({"best_of": 2}, "best_of"),
        ({"best_of": 1, "n": 2}, "best_of"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_a_completion_that_can_not_be_made_is_refused_by_its_field(given: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        completion_request(completion(**given), CONFIG)
    assert refused.value.param == param


@pytest.mark.parametrize(
    ("prompt", "wanted"),
    [("a", ["a"]), (["a", "a"], ["a", "a"]), ([5, 5], [[5, 5]]), ([[5], [5]], [[5], [5]]), ("", [""])],
)
def test_prompts_are_one_text_or_one_list_of_ids_or_several(prompt: Any, wanted: Any) -> None:
    assert completion_request(completion(prompt=prompt), CONFIG).prompts == wanted


def test_the_first_field_that_is_not_supported_is_refused_and_one_that_asks_for_nothing_is_not() -> None:
    reasons = {"first": "there is none", "second": "there is no other"}
    for nothing in (None, False, 0, 0.0, "", [], {}):
        refuse_fields({"first": nothing}, reasons)
    for value, name in (({"second": 1, "first": "x"}, "first"), ({"second": ["x"], "third": 1}, "second")):
        with pytest.raises(InvalidRequest, match=f"{name}: {reasons[name]}") as refused:
            refuse_fields(value, reasons)
        assert (refused.value.param, refused.value.code) == (name, "unsupported_parameter")
