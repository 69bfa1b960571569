"""/v1/completions: its parameters and answers, whole and streamed."""

from __future__ import annotations

import json
import re
import socket
import time
from typing import Any

import pytest

from sglcore.serving.apis.openai.answers import CompletionAnswer, CompletionChunk
from tests.serving.conftest import Server
from tests.serving.servers import nearly

PATH = "/v1/completions"
STORY = "Once upon a time"
GREEDY: Any = {"prompt": STORY, "temperature": 0.0, "max_tokens": 12}
SEVEN = {"begin": ",", "content": {"type": "json_schema", "json_schema": {"enum": [7]}}, "end": "!"}
TAGGED: Any = {
    "type": "structural_tag",
    "format": {"type": "triggered_tags", "triggers": [","], "tags": [SEVEN], "stop_after_first": True},
}


def ids_of(server: Server, text: str) -> list[int]:
    return server.post("/tokenize", {"prompt": text})["tokens"]


def chunks_of(server: Server, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The parsed chunks of a stream that ends well, each checked against the OpenAPI document."""
    events = server.events(PATH, body)
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    for chunk in chunks:
        CompletionChunk.model_validate(chunk)
    return chunks


def texts_of(chunks: list[dict[str, Any]]) -> dict[int, str]:
    found: dict[int, str] = {}
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        found[choice["index"]] = found.get(choice["index"], "") + choice["text"]
    return found


def wait_for_idle(server: Server) -> dict[str, Any]:
    """The counters once no request runs; fails after a minute."""
    limit = time.monotonic() + 60
    while time.monotonic() < limit:
        stats = server.get("/server_info/stats")
        if stats["running"] == stats["waiting"] == 0:
            return stats
        time.sleep(0.05)
    raise AssertionError(f"still busy: {stats}")


def test_an_answer_is_what_the_document_says(server: Server) -> None:
    answer = server.post(PATH, {**GREEDY, "logprobs": 2, "return_token_ids": True, "prompt_logprobs": 1})
    CompletionAnswer.model_validate(answer, strict=True)
    choice = answer["choices"][0]
    assert choice["finish_reason"] == "length" and choice["stop_reason"] is None
    assert answer["usage"]["completion_tokens"] == 12 == len(choice["token_ids"])
    assert answer["usage"]["prompt_tokens"] == len(choice["prompt_token_ids"]) == len(ids_of(server, STORY))
    assert answer["model"] == server.get("/v1/models")["data"][0]["id"]
    assert answer["system_fingerprint"] == server.get("/server_info")["fingerprint"]


def test_text_ids_and_lists_of_both_are_the_same_prompt(server: Server) -> None:
    ids = ids_of(server, STORY)
    forms: list[Any] = [STORY, [STORY], ids, [ids]]
    texts = {server.post(PATH, {**GREEDY, "prompt": form})["choices"][0]["text"] for form in forms}
    assert len(texts) == 1


def test_choices_stand_in_the_order_of_prompts_and_samples(server: Server) -> None:
    body = {"prompt": [STORY, "The dog"], "n": 2, "seed": 7, "max_tokens": 6, "ignore_eos": True, "echo": True}
    answer = server.post(PATH, body)
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    begins = [choice["text"].startswith(STORY) for choice in answer["choices"]]
    assert begins == [True, True, False, False]
    assert answer["usage"]["completion_tokens"] == 24


@pytest.mark.parametrize(
    ("path", "body", "limit", "place"),
    [
        (PATH, {"prompt": [STORY, "a"]}, "max_tokens", ("completion_tokens_details", "max_tokens")),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a"}]},
            "max_tokens",
            ("completion_tokens_details", "max_tokens"),
        ),
        ("/v1/responses", {"input": "a"}, "max_output_tokens", ("output_tokens_details", "max_output_tokens")),
        ("/v1/messages", {"messages": [{"role": "user", "content": "a"}]}, "max_tokens", ("max_tokens",)),
    ],
)
def test_an_answer_that_the_context_cuts_says_how_long_it_can_be(
    server: Server, path: str, body: Any, limit: str, place: tuple[str, ...]
) -> None:
    short = server.send(path, {**body, limit: 5, "seed": 1}).json()["usage"]
    prompt = short.get("prompt_tokens") or short["input_tokens"] + short.get("cache_read_input_tokens", 0)
    longest = prompt if path != PATH else len(ids_of(server, STORY))
    left = server.get("/server_info")["max_model_len"] - longest
    answers = [server.send(path, {**body, limit: wanted, "seed": 1}) for wanted in (left, left + 1)]
    assert "x-sglcore-max-tokens" not in answers[0].headers
    assert answers[1].headers["x-sglcore-max-tokens"] == str(left)
    found = answers[1].json()["usage"]
    for name in place:
        found = found[name]
    assert found == left
    with server.client.stream("POST", path, json={**body, limit: left + 1, "stream": True}) as stream:
        assert stream.headers["x-sglcore-max-tokens"] == str(left)


def test_the_seed_that_was_used_gives_the_text_again(server: Server) -> None:
    first = server.post(PATH, {"prompt": STORY, "max_tokens": 20})["choices"][0]
    again = server.post(PATH, {"prompt": STORY, "max_tokens": 20, "seed": first["seed_used"]})["choices"][0]
    assert again["text"] == first["text"] and again["seed_used"] == first["seed_used"]


def test_a_scored_prompt_has_the_log_probabilities_it_was_made_with(server: Server) -> None:
    made = server.post(PATH, {**GREEDY, "logprobs": 1, "return_token_ids": True})["choices"][0]
    whole = made["prompt_token_ids"] + made["token_ids"]
    scored = server.post(PATH, {"prompt": whole, "max_tokens": 0, "echo": True, "logprobs": 1})
    found = scored["choices"][0]["logprobs"]
    assert scored["usage"]["completion_tokens"] == 0
    assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
    assert len(found["tokens"]) == len(whole)
    start = len(made["prompt_token_ids"])
    assert found["token_logprobs"][start:] == pytest.approx(made["logprobs"]["token_logprobs"], abs=0.05)
    best = [max(top.values()) for top in found["top_logprobs"][start:]]
    assert best == pytest.approx(found["token_logprobs"][start:], abs=0.05)


@pytest.mark.parametrize(("chosen", "prompt"), [(1, 3), (3, 1), (0, 2), (2, 0)])
def test_each_record_of_a_scored_prompt_has_as_many_alternatives_as_its_own_field_wants(
    server: Server, chosen: int, prompt: int
) -> None:
    body = {**GREEDY, "max_tokens": 2, "echo": True, "logprobs": chosen, "prompt_logprobs": prompt}
    choice = server.post(PATH, body)["choices"][0]
    assert all(len(top) in (max(chosen, 1), chosen + 1) for top in choice["logprobs"]["top_logprobs"][1:])
    assert all(len(each) in (max(prompt, 1), prompt + 1) for each in choice["prompt_logprobs"][1:])


def test_one_more_token_does_not_change_a_scored_prompt(server: Server) -> None:
    body = {"prompt": [STORY, "The dog ran"], "echo": True, "logprobs": 1, "temperature": 0.0}
    without = server.post(PATH, {**body, "max_tokens": 0})["choices"]
    with_one = server.post(PATH, {**body, "max_tokens": 1})["choices"]
    for short, long in zip(without, with_one, strict=True):
        assert long["logprobs"]["token_logprobs"][:-1] == short["logprobs"]["token_logprobs"]
        assert long["text"].startswith(short["text"])


@pytest.mark.parametrize("limit", [0, 9])
def test_a_stream_that_echoes_has_the_log_probabilities_of_the_whole_answer(server: Server, limit: int) -> None:
    body = {"prompt": [STORY, "The dog"], "n": 2, "seed": 3, "max_tokens": limit, "echo": True, "logprobs": 2}
    whole = server.post(PATH, {**body, "return_token_ids": True})
    chunks = chunks_of(server, {**body, "stream_options": {"include_usage": True}})
    assert texts_of(chunks) == {choice["index"]: choice["text"] for choice in whole["choices"]}
    assert chunks[-1]["usage"]["completion_tokens"] == whole["usage"]["completion_tokens"]
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
        for name in ("tokens", "token_logprobs", "text_offset"):
            assert nearly([each for part in parts for each in part["logprobs"][name]], choice["logprobs"][name])


def test_words_that_may_not_come_do_not_and_ids_that_alone_may_do(server: Server) -> None:
    free = server.post(PATH, {**GREEDY, "return_token_ids": True})["choices"][0]
    words = re.findall(r"[a-z]{3,}", free["text"])[:3]
    held = server.post(PATH, {**GREEDY, "bad_words": words})["choices"][0]["text"]
    assert words and not set(words) & set(re.findall(r"[a-z]+", held)) and held != free["text"]
    two = server.post("/tokenize", {"content": " patient fox"})["tokens"]
    phrase = " patient fox"
    only = server.post(PATH, {**GREEDY, "allowed_token_ids": two, "return_token_ids": True})["choices"][0]
    assert set(only["token_ids"]) <= set(two) and only["finish_reason"] == "length"
    both = server.post(
        PATH, {**GREEDY, "allowed_token_ids": two, "bad_words": [phrase.strip()], "seed": 4, "n": 4, "temperature": 2}
    )
    assert all(phrase not in choice["text"] for choice in both["choices"])
    bound = server.post(PATH, {**GREEDY, "guided_choice": ["fox", "dog"], "bad_words": ["fox"]})["choices"][0]
    assert bound["text"] == "dog"
    fox = server.post("/tokenize", {"content": "fox"})["tokens"]
    ruled = server.post(PATH, {**GREEDY, "guided_choice": ["fox", "dog"], "allowed_token_ids": fox})["choices"][0]
    assert (ruled["text"], ruled["finish_reason"]) == ("fox", "stop")
    refused = server.refusal(PATH, {**GREEDY, "guided_choice": ["dog"], "allowed_token_ids": fox})
    assert refused["param"] == "guided_choice" and "allowed_token_ids" in refused["message"]


def test_rules_that_contradict_each_other_in_mid_text_are_the_callers_fault_and_end_only_their_sample(
    server: Server,
) -> None:
    first = server.post("/tokenize", {"content": "fox"})["tokens"]
    assert len(first) == 2, "one that is begun before it may not go on"
    dead = {**GREEDY, "guided_choice": ["fox"], "bad_words": ["fox"]}
    refused = server.refusal(PATH, dead)
    assert "leave no token to sample" in refused["message"] and refused["type"] == "invalid_request_error"
    told = next(event for event in server.events(PATH, dead) if "error" in event)
    assert '"invalid_request_error"' in told and "leave no token" in told
    likely = {"n": 8, "temperature": 2.0, "seed": 1, "logit_bias": {str(first[0]): 5}}
    some = {**GREEDY, "prompt": "Once there was a", "guided_choice": ["fox", "dog"], "bad_words": ["fox"], **likely}
    ends = {(choice["text"], choice["finish_reason"]) for choice in server.post(PATH, some)["choices"]}
    assert ends == {("dog", "stop"), ("f", "error")}


def test_a_priority_is_known_and_changes_no_text(server: Server) -> None:
    answer = server.send(PATH, {**GREEDY, "priority": -3})
    assert "x-sglcore-warnings" not in answer.headers
    assert answer.json()["choices"][0]["text"] == server.post(PATH, GREEDY)["choices"][0]["text"]


def test_a_seed_of_minus_one_is_any(server: Server) -> None:
    found = [server.post(PATH, {"prompt": STORY, "seed": -1, "max_tokens": 2})["choices"][0] for _ in range(2)]
    assert found[0]["seed_used"] != found[1]["seed_used"] and min(each["seed_used"] for each in found) >= 0


def test_offsets_lead_to_the_tokens(server: Server) -> None:
    prompt = "Ein Kätzchen 😀 and a dog"
    choice = server.post(PATH, {"prompt": prompt, "max_tokens": 8, "echo": True, "logprobs": 0, "seed": 5})["choices"][
        0
    ]
    found = choice["logprobs"]
    assert choice["text"].startswith(prompt)
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        is_shown = not token.startswith(("bytes:", "<|"))
        assert not is_shown or choice["text"][offset:].startswith(token), (token, offset)
    assert any(token.startswith("bytes:") for token in found["tokens"]), (
        "the test wants a token that is half a character"
    )


@pytest.mark.parametrize("echo", [False, True])
def test_a_stream_says_what_the_whole_answer_says(server: Server, echo: bool) -> None:
    body = {"prompt": [STORY, "The dog"], "n": 2, "seed": 11, "max_tokens": 24, "echo": echo}
    whole = server.post(PATH, body)
    chunks = chunks_of(server, {**body, "stream_options": {"include_usage": True}})
    assert texts_of(chunks) == {choice["index"]: choice["text"] for choice in whole["choices"]}
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["total_tokens"] == whole["usage"]["total_tokens"]
    assert all(chunk["usage"] is None for chunk in chunks[:-1])
    ends = [choice for chunk in chunks for choice in chunk["choices"] if choice["finish_reason"]]
    assert sorted(choice["index"] for choice in ends) == [0, 1, 2, 3]
    assert {choice["seed_used"] for choice in ends} == {11}
    assert len({(chunk["id"], chunk["created"], chunk["model"]) for chunk in chunks}) == 1


def test_every_chunk_has_the_usage_so_far_for_those_who_want_it(server: Server) -> None:
    body = {"prompt": [STORY, "The dog"], "max_tokens": 8, "ignore_eos": True}
    wanted = {"include_usage": True, "continuous_usage_stats": True}
    chunks = chunks_of(server, {**body, "stream_options": wanted})
    made = [chunk["usage"]["completion_tokens"] for chunk in chunks]
    assert made == sorted(made) and made[0] < 16 and made[-2:] == [16, 16]
    assert all(chunk["usage"]["total_tokens"] > chunk["usage"]["completion_tokens"] for chunk in chunks)


def test_streamed_log_probabilities_and_ids_are_those_of_the_whole_answer(server: Server) -> None:
    body = {**GREEDY, "logprobs": 1, "return_token_ids": True}
    whole = server.post(PATH, body)["choices"][0]
    parts = [choice for chunk in chunks_of(server, body) for choice in chunk["choices"]]
    joined = {
        name: [item for part in parts if part["logprobs"] for item in part["logprobs"][name]]
        for name in whole["logprobs"]
    }
    assert nearly(joined, whole["logprobs"])
    assert [token for part in parts for token in part["token_ids"]] == whole["token_ids"]
    assert parts[0]["prompt_token_ids"] == whole["prompt_token_ids"]


def test_progress_of_a_long_prompt_comes_before_its_text(server: Server) -> None:
    prompt = ids_of(server, "A long story. " * 300)[:900]
    chunks = chunks_of(server, {"prompt": prompt, "max_tokens": 2, "return_progress": True})
    told = [chunk["prompt_progress"] for chunk in chunks if "prompt_progress" in chunk]
    assert told and all(step["total"] == 900 for step in told)
    assert [step["processed"] for step in told] == sorted(step["processed"] for step in told)
    assert "prompt_progress" in chunks[0]


def test_a_stop_string_ends_the_text_and_is_named(server: Server) -> None:
    free = server.post(PATH, {**GREEDY, "max_tokens": 20})["choices"][0]["text"]
    word = free.split()[3]
    choice = server.post(PATH, {**GREEDY, "max_tokens": 20, "stop": word})["choices"][0]
    assert choice["text"] == free[: free.index(word)]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", word)
    shown = server.post(PATH, {**GREEDY, "stop": [word], "include_stop_str_in_output": True, "max_tokens": 20})
    assert shown["choices"][0]["text"].endswith(word)


def test_a_pattern_ends_the_text_of_an_answer_and_of_a_stream(server: Server) -> None:
    free = server.post(PATH, {**GREEDY, "max_tokens": 20})["choices"][0]["text"]
    first = re.search(r"\s\w\w\w+[.,]?\s", free)
    assert first is not None
    body = {**GREEDY, "max_tokens": 20, "stop_regex": [r"\d\d", r"\s\w\w\w+[.,]?\s"]}
    choice = server.post(PATH, body)["choices"][0]
    assert choice["text"] == free[: first.start()]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", body["stop_regex"][1])
    shown = server.post(PATH, {**body, "include_stop_str_in_output": True})["choices"][0]["text"]
    assert shown == free[: first.end()]
    pieces = [chunk["choices"][0]["text"] for chunk in chunks_of(server, body)]
    assert "".join(pieces) == choice["text"]


def test_a_bias_forces_and_forbids_tokens(server: Server) -> None:
    token = ids_of(server, " dog")[-1]
    body = {**GREEDY, "max_tokens": 3, "return_token_ids": True}
    assert server.post(PATH, {**body, "logit_bias": {str(token): 100}})["choices"][0]["token_ids"] == [token] * 3
    first = server.post(PATH, body)["choices"][0]["token_ids"][0]
    assert server.post(PATH, {**body, "logit_bias": {str(first): -100}})["choices"][0]["token_ids"][0] != first


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [PATH, "/v1/chat/completions"])
def test_only_a_stop_that_was_asked_for_is_named(server: Server, path: str, stream: bool) -> None:
    prompt = {"prompt": STORY} if path == PATH else {"messages": [{"role": "user", "content": STORY}]}
    body = {**prompt, "max_tokens": 5, "temperature": 0, "structured_outputs": {"choice": ["no"]}}

    def ending(**more: Any) -> dict[str, Any]:
        if not stream:
            return server.post(path, {**body, **more})["choices"][0]
        chunks = [json.loads(each) for each in server.events(path, {**body, **more})[:-1]]
        return next(each["choices"][0] for each in chunks if each["choices"] and each["choices"][0]["finish_reason"])

    found = ending()
    assert found["finish_reason"] == "stop" and found["stop_reason"] is None and 0 <= found["seed_used"] < 2**53
    end = server.post(path, {**body, "return_token_ids": True})["choices"][0]["token_ids"][-1]
    assert ending(stop_token_ids=[end])["stop_reason"] == end
    assert ending(stop=["o"])["stop_reason"] == "o"
    assert ending(seed=2**64 - 1)["seed_used"] == 2**64 - 1


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"guided_choice": ["red (dark)", "blue."]}, r"red \(dark\)|blue\."),
        ({"structured_outputs": {"choice": ["one", "two"]}}, "one|two"),
        ({"guided_regex": "[a-c]{3}-[0-9]{2}"}, "[a-c]{3}-[0-9]{2}"),
        ({"guided_grammar": 'start: "yes" | "no"'}, "yes|no"),
        ({"response_format": TAGGED}, r"[^,]*,7!"),
        ({"structured_outputs": {"structural_tag": json.dumps(TAGGED)}}, r"[^,]*,7!"),
        ({"structured_outputs": {"grammar": 'root ::= "up" | "down"'}}, "up|down"),
        ({"structured_outputs": {"json": {"type": "boolean"}}}, "true|false"),
        ({"guided_json": '{"enum": [7, 8]}'}, "7|8"),
        ({"response_format": {"type": "json_object", "schema": {"enum": [7, 8]}}}, "7|8"),
        ({"response_format": {"type": "json_schema", "schema": {"enum": [7, 8]}}}, "7|8"),
        ({"json_schema": {"enum": [7, 8]}}, "7|8"),
        ({"json_schema": '{"enum": [7, 8]}', "grammar": "", "regex": ""}, "7|8"),
        ({"regex": "up|down"}, "up|down"),
        ({"grammar": 'root ::= "up" | "down"'}, "up|down"),
        ({"ebnf": 'root ::= "up" | "down"', "json_schema": None}, "up|down"),
    ],
)
def test_a_form_binds_the_text(server: Server, form: dict[str, Any], pattern: str) -> None:
    choice = server.post(PATH, {"prompt": STORY, "max_tokens": 30, "seed": 3, **form})["choices"][0]
    assert choice["finish_reason"] == "stop" and re.fullmatch(pattern, choice["text"].strip()), choice["text"]


@pytest.mark.parametrize(
    ("form", "reason"),
    [
        ({"regex": "((x{100}){100}){100}"}, "this regex needs 1000000 characters"),
        ({"grammar": 'root ::= "a" root'}, "more than .* ways to read"),
        ({"grammar": 'root ::= ("x" | "y") c\nc ::= "zq" c'}, "does not follow the grammar: .*ways to read"),
    ],
)
def test_a_form_that_can_not_be_kept_to_is_refused_with_the_compilers_reason(
    server: Server, form: dict[str, Any], reason: str
) -> None:
    error = server.refusal(PATH, {"prompt": STORY, "max_tokens": 30, "structured_outputs": form})
    assert re.search(reason, error["message"]) and "device" not in error["message"]
    answer = server.post(PATH, {"prompt": STORY, "max_tokens": 9, "structured_outputs": {"choice": ["well"]}})
    assert answer["choices"][0]["text"] == "well"


@pytest.mark.parametrize(
    ("form", "param", "said"),
    [
        ({"structured_outputs": {"schema": {}}}, "structured_outputs", "wanted one of json, json_object, regex"),
        ({"structured_outputs": {}}, "structured_outputs", "no kind"),
        ({"response_format": {"type": "text", "schema": {}}}, "response_format.schema", "no field but type"),
        (
            {"response_format": {"type": "json_object", "json_schema": {"schema": {}}}},
            "response_format.json_schema",
            "wanted schema",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {}}, "schema": {}}},
            "response_format.schema",
            "json_schema and schema",
        ),
        ({"response_format": {"type": "json_object", "triggers": ["a"]}}, "response_format.triggers", "triggers"),
        ({"regex": "a", "grammar": 'root ::= "a"'}, "regex", "one response format"),
    ],
)
def test_a_form_that_would_bind_nothing_or_two_ways_is_refused(
    server: Server, form: dict[str, Any], param: str, said: str
) -> None:
    error = server.refusal(PATH, {"prompt": STORY, "max_tokens": 3, **form})
    assert error["param"] == param and said in error["message"], error


@pytest.mark.parametrize(("count", "remark"), [(1, ""), (2, " (the answer does not keep to it)")])
def test_what_of_a_schema_is_not_enforced_is_named_in_a_header_and_whether_the_answer_keeps_to_it(
    server: Server, count: int, remark: str
) -> None:
    tags = {"type": "array", "items": {"enum": ["a"]}, "uniqueItems": True, "minItems": count, "maxItems": count}
    form = {"type": "json_schema", "json_schema": {"schema": tags}}
    named = "ignored: {}#/uniqueItems" + remark
    for body, place in (
        ({"response_format": form}, "response_format"),
        ({"guided_json": tags}, "guided_json"),
        ({"structured_outputs": {"json": tags}}, "structured_outputs.json"),
    ):
        answer = server.send(PATH, {"prompt": STORY, "max_tokens": 30, **body})
        assert answer.headers["x-sglcore-warnings"] == named.format(place), answer.text
        assert json.loads(answer.json()["choices"][0]["text"]) == ["a"] * count


def test_ignored_fields_are_named_in_a_header(server: Server) -> None:
    answer = server.send(PATH, {**GREEDY, "user": "somebody", "metadata": {"a": "b"}})
    assert answer.headers["x-sglcore-warnings"] == "ignored: metadata, user"
    assert "x-sglcore-warnings" not in server.send(PATH, {**GREEDY, "user": None}).headers


@pytest.mark.parametrize(
    ("change", "param", "said"),
    [
        ({"suffix": "the end"}, "suffix", "suffix"),
        ({"best_of": 3}, "best_of", "same number"),
        ({"max_tokens": 0}, "max_tokens", "echo"),
        ({"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", "stream"),
        ({"seed": -2}, "seed", "at least -1"),
        ({"logprobs": 21}, "logprobs", "at most 20"),
        ({"n": 65}, "n", "at most 64"),
        ({"prompt_logprobs": 1000}, "prompt_logprobs", "at most 20"),
        ({"prompt": ["x"] * 1025}, "prompt", "at most 1024"),
        ({"prompt": [1] * 2000}, "prompt", "2000 tokens and the context holds 1024"),
        ({"prompt": []}, "prompt", "at least 1"),
        ({"prompt": [0, 999999]}, "prompt", "token id 999999"),
        ({"prompt": ["fine", ""], "add_special_tokens": False}, "prompt[1]", "empty"),
        ({"prompt": None}, "prompt", "null"),
        ({"logit_bias": {"word": 1}}, "logit_bias", "'word'"),
        ({"logit_bias": {"99999": 1}}, "logit_bias", "99999"),
        ({"allowed_token_ids": [99999]}, "allowed_token_ids", "99999"),
        ({"priority": 2**40}, "priority", "at most 2147483647"),
        ({"bad_words": [""]}, "bad_words[0]", "at least 1 character"),
        ({"temperature": -1}, "temperature", "at least 0"),
        ({"temperature": "1"}, "temperature", "a number"),
        ({"top_p": 0}, "top_p", "more than 0"),
        ({"seed": 10**30}, "seed", "18446744073709551615"),
        ({"max_tokens": 1.5}, "max_tokens", "integer"),
        ({"stop": ["a", ""]}, "stop", "non-empty"),
        ({"stop_regex": "a(?=b)"}, "stop_regex", "looks ahead"),
        ({"response_format": {"type": "structural_tag", "triggers": ["<"]}}, "response_format", "structures"),
        (
            {"response_format": {"type": "structural_tag", "structures": [{}], "triggers": ["!"]}},
            "response_format",
            "begin",
        ),
        ({"min_tokens": 30}, "min_tokens", "at most max_tokens"),
        ({"guided_regex": "a", "guided_choice": ["b"]}, "guided_regex", "one response format"),
        ({"guided_regex": "("}, None, "("),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema", "no schema"),
    ],
)
def test_what_can_not_be_run_is_refused_by_its_name(
    server: Server, change: dict[str, Any], param: str | None, said: str
) -> None:
    error = server.refusal(PATH, {**GREEDY, **change})
    assert error["type"] == "invalid_request_error" and said in error["message"], error
    assert param is None or error["param"] == param, error


def test_a_refused_prompt_ends_those_before_it(server: Server) -> None:
    before = wait_for_idle(server)
    server.refusal(PATH, {"prompt": [STORY] * 8 + [[999999]], "max_tokens": 900, "ignore_eos": True})
    after = wait_for_idle(server)
    assert after["generation_tokens"] - before["generation_tokens"] < 8 * 900


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_goes_away_frees_its_places(server: Server, stream: bool) -> None:
    before = wait_for_idle(server)
    body = json.dumps({"prompt": STORY, "n": 32, "max_tokens": 1000, "ignore_eos": True, "stream": stream}).encode()
    head = f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        connection.sendall(head.encode() + body)
        if stream:
            assert connection.recv(64).startswith(b"HTTP/1.1 200")
        else:
            while server.get("/server_info/stats")["running"] < 32:
                time.sleep(0.02)
    after = wait_for_idle(server)
    assert after["generation_tokens"] - before["generation_tokens"] < 32 * 900
    assert after["kv_used"] == 0.0
