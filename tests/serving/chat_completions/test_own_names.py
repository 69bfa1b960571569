"""Errors about a field have the name by which the protocol of the request knows it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglcore.sampling.params import SamplingError, SamplingParams
from sglcore.serving.apis.checks import check_generates, check_model, check_ready, fingerprint, own_names, refuse_kind
from sglcore.serving.replicas.server_errors import InvalidRequest, NotReady

NAMES = {"max_tokens": "num_predict", "min_tokens": "fewest", "messages": "input", "stop": "stop_sequences"}


@pytest.mark.parametrize(("param", "own"), [("messages", "input"), ("tools", "tools"), ("", ""), (None, None)])
def test_a_refused_field_has_its_own_name_and_one_without_another_keeps_it(param: Any, own: Any) -> None:
    with pytest.raises(InvalidRequest, match="planted messages") as refused, own_names(NAMES):
        raise InvalidRequest("planted messages", param=param, code="x", status=404)
    assert (refused.value.param, refused.value.code, refused.value.status) == (own, "x", 404)


@pytest.mark.parametrize(
    ("said", "param", "told"),
    [
        ("stop: found 5, wanted a text", "stop_sequences", "stop_sequences: found 5, wanted a text"),
        ("stop[3]: found 5, wanted stop", "stop_sequences", "stop_sequences[3]: found 5, wanted stop_sequences"),
        ("top_k: found -2, wanted -1", "top_k", "top_k: found -2, wanted -1"),
        ("stop is a stop", "stop_sequences", "stop_sequences is a stop"),
        (
            "min_tokens: found 5, wanted at most max_tokens (3); lower min_tokens or raise max_tokens",
            "fewest",
            "fewest: found 5, wanted at most num_predict (3); lower fewest or raise num_predict",
        ),
    ],
)
def test_what_sampling_refuses_is_told_in_the_words_of_the_protocol(said: str, param: str, told: str) -> None:
    with pytest.raises(InvalidRequest) as refused, own_names(NAMES):
        raise SamplingError(said)
    assert refused.value.param == param and str(refused.value).startswith(told)


def test_two_fields_that_contradict_each_other_both_have_their_own_names() -> None:
    with pytest.raises(InvalidRequest) as refused, own_names(NAMES):
        SamplingParams(max_tokens=3, min_tokens=4)
    said = str(refused.value)
    assert refused.value.param == "fewest" and "num_predict (3)" in said
    assert "max_tokens" not in said and "min_tokens" not in said


def test_an_error_that_says_nothing_of_what_was_wanted_names_its_field_once() -> None:
    with pytest.raises(InvalidRequest) as refused, own_names({"stop_regex": "options.stop_regex", "stop": "words"}):
        SamplingParams(stop_regex=(r"stop(?=stop)",))
    said = str(refused.value)
    assert refused.value.param == "options.stop_regex" and said.count("stop_regex") == 1
    assert said.startswith("options.stop_regex") and "name texts in words" in said


def test_an_error_that_names_no_field_and_any_other_error_stay_what_they_are() -> None:
    for error in (SamplingError("-- nothing is named"), ValueError("stop: planted")):
        with pytest.raises(type(error)) as raised, own_names(NAMES):
            raise error
        assert raised.value is error


@pytest.mark.parametrize(
    ("labels", "kind", "use"),
    [(0, "vectors", "/v1/embeddings"), (1, "scores", "/v1/score"), (3, "scores", "/v1/score")],
)
def test_a_model_that_generates_nothing_says_what_it_answers_with_and_where(labels: int, kind: str, use: str) -> None:
    health = SimpleNamespace(takes_requests=True)
    info = SimpleNamespace(generates=False, limits={"num_labels": labels})
    frontend: Any = SimpleNamespace(health=health, info=info)
    with pytest.raises(InvalidRequest, match=f"answers with {kind}.*use {use}") as refused:
        check_generates(frontend)
    assert (refused.value.param, refused.value.code) == ("model", "model_does_not_generate")
    info.generates = True
    check_generates(frontend)
    frontend.info = None
    check_generates(frontend)


@pytest.mark.parametrize("length", [5, 60, 61, 500])
def test_a_type_that_is_not_taken_is_refused_by_its_place_and_its_first_60_letters(length: int) -> None:
    with pytest.raises(InvalidRequest, match=r"found a tool of type .*; wanted function") as refused:
        refuse_kind("a tool", "x" * length, "function", "tools[3]")
    error = refused.value
    assert (error.param, error.code, error.status) == ("tools[3]", "unsupported_value", 400)
    assert str(error).startswith("tools[3]: ") and str(error).count("x") == min(length, 60)


def test_a_model_is_any_of_its_names_and_without_one_the_first() -> None:
    frontend: Any = SimpleNamespace(names=("first", "second"))
    assert [check_model(frontend, name) for name in (None, "", "first", "second")] == ["first"] * 3 + ["second"]
    for name, shown in (("First", "'First'"), ("x" * 121, repr("x" * 120)), (" ", "' '")):
        with pytest.raises(InvalidRequest, match="wanted one of first, second") as refused:
            check_model(frontend, name)
        error = refused.value
        assert (error.param, error.code, error.status) == ("model", "model_not_found", 404) and shown in str(error)


def test_requests_are_taken_by_what_the_health_says_and_a_model_that_has_not_started_has_no_fingerprint() -> None:
    health = SimpleNamespace(takes_requests=False, ready=True, refusal=lambda: NotReady("weights"))
    frontend: Any = SimpleNamespace(health=health, info=None)
    for check in (check_ready, check_generates):
        with pytest.raises(NotReady):
            check(frontend)
    health.takes_requests, health.ready = True, False
    check_ready(frontend)
    check_generates(frontend)
    assert fingerprint(frontend) == ""
    frontend.info = SimpleNamespace(fingerprint="fp_1")
    assert fingerprint(frontend) == "fp_1"
