"""Bodies of llama-server and SGLang as sampling parameters, and their limits."""

from __future__ import annotations

import json
from functools import cache
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from pydantic import ValidationError

from sglcore.config.server_config import ServerConfig
from sglcore.engine.outputs import TextDelta
from sglcore.sampling.params import SamplingParams
from sglcore.serving.apis.others.llama_body import NEVER, LlamaCompletionBody, llama_params
from sglcore.serving.apis.others.llama_server import _stop
from sglcore.serving.apis.others.sglang import GenerateBody, _ending, _params, _prompts
from sglcore.serving.replicas.server_errors import InvalidRequest
from tests.serving.stubs import Application, gives, make_frontend

EBNF = 'root ::= "a"'
SCHEMA = {"enum": ["Köln"]}
CONFIG = ServerConfig(max_logprobs=5, max_prompts=2, max_n=3)


def llama(**given: Any) -> tuple[SamplingParams, str]:
    return llama_params(LlamaCompletionBody.model_validate({"prompt": "a", **given}), CONFIG)


def sglang(_logprob: Any = None, _top: Any = None, **given: Any) -> tuple[SamplingParams, str]:
    body = {"text": "a", "sampling_params": given, "return_logprob": _logprob, "top_logprobs_num": _top}
    frontend: Any = SimpleNamespace(sampling={"temperature": 0.7, "top_k": 9})
    return _params(GenerateBody.model_validate(body), frontend)


@pytest.mark.parametrize(
    ("given", "name", "wanted"),
    [
        ({}, "max_tokens", None),
        ({"n_predict": -1}, "max_tokens", None),
        ({"n_predict": 3}, "max_tokens", 3),
        ({}, "logprobs", None),
        ({"n_probs": 0}, "logprobs", None),
        ({"n_probs": 5}, "logprobs", 5),
        ({"stop": []}, "stop", ()),
        ({"stop": ""}, "stop", ()),
        ({"stop": ["x", "y"]}, "stop", ("x", "y")),
        ({"repeat_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"repetition_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"repeat_penalty": 1.5, "repetition_penalty": 1.1}, "repetition_penalty", 1.5),
        ({"seed": -1}, "seed", None),
        ({"logit_bias": {"5": 1, "6": 0}}, "logit_bias", {5: 1.0, 6: 0.0}),
        (
            {"logit_bias": [[5, 1], [6, 0], [7, False], [8.0, -2.5], [0, 1]]},
            "logit_bias",
            {5: 1.0, 6: 0.0, 7: NEVER, 8: -2.5, 0: 1.0},
        ),
        ({"logit_bias": []}, "logit_bias", {}),
        ({"logit_bias": {}}, "logit_bias", {}),
    ],
)
def test_a_field_of_llama_server_is_a_parameter(given: Any, name: str, wanted: Any) -> None:
    assert getattr(llama(**given)[0], name) == wanted


@pytest.mark.parametrize(
    ("given", "form", "kind", "text"),
    [
        ({}, "", None, None),
        ({"grammar": ""}, "", None, None),
        ({"grammar": EBNF}, "grammar", "ebnf", EBNF),
        ({"grammar": 'root = "a"'}, "grammar", "ebnf", 'root = "a"'),
        ({"json_schema": {}}, "json_schema", "json_schema", {}),
        ({"json_schema": SCHEMA, "grammar": ""}, "json_schema", "json_schema", SCHEMA),
    ],
)
def test_a_form_of_llama_server_is_a_grammar_of_its_field(given: Any, form: str, kind: Any, text: Any) -> None:
    params, found = llama(**given)
    assert found == form and (None if params.grammar is None else params.grammar.kind) == kind
    if params.grammar is not None:
        assert (params.grammar.text if isinstance(text, str) else json.loads(params.grammar.text)) == text
        assert "\\u" not in params.grammar.text


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"grammar": EBNF, "json_schema": {}}, "grammar"),
        ({"n_probs": 6}, "n_probs"),
        ({"logit_bias": [[5, 1], [-1, 1]]}, "logit_bias"),
        ({"logit_bias": [[5.5, 1]]}, "logit_bias"),
        ({"logit_bias": [[False, 1]]}, "logit_bias"),
        ({"logit_bias": {"a": 1}}, "logit_bias"),
        ({"n_predict": 0}, "n_predict"),
        ({"min_tokens": 5, "n_predict": 3}, "min_tokens"),
    ],
)
def test_what_llama_server_could_not_do_is_refused_by_its_field(given: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        llama(**given)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "wrong",
    [{"n_predict": -2}, {"logit_bias": [[5]]}, {"logit_bias": [[5, 1, 2]]}, {"repeat_penalty": 0}, {"n_probs": -1}],
)
def test_a_body_of_llama_server_has_ranges(wrong: Any) -> None:
    with pytest.raises(ValidationError):
        llama(**wrong)


@pytest.mark.parametrize(
    ("given", "name", "wanted"),
    [
        ({}, "max_tokens", 128),
        ({"max_new_tokens": 3}, "max_tokens", 3),
        ({}, "temperature", 0.7),
        ({"temperature": 0.0}, "temperature", 0.0),
        ({"top_k": -1}, "top_k", -1),
        ({"min_new_tokens": 2}, "min_tokens", 2),
        ({"min_new_tokens": 0, "min_tokens": 3}, "min_tokens", 0),
        ({"min_tokens": 3}, "min_tokens", 3),
        ({"sampling_seed": 0}, "seed", 0),
        ({"sampling_seed": 5, "seed": 6}, "seed", 5),
        ({"seed": 6}, "seed", 6),
        ({"sampling_seed": -1}, "seed", None),
        ({"n": 2}, "n", 2),
        ({"stop": []}, "stop", ()),
        ({"stop": "x"}, "stop", ("x",)),
        ({"stop_token_ids": [7, 0]}, "stop_token_ids", (7, 0)),
        ({}, "skip_special_tokens", True),
        ({"skip_special_tokens": False}, "skip_special_tokens", False),
        ({}, "include_stop_str_in_output", False),
        ({"no_stop_trim": True}, "include_stop_str_in_output", True),
        ({"_top": 3}, "logprobs", None),
        ({"_logprob": False, "_top": 3}, "logprobs", None),
        ({"_logprob": True}, "logprobs", 0),
        ({"_logprob": True, "_top": 3}, "logprobs", 3),
    ],
)
def test_a_field_of_sglang_is_a_parameter(given: Any, name: str, wanted: Any) -> None:
    assert getattr(sglang(**given)[0], name) == wanted


TAGS = {"structures": [{"begin": "<a>", "schema": {}, "end": "</a>"}], "triggers": ["<a"]}


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("json_schema", SCHEMA, SCHEMA),
        ("json_schema", json.dumps(SCHEMA), SCHEMA),
        ("regex", "a+", "a+"),
        ("ebnf", EBNF, EBNF),
        ("structural_tag", TAGS, TAGS),
        ("structural_tag", json.dumps(TAGS), TAGS),
    ],
)
def test_a_form_of_sglang_is_a_grammar_of_its_field(name: str, value: Any, text: Any) -> None:
    params, form = sglang(**{name: value})
    assert form == f"sampling_params.{name}" and params.grammar is not None and params.grammar.kind == name
    assert (params.grammar.text if isinstance(text, str) else json.loads(params.grammar.text)) == text
    other = {"regex": "a"} if name != "regex" else {"ebnf": EBNF}
    with pytest.raises(InvalidRequest, match="wanted one of them") as refused:
        sglang(**{name: value}, **other)
    assert refused.value.param == "sampling_params"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"text": "a"}, ["a"]),
        ({"text": ["a", "b"]}, ["a", "b"]),
        ({"input_ids": [5, 6]}, [[5, 6]]),
        ({"input_ids": [[5], [6]]}, [[5], [6]]),
        ({}, None),
        ({"text": "a", "input_ids": [5]}, None),
    ],
)
def test_a_prompt_of_sglang_is_text_or_ids(given: Any, wanted: Any) -> None:
    body = GenerateBody.model_validate(given)
    if wanted is not None:
        assert _prompts(body) == wanted
        return
    with pytest.raises(InvalidRequest) as refused:
        _prompts(body)
    assert refused.value.param == "text"


@pytest.mark.parametrize(
    ("given", "is_list"),
    [
        ({"text": "a"}, False),
        ({"text": ["a"]}, True),
        ({"input_ids": [5]}, False),
        ({"input_ids": [[5]]}, True),
        ({"text": "a", "sampling_params": {"n": 1}}, False),
        ({"text": "a", "sampling_params": {"n": 2}}, True),
    ],
)
def test_an_answer_of_sglang_is_a_list_for_a_list_of_prompts_or_several_samples(given: Any, is_list: bool) -> None:
    assert GenerateBody.model_validate(given).is_list is is_list


@pytest.mark.parametrize(
    ("reason", "cause", "wanted"),
    [
        (None, None, None),
        ("length", None, {"type": "length", "length": 3}),
        ("stop", None, {"type": "stop"}),
        ("stop", 0, {"type": "stop", "matched": 0}),
        ("stop", ".", {"type": "stop", "matched": "."}),
        ("abort", None, {"type": "abort"}),
    ],
)
def test_an_ending_of_sglang_has_what_matched(reason: Any, cause: Any, wanted: Any) -> None:
    sample: Any = SimpleNamespace(finish_reason=reason, stop_cause=cause, token_ids=[1, 2, 3])
    assert _ending(sample) == wanted


@pytest.mark.parametrize(
    ("path", "fits", "over", "param"),
    [
        ("/completion", {"prompt": ["a"] * 2}, {"prompt": ["a"] * 3}, "prompt"),
        ("/generate", {"text": ["a"] * 2}, {"text": ["a"] * 3}, "text"),
        (
            "/generate",
            {"text": "a", "sampling_params": {"n": 3}},
            {"text": "a", "sampling_params": {"n": 4}},
            "sampling_params.n",
        ),
        ("/generate", {"text": "a", "top_logprobs_num": 5}, {"text": "a", "top_logprobs_num": 6}, "top_logprobs_num"),
    ],
)
def test_requests_of_other_servers_keep_to_the_limits_of_this_one(path: str, fits: Any, over: Any, param: str) -> None:
    frontend: Any = make_frontend(gives())
    frontend.config = CONFIG
    served = Application(frontend)
    assert served.send("POST", path, fits).status_code == 200
    refused = served.send("POST", path, over)
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)


@cache
def shared() -> tuple[Any, Application]:
    """A frontend and the application over it, made once."""
    frontend = make_frontend()
    return frontend, Application(frontend)


def ask(path: str, body: Any, *deltas: TextDelta) -> httpx.Response:
    frontend, served = shared()
    frontend.generate = gives(*deltas)
    answer = served.send("POST", path, body)
    assert answer.status_code == 200, answer.text
    return answer


def parts(path: str, body: Any, *deltas: TextDelta) -> list[Any]:
    answer = ask(path, {**body, "stream": True}, *deltas)
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    return [line if line == "[DONE]" else json.loads(line) for line in lines]


def test_tokens_without_text_and_text_without_tokens_are_parts_of_a_stream_of_llama_server() -> None:
    found = parts(
        "/completion",
        {"prompt": "a", "return_tokens": True},
        TextDelta("r", 0, "", (5,)),
        TextDelta("r", 0, "A", (6, 7)),
        TextDelta("r", 0, "", ()),
        TextDelta("r", 0, "B", ()),
        TextDelta("r", 0, "C", (8,), "stop"),
    )
    assert [(each["content"], each["tokens"], each["stop"]) for each in found] == [
        ("", [5], False),
        ("A", [6, 7], False),
        ("B", [], False),
        ("C", [8], False),
        ("", [], True),
    ]


@pytest.mark.parametrize(("path", "body"), [("/completion", {"prompt": "a"}), ("/generate", {"text": "a"})])
def test_a_stream_in_which_all_failed_ends_with_the_error_and_without_a_sign_of_its_end(path: str, body: Any) -> None:
    found = parts(path, body, TextDelta("r", 0, "A", (5,)), TextDelta("r", 0, "", (), "error", None, "planted"))
    assert "planted" in found[-1]["error"]["message"] and "[DONE]" not in found


@pytest.mark.parametrize("failed", [0, 1])
def test_of_several_samples_one_may_fail_and_the_stream_of_sglang_ends_as_any(failed: int) -> None:
    ends = [
        TextDelta("r", place, "", (), "error", None, "planted") if place == failed
        else TextDelta("r", place, "A", (5,), "length")
        for place in range(2)
    ]  # fmt: skip
    *found, last = parts("/generate", {"text": "a", "sampling_params": {"n": 2}}, *ends)
    kinds = {each["index"]: each["meta_info"]["finish_reason"]["type"] for each in found}
    assert last == "[DONE]" and kinds == {failed: "error", 1 - failed: "length"}


@pytest.mark.parametrize(
    ("reason", "cause", "wanted"),
    [
        ("stop", None, ("eos", "")),
        ("stop", 2, ("eos", "")),
        ("stop", ".", ("word", ".")),
        ("length", None, ("limit", "")),
        ("abort", None, ("none", "")),
        (None, None, ("none", "")),
    ],
)
def test_an_ending_of_llama_server_has_its_kind_and_its_word(reason: Any, cause: Any, wanted: tuple[str, str]) -> None:
    sample: Any = SimpleNamespace(finish_reason=reason, stop_cause=cause)
    found = _stop(sample)
    assert (found["stop_type"], found["stopping_word"]) == wanted


@pytest.mark.parametrize(("given", "wanted"), [(None, -1), (-1, -1), (7, 7)])
def test_the_settings_of_an_answer_have_the_limit_that_was_asked_for(given: int | None, wanted: int) -> None:
    answer = ask("/completion", {"prompt": "a", "n_predict": given}, TextDelta("r", 0, "A", (5,), "stop")).json()
    assert answer["generation_settings"]["n_predict"] == wanted
