"""A server without a tokenizer: token ids in, token ids out; requests that need text are refused
with the reason and the remedy."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx
import pytest

from sglcore import LLM, SamplingParams
from sglcore.config.engine_config import EngineConfig
from sglcore.config.server_config import ServerConfig
from sglcore.core.errors import ConfigError
from sglcore.engine.start import embedded_model
from sglcore.engine.tokenizers.chat_template import TextError
from sglcore.engine.tokenizers.skipped_tokenizer import SKIPPED, open_codec
from sglcore.sampling.grammar_spec import Grammar, Thinking, TokenRules
from sglcore.serving.chat.conversation import MessageForm
from sglcore.serving.chat.parser_choice import choose_reasoning, choose_tools
from tests.serving.in_process import served_here

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "max_requests": 4,
    "max_model_len": 128,
    "kv_cache_memory": 16 << 20,
    "skip_tokenizer": True,
}
IDS = [5, 77, 301, 12, 9]
ASKED = {"prompt": IDS, "max_tokens": 7, "temperature": 0.8, "seed": 4, "ignore_eos": True}
SAMPLED = {"max_new_tokens": 7, "temperature": 0.8, "sampling_seed": 4, "ignore_eos": True}
DRAWN = SamplingParams(max_tokens=7, temperature=0.8, seed=4, ignore_eos=True)
TALK = [{"role": "user", "content": "Hello"}]
TOLD = (SKIPPED, "start without --skip-tokenizer")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The embedded model's weights and configuration only."""
    made = tmp_path_factory.mktemp("ids")
    for name in ("config.json", "generation_config.json", "model.safetensors"):
        shutil.copy(embedded_model() / name, made / name)
    return made


@pytest.fixture(scope="module")
def client(folder: Path) -> Iterator[httpx.Client]:
    with (
        served_here(folder, ServerConfig(served_model_name=("m",)), **SETTINGS) as url,
        httpx.Client(base_url=url, timeout=300) as found,
    ):
        yield found


@pytest.fixture(scope="module")
def wanted(llm: LLM) -> list[int]:
    """The tokens of an engine with a tokenizer for the same ids."""
    return llm.generate([IDS], DRAWN)[0].outputs[0].token_ids


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(**{**SETTINGS, "skip_tokenizer": False}) as found:
        yield found


def data_of(lines: str) -> list[Any]:
    """The data of a stream's events."""
    texts = [line.removeprefix("data: ") for line in lines.splitlines() if line.startswith("data: ")]
    return [json.loads(text) for text in texts if text != "[DONE]"]


def test_token_ids_give_the_ids_of_an_engine_with_its_tokenizer(client: httpx.Client, wanted: list[int]) -> None:
    choice = client.post("/v1/completions", json=ASKED).raise_for_status().json()["choices"][0]
    assert (choice["token_ids"], choice["prompt_token_ids"], choice["text"]) == (wanted, IDS, "")
    events = data_of(client.post("/v1/completions", json={**ASKED, "stream": True}).raise_for_status().text)
    assert [token for event in events for choice in event["choices"] for token in choice["token_ids"]] == wanted
    found = client.post("/generate", json={"input_ids": IDS, "sampling_params": SAMPLED, "return_logprob": True}).json()
    assert (found["output_ids"], found["text"]) == (wanted, "")
    assert [(token, text) for _, token, text in found["meta_info"]["output_token_logprobs"]] == [
        (token, None) for token in wanted
    ]
    assert client.post("/completion", json={**ASKED, "n_predict": 7} | {"max_tokens": None}).json()["tokens"] == wanted


def test_parameters_of_tokens_are_followed(client: httpx.Client, wanted: list[int]) -> None:
    stop = wanted[3]
    first = wanted.index(stop)
    for more, ids in (
        ({"stop_token_ids": [stop]}, wanted[: first + 1]),
        ({"allowed_token_ids": [8]}, [8] * 7),
        ({"logit_bias": {"9": 100}}, [9] * 7),
        ({"min_tokens": 7, "n": 1, "skip_special_tokens": False, "echo": False}, wanted),
    ):
        choice = client.post("/v1/completions", json={**ASKED, **more}).raise_for_status().json()["choices"][0]
        assert choice["token_ids"] in (ids, ids[:-1]), more
    dry = {"dry_multiplier": 2.0, "dry_sequence_breakers": []}
    assert client.post("/v1/completions", json={**ASKED, **dry}).status_code == 200


NEEDS_TEXT: dict[str, tuple[str, dict[str, Any], str | None]] = {
    "prompt": ("/v1/completions", {"prompt": "Once"}, "prompt"),
    "long prompt": ("/v1/completions", {"prompt": "word " * 2000}, "prompt"),
    "stop": ("/v1/completions", {**ASKED, "stop": "a"}, "stop"),
    "stop_regex": ("/v1/completions", {**ASKED, "stop_regex": "a"}, "stop_regex"),
    "bad_words": ("/v1/completions", {**ASKED, "bad_words": ["a"]}, "bad_words"),
    "dry": ("/v1/completions", {**ASKED, "dry_multiplier": 1.0}, "dry_sequence_breakers"),
    "logprobs": ("/v1/completions", {**ASKED, "logprobs": 0}, "logprobs"),
    "prompt_logprobs": ("/v1/completions", {**ASKED, "prompt_logprobs": 1}, "prompt_logprobs"),
    "echo": ("/v1/completions", {**ASKED, "echo": True}, "echo"),
    "format": (
        "/v1/completions",
        {**ASKED, "ignore_eos": False, "response_format": {"type": "json_object"}},
        "response_format",
    ),
    "regex": (
        "/v1/completions",
        {**ASKED, "ignore_eos": False, "structured_outputs": {"regex": "a"}},
        "structured_outputs.regex",
    ),
    "guided": ("/v1/completions", {**ASKED, "ignore_eos": False, "guided_choice": ["a", "b"]}, "guided_choice"),
    "chat": ("/v1/chat/completions", {"messages": TALK}, "messages"),
    "chat stream": ("/v1/chat/completions", {"messages": TALK, "stream": True}, "messages"),
    "tools": (
        "/v1/chat/completions",
        {"messages": TALK, "tools": [{"type": "function", "function": {"name": "f"}}]},
        "messages",
    ),
    "responses": ("/v1/responses", {"input": "Hello"}, None),
    "responses count": ("/v1/responses/input_tokens", {"input": "Hello"}, None),
    "messages": ("/v1/messages", {"messages": TALK, "max_tokens": 4}, None),
    "messages count": ("/v1/messages/count_tokens", {"messages": TALK}, None),
    "generate": ("/generate", {"text": "Once"}, None),
    "generate stop": ("/generate", {"input_ids": IDS, "sampling_params": {"stop": "a"}}, None),
    "generate regex": ("/generate", {"input_ids": IDS, "sampling_params": {"regex": "a"}}, "sampling_params.regex"),
    "completion": ("/completion", {"prompt": "Once"}, "prompt"),
    "n_probs": ("/completion", {"prompt": IDS, "n_probs": 2}, "n_probs"),
    "grammar": ("/completion", {"prompt": IDS, "grammar": 'root ::= "a"'}, "grammar"),
    "infill": ("/infill", {"input_prefix": "a", "input_suffix": "b"}, "input_suffix"),
    "template": ("/apply-template", {"messages": TALK}, "messages"),
    "tokenize": ("/tokenize", {"prompt": "a"}, None),
    "detokenize": ("/detokenize", {"tokens": [1]}, None),
    "ollama chat": ("/api/chat", {"messages": TALK}, None),
    "ollama generate": ("/api/generate", {"prompt": "Once"}, None),
    "ollama raw": ("/api/generate", {"prompt": "Once", "raw": True}, None),
    "ollama fill": ("/api/generate", {"prompt": "Once", "suffix": "end"}, None),
}


@pytest.mark.parametrize("name", NEEDS_TEXT)
def test_what_needs_text_is_a_400_with_the_reason_and_the_remedy(client: httpx.Client, name: str) -> None:
    path, body, param = NEEDS_TEXT[name]
    found = client.post(path, json=body)
    error = found.json()["error"]
    message = error if path.startswith("/api/") else error["message"]
    assert found.status_code == 400 and all(each in message for each in TOLD), found.text
    assert param is None or error["param"] == param


def test_every_endpoint_that_takes_a_prompt_is_among_them(client: httpx.Client) -> None:
    from tests.serving.replicas.test_long_prompts import TEXT

    assert set(TEXT) <= {path for path, _, _ in NEEDS_TEXT.values()}
    found = client.get("/tokenizer_info")
    assert found.status_code == 400 and SKIPPED in found.json()["error"]["message"]
    assert client.get("/props").json()["chat_template"] == "" and client.get("/readyz").status_code == 200


def test_ids_are_embedded_and_texts_refused(folder: Path) -> None:
    with served_here(folder, task="embed", **SETTINGS) as url, httpx.Client(base_url=url, timeout=300) as client:
        found = client.post("/v1/embeddings", json={"input": [IDS, IDS[:3]]}).raise_for_status().json()
        first = found["data"][0]["embedding"]
        assert len(found["data"]) == 2 and found["usage"]["prompt_tokens"] == 8
        for path, body in (
            ("/v1/embeddings", {"input": ["a"]}),
            ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 3}),
            ("/v1/score", {"text_1": "a", "text_2": "b"}),
            ("/v1/rerank", {"query": "a", "documents": ["b"]}),
            ("/api/embed", {"input": "a"}),
            ("/api/embeddings", {"prompt": "a"}),
        ):
            refused = client.post(path, json=body)
            assert refused.status_code == 400 and all(each in refused.text for each in TOLD), body
    with LLM(task="embed", **{**SETTINGS, "skip_tokenizer": False}) as llm:
        assert first == pytest.approx(llm.embed([IDS])[0].tolist(), abs=1e-5)


def test_offline_ids_are_made_and_text_is_refused(folder: Path, wanted: list[int]) -> None:
    with LLM(str(folder), **SETTINGS) as llm:
        completion = llm.generate([IDS], DRAWN)[0].outputs[0]
        assert (completion.token_ids, completion.text, completion.finish_reason) == (wanted, "", "length")
        scored = llm.generate([IDS], SamplingParams(max_tokens=2, logprobs=2, temperature=0.0))[0].outputs[0]
        assert scored.logprobs is not None and len(scored.logprobs) == 2
        assert [token for delta in llm.stream(IDS, DRAWN) for token in delta.token_ids] == wanted
        for prompt, named in (("Once", DRAWN), (IDS, SamplingParams(stop=("a",)))):
            refused = llm.generate([prompt], named)[0].outputs[0]
            assert refused.finish_reason == "error" and all(each in refused.error for each in TOLD)
        for asked in (lambda: llm.chat(TALK), lambda: llm.prompt("a")):
            with pytest.raises(TextError, match="start without --skip-tokenizer"):
                asked()


ABOUT_TEXT: dict[str, Any] = {
    "stop": ("a",),
    "stop_regex": ("a",),
    "dry_multiplier": 1.0,
    "grammar": Grammar("regex", "a"),
    "token_rules": TokenRules((), ("a",)),
    "thinking": Thinking("end", "end", budget=4),
}
OF_TOKENS: dict[str, Any] = {
    **{"max_tokens": 5, "temperature": 0.5, "top_k": 4, "top_p": 0.5, "min_p": 0.1, "n": 2, "seed": 3, "priority": 1},
    **{"xtc_probability": 0.5, "xtc_threshold": 0.2, "presence_penalty": 1.0, "frequency_penalty": 1.0},
    **{"repetition_penalty": 1.5, "dry_base": 2.0, "dry_allowed_length": 3, "dry_penalty_last_n": 7},
    **{"dry_sequence_breakers": ("a",), "logit_bias": {5: 1.0}, "stop_token_ids": (7,), "ignore_eos": True},
    **{"min_tokens": 2, "logprobs": 3, "prompt_logprobs": 3, "skip_special_tokens": False},
    **{"include_stop_str_in_output": True, "token_rules": TokenRules((7,), ())},
    **{"return_hidden_states": "last", "return_hidden_states_before_norm": False},
}
"""Without `dry_multiplier`, `dry_sequence_breakers` have no effect."""


def test_every_parameter_is_followed_without_text_or_refused_for_want_of_it(tmp_path: Path) -> None:
    assert ABOUT_TEXT.keys() | OF_TOKENS.keys() == {each.name for each in fields(SamplingParams)}
    codec = open_codec(tmp_path, skips=True)
    for name, value in ABOUT_TEXT.items():
        with pytest.raises(TextError, match="needs text, and no tokenizer"):
            codec.check(SamplingParams(**{name: value}))
    for name, value in OF_TOKENS.items():
        codec.check(SamplingParams(**{name: value}))


def test_a_template_or_a_parser_beside_it_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="a chat template is given.*leave one"):
        open_codec(tmp_path, skips=True, chat_template="x")
    codec = open_codec(tmp_path, skips=True)
    assert {choose_reasoning(codec, "auto").reason, choose_tools(codec, "auto", None, MessageForm()).reason} == {
        SKIPPED
    }
    for choose in (
        lambda: choose_reasoning(codec, "qwen3"),
        lambda: choose_tools(codec, "hermes", None, MessageForm()),
    ):
        with pytest.raises(ConfigError, match="cannot be used: no tokenizer"):
            choose()
    assert EngineConfig().skip_tokenizer is False


def test_tokens_without_text_are_all_taken_however_many_come(tmp_path: Path) -> None:
    text = open_codec(tmp_path, skips=True).detokenizer((), skip_special=True, include_stop=False, prompt=[1, 2])
    for ids in ([5], [], [5, 6, 7]):
        assert text.push(ids) == "" and text.taken == len(ids)
    assert text.finish() == text.text == "" and text.stopped_by is None
