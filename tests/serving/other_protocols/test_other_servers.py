"""Endpoints of llama-server and SGLang give the same results as /v1/completions."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglcore.engine.output_processor import OutputProcessor
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request_output import EngineOutput
from sglcore.serving.replicas.ipc import EngineStats, GenerateRequest, pack_params
from sglcore.serving.replicas.prompt_generation import Generation
from tests.serving.conftest import Server
from tests.serving.stubs import DEMO, call, gives, make_frontend

STORY = "Once upon a time"
OURS = {"prompt": STORY, "max_tokens": 9, "seed": 5, "temperature": 0.8}
LLAMA = {"prompt": STORY, "n_predict": 9, "seed": 5, "temperature": 0.8}
SGLANG = {"text": STORY, "sampling_params": {"max_new_tokens": 9, "sampling_seed": 5, "temperature": 0.8}}


def events_of(server: Server, path: str, body: Any) -> list[Any]:
    return [json.loads(event) for event in server.events(path, body) if event != "[DONE]"]


def test_completion_says_the_same_as_completions(server: Server) -> None:
    wanted = server.post("/v1/completions", {**OURS, "logprobs": 2, "return_token_ids": True})
    found = server.post("/completion", {**LLAMA, "n_probs": 2, "return_tokens": True})
    choice = wanted["choices"][0]
    assert (found["content"], found["tokens"]) == (choice["text"], choice["token_ids"])
    assert (found["stop"], found["stop_type"], found["stopping_word"]) == (True, "limit", "")
    assert found["tokens_evaluated"] == wanted["usage"]["prompt_tokens"] and found["tokens_predicted"] == 9
    values = [each["logprob"] for each in found["completion_probabilities"]]
    assert values == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-5)
    assert all(len(each["top_logprobs"]) == 2 for each in found["completion_probabilities"])
    assert "completion_probabilities" not in server.post("/completion", LLAMA)


def test_a_stream_of_completion_adds_up_and_ends_with_its_counts(server: Server) -> None:
    whole = server.post("/completion", LLAMA)
    parts = events_of(server, "/completion", LLAMA)
    assert "".join(part["content"] for part in parts) == whole["content"]
    assert [part["stop"] for part in parts] == [False] * (len(parts) - 1) + [True]
    assert parts[-1]["tokens_predicted"] == 9 and parts[-1]["timings"]["predicted_n"] == 9


def test_the_names_of_llama_server_mean_what_they_say_there(server: Server) -> None:
    plain, dry, again = (
        server.post(
            "/completion", {**LLAMA, "prompt": "a b c d a b c d a b c", "n_predict": 12, "temperature": 0, **more}
        )["content"]
        for more in ({}, *[{"dry_multiplier": 4.0, "dry_allowed_length": 1, "dry_sequence_breakers": []}] * 2)
    )
    assert dry == again != plain
    drawn = [
        server.post("/completion", {**LLAMA, "n_predict": 20, "temperature": 1, "seed": 3, **more})["content"]
        for more in ({}, *[{"xtc_probability": 1.0, "xtc_threshold": 0.05}] * 2)
    ]
    assert drawn[0] != drawn[1] == drawn[2]
    word = server.post("/completion", {**LLAMA, "n_predict": -1, "stop": ["."]})
    assert (word["stop_type"], word["stopping_word"]) == ("word", ".")
    schema = {
        "type": "object",
        "properties": {"a": {"type": "boolean"}},
        "required": ["a"],
        "additionalProperties": False,
    }
    assert set(
        json.loads(server.post("/completion", {**LLAMA, "n_predict": 30, "json_schema": schema})["content"])
    ) == {"a"}
    bound = server.post("/completion", {**LLAMA, "grammar": 'root ::= "fox" | "dog"'})
    assert bound["content"] in ("fox", "dog") and bound["stop_type"] == "eos"
    token = server.post("/tokenize", {"content": " fox"})["tokens"][0]
    drawn = server.post("/completion", {**LLAMA, "logit_bias": [[token, 100]], "return_tokens": True})["tokens"]
    assert drawn == [token] * 9
    greedy = {**LLAMA, "temperature": 0, "return_tokens": True}
    first = server.post("/completion", greedy)["tokens"][0]
    assert first not in server.post("/completion", {**greedy, "logit_bias": [[first, False]]})["tokens"]
    whole = server.post("/completion", {"prompt": "word " * 860, "n_predict": -1, "ignore_eos": True})
    assert whole["tokens_predicted"] + whole["tokens_evaluated"] == server.get("/server_info")["max_model_len"]
    assert whole["tokens_predicted"] > 140
    several = server.post("/completion", {**LLAMA, "prompt": [STORY, "The dog"]})
    assert [each["index"] for each in several] == [0, 1]
    for wrong in (0.5, -1, False):
        refused = server.refusal("/completion", {**LLAMA, "logit_bias": [[wrong, 1.0]]})
        assert refused["param"] == "logit_bias" and "token id" in refused["message"]
    error = server.refusal("/completion", {**LLAMA, "n_predict": 0})
    assert error["param"] == "n_predict"
    assert server.refusal("/completion", {**LLAMA, "mirostat": 2})["param"] == "mirostat"
    assert server.refusal("/completion", {**LLAMA, "max_tokens": 2})["message"].endswith("use n_predict")
    assert "no tokens to fill in" in server.refusal("/infill", {"input_prefix": "a", "input_suffix": "b"})["message"]


def test_what_is_filled_in_stands_behind_both_sides() -> None:
    from tokenizers import Tokenizer

    asked: list[Any] = []
    frontend = make_frontend()
    frontend.codec.tokenizer = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
    frontend.codec.tokenizer.add_tokens(["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"])

    async def generate(prompt: Any, *given: Any, **named: Any) -> Any:
        asked.append(prompt)
        return await gives()(prompt)

    frontend.generate = generate  # pyright: ignore[reportAttributeAccessIssue]
    sides, filled = {"input_prefix": "a(", "input_suffix": ")c"}, "<|fim_prefix|>a(<|fim_suffix|>)c<|fim_middle|>"
    named, nameless = {"filename": "d.py", "text": "d"}, {"text": "e"}
    for more, before, after in (
        ({"prompt": "b"}, "", "b"),
        ({}, "", ""),
        ({"prompt": None, "input_extra": None}, "", ""),
        ({"prompt": "", "input_extra": []}, "", ""),
        ({"prompt": "b", "input_extra": [named]}, "d.py\nd\n", "b"),
        ({"input_extra": [nameless, {**nameless, "filename": None}, named]}, "\ne\n\ne\nd.py\nd\n", ""),
    ):
        assert call(frontend, "POST", "/infill", {**sides, **more}).status_code == 200
        assert asked.pop() == before + filled + after, more


def test_state_and_templates_as_llama_server_tells_them(server: Server) -> None:
    info, props = server.get("/server_info"), server.get("/props")
    assert props["total_slots"] == info["limits"]["max_requests"] == len(server.get("/slots"))
    assert props["default_generation_settings"]["n_ctx"] == info["max_model_len"]
    assert props["chat_template"] == server.get("/tokenizer_info")["chat_template"]
    assert not any(slot["is_processing"] for slot in server.get("/slots"))
    messages = [{"role": "user", "content": "hi"}]
    prompt = server.post("/apply-template", {"messages": messages})["prompt"]
    shown = server.post("/tokenize", {"messages": messages})["tokens"]
    assert server.post("/tokenize", {"content": prompt})["tokens"] == shown
    pieces = server.post("/tokenize", {"content": "a fox", "with_pieces": True, "add_special": True})["tokens"]
    assert "".join(piece["piece"] for piece in pieces).endswith("a fox")
    assert [piece["id"] for piece in pieces] == server.post("/tokenize", {"prompt": "a fox"})["tokens"]
    assert server.post("/detokenize", {"tokens": shown})["content"] == prompt


def test_slots_tell_what_each_sample_does_and_of_those_that_wait_nothing() -> None:
    def one(name: str, n: int) -> Generation:
        params = SamplingParams(max_tokens=9, n=n)
        processor = OutputProcessor(frontend.codec, name, None, [5, 6, 7], params, 4)
        return Generation(GenerateRequest(name, b"", pack_params(params), 4), processor, frontend.metrics.clock())

    frontend = make_frontend()
    begun, queued = one("begun", 2), one("queued", 4)
    begun.deliver(EngineOutput("begun", 1, [8, 9], cached_tokens=1))
    frontend.supervisor.generations = [queued, begun]  # pyright: ignore[reportAttributeAccessIssue]
    frontend.supervisor.replicas[0] = None  # pyright: ignore[reportArgumentType]
    frontend.info.limits["max_requests"] = 4  # pyright: ignore[reportOptionalMemberAccess]
    frontend.stats = lambda: EngineStats(running=2)
    slots = call(frontend, "GET", "/slots").json()
    assert [slot["is_processing"] for slot in slots] == [True, True, False, False]
    assert (slots[0]["request_id"], slots[0]["n_prompt_tokens"], slots[0]["n_prompt_tokens_cache"]) == ("begun", 3, 1)
    assert slots[0]["next_token"] == [{"has_next_token": True, "n_remain": 7, "n_decoded": 2}]
    assert (slots[1]["request_id"], slots[1]["n_prompt_tokens_processed"]) == ("queued", 0)
    assert slots[3] == {"id": 3, "n_ctx": 64, "is_processing": False}
    frontend.stats = EngineStats  # as of before the first step
    early = call(frontend, "GET", "/slots").json()
    assert [slot.get("request_id") for slot in early] == ["begun", None, None, None]


def test_generate_says_the_same_as_completions(server: Server) -> None:
    wanted = server.post("/v1/completions", {**OURS, "logprobs": 0, "return_token_ids": True})
    found = server.post("/generate", {**SGLANG, "return_logprob": True})
    choice = wanted["choices"][0]
    assert (found["text"], found["output_ids"]) == (choice["text"], choice["token_ids"])
    assert found["meta_info"]["finish_reason"] == {"type": "length", "length": 9}
    values = [value for value, _, _ in found["meta_info"]["output_token_logprobs"]]
    assert values == pytest.approx(choice["logprobs"]["token_logprobs"], abs=1e-5)
    parts = events_of(server, "/generate", SGLANG)
    assert parts[-1]["text"] == found["text"] and all(found["text"].startswith(part["text"]) for part in parts)
    ids = server.post("/tokenize", {"prompt": STORY})["tokens"]
    same = server.post("/generate", {"input_ids": ids, "sampling_params": SGLANG["sampling_params"], "rid": "mine"})
    assert (same["text"], same["meta_info"]["id"]) == (found["text"], "mine")


PROMPTS = [STORY, "The dog", "A"]


@pytest.mark.parametrize(
    ("prompts", "n"), [(PROMPTS, 1), (PROMPTS[:2], 2), (PROMPTS, 2), (PROMPTS[0], 3), (PROMPTS[:1], 1)]
)
def test_each_part_of_a_stream_of_generate_bears_the_place_of_its_own_sample(
    server: Server, prompts: Any, n: int
) -> None:
    body = {"text": prompts, "sampling_params": {**SGLANG["sampling_params"], "max_new_tokens": 4, "n": n}}
    whole = server.post("/generate", body)
    last = {part["index"]: part for part in events_of(server, "/generate", body)}
    assert sorted(last) == list(range(len(whole)))
    assert [last[place]["output_ids"] for place in sorted(last)] == [each["output_ids"] for each in whole]
    assert len({str(each["output_ids"]) for each in whole}) > len(whole) // 2, "they can be told apart"


def test_each_part_of_a_stream_of_completion_bears_the_place_of_its_own_prompt(server: Server) -> None:
    body = {**LLAMA, "prompt": PROMPTS, "return_tokens": True}
    whole, found = server.post("/completion", body), dict[int, list[int]]()
    for part in events_of(server, "/completion", body):
        found.setdefault(part["index"], []).extend(part["tokens"])
    assert [found[place] for place in sorted(found)] == [each["tokens"] for each in whole]


def test_generate_takes_lists_forms_and_refuses_by_name(server: Server) -> None:
    several = server.post("/generate", {"text": [STORY, "The dog"], "sampling_params": {"max_new_tokens": 3, "n": 2}})
    assert len(several) == 4
    bound = server.post("/generate", {"text": STORY, "sampling_params": {"regex": "fox|dog"}})
    assert bound["text"] in ("fox", "dog")
    stopped = server.post(
        "/generate", {**SGLANG, "sampling_params": {"max_new_tokens": 200, "stop": ".", "no_stop_trim": True}}
    )
    assert stopped["text"].endswith(".") and stopped["meta_info"]["finish_reason"]["matched"] == "."
    tagged = {"structures": [{"begin": ",", "schema": {"enum": [7]}, "end": "!"}], "triggers": [","]}
    found = server.post("/generate", {"text": STORY, "sampling_params": {"structural_tag": json.dumps(tagged)}})
    assert found["text"].count(",") == found["text"].count(",7!") > 0
    asked = {"max_new_tokens": 200, "temperature": 0}
    plain, pattern = (
        server.post("/generate", {**SGLANG, "sampling_params": {**asked, **stop}})
        for stop in ({"stop": "."}, {"stop_regex": "[.]"})
    )
    assert pattern["text"] == plain["text"] and pattern["meta_info"]["finish_reason"]["matched"] == "[.]"
    for given, param in (
        ({"max_new_tokens": 5, "min_new_tokens": 9}, "sampling_params.min_new_tokens"),
        ({"temperature": -1}, "sampling_params.temperature"),
        ({"regex": "("}, "sampling_params.regex"),
        ({"typical_p": 0.5}, "typical_p"),
        ({"max_tokens": 5}, "max_tokens"),
    ):
        assert server.refusal("/generate", {"text": "a", "sampling_params": given})["param"] == param
    assert "text and input_ids" in server.refusal("/generate", {})["message"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/completions", OURS),
        ("/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
        ("/responses", {"input": "a", "max_output_tokens": 2}),
        ("/messages", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
    ],
)
def test_paths_without_v1_are_the_same(server: Server, path: str, body: Any) -> None:
    usages = [server.post(each, body)["usage"] for each in (path, f"/v1{path}")]
    for usage in usages:
        usage.pop("completion_tokens_details", None)  # depends on timing
    assert usages[0] == usages[1] or path != "/completions"
    assert server.send(path, {}).json() == server.send(f"/v1{path}", {}).json()
    assert server.get("/models") == server.get("/v1/models")
