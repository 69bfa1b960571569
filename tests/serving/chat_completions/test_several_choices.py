"""Answers of several prompts and samples: each choice has its own text, tokens, scores and end, and
each chunk belongs to one of them."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from sglcore.engine.outputs import PromptProgress, TextDelta
from sglcore.schedule.request_output import TokenLogprob
from sglcore.serving.apis.answer import CUT, WARNINGS, Answer
from sglcore.serving.apis.openai.answers import ChatAnswer, ChatChunk, CompletionAnswer, CompletionChunk
from tests.serving.chat_completions.test_chunk_usage import PATHS, once
from tests.serving.stubs import Application, StubGeneration, make_frontend
from tests.serving.whole_answers import FOLDER

COMPLETIONS, CHAT = PATHS
ARRIVAL, RUN = "fp_0123456789ab", "fp_run"


def score(token: int) -> TokenLogprob:
    return TokenLogprob(token, -token / 8, 1, ((token, -token / 8), (3, -9.0)))


def delta(sample: int, token: int, text: str, end: Any = None) -> TextDelta:
    return TextDelta("r", sample, text, (token,), end, (score(token),))


class Generation(StubGeneration):
    """The deltas of a prompt, after these steps of progress. Its fingerprint is known once it has
    begun."""

    def __init__(self, place: int, prompt: Any, deltas: list[TextDelta], steps: Sequence[PromptProgress]) -> None:
        super().__init__(deltas)
        self._steps, self._late = steps, ""
        self.output.prompt = prompt if isinstance(prompt, str) else None
        self.output.prompt_token_ids = [40 + place, 50 + place]
        self.output.prompt_logprobs = [None, score(50 + place)]
        for sample in self.output.outputs:
            own = [each for each in deltas if each.index == sample.index]
            sample.token_ids = [token for each in own for token in each.token_ids]
            sample.logprobs = [found for each in own for found in each.logprobs or ()]
            sample.seed = 100 * place + sample.index
            sample.proposed_tokens, sample.accepted_tokens = 3 + place, 1 + sample.index

    def begins_as(self, fingerprint: str) -> None:
        self._late = fingerprint

    async def ended(self) -> None:
        """Know the fingerprint."""
        self.fingerprint = self._late

    async def __aiter__(self) -> AsyncIterator[Any]:
        self.fingerprint = self._late
        for step in self._steps:
            yield step
        async for item in super().__aiter__():
            yield item


class Served(Application):
    """An application whose model says two tokens in each sample of each prompt, in turns."""

    def __init__(self) -> None:
        self.frontend: Any = make_frontend(self.generate)
        super().__init__(self.frontend)
        self.reset()

    def reset(self) -> None:
        """Forget what the tests set."""
        self.made = 0
        self.steps: Sequence[PromptProgress] = ()
        self.fingerprint = ""
        self.limit: int | None = None
        self.silent = False
        self.named: list[dict[str, Any]] = []

    async def generate(self, prompt: Any, params: Any, **named: Any) -> Generation:
        """Return the deltas as a generation."""
        place, self.made = self.made, self.made + 1
        self.named.append(named)
        first = [delta(each, 10 + 4 * place + 2 * each, "" if self.silent else "Ab") for each in range(params.n)]
        last = [delta(each, 11 + 4 * place + 2 * each, f"c{place}{each}", "stop") for each in range(params.n)]
        made = Generation(place, prompt, [*first, *last], self.steps)
        made.begins_as(self.fingerprint)
        made.output.max_tokens = self.limit
        return made

    def ask(self, path: str, **body: Any) -> Any:
        """Return the whole answer."""
        self.made = 0
        answer = self.send("POST", path, {**PATHS[path], **body})
        assert answer.status_code == 200, answer.text
        return answer.json()

    def chunks(self, path: str, **body: Any) -> list[Any]:
        """Return the chunks of a stream that ends well."""
        self.made = 0
        answer = self.send("POST", path, {**PATHS[path], "stream": True, **body})
        *events, end = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert answer.status_code == 200 and end == "[DONE]", answer.text
        return [json.loads(event, object_pairs_hook=once) for event in events]


@pytest.fixture(scope="module")
def alone() -> Served:
    return Served()


@pytest.fixture
def served(alone: Served) -> Served:
    alone.reset()
    return alone


def joined(chunks: Sequence[Any]) -> dict[int, dict[str, Any]]:
    """The choices of a stream of completions by index, each put together from its parts."""
    found: dict[int, dict[str, Any]] = {}
    for part in (part for chunk in chunks for part in chunk["choices"]):
        whole = found.setdefault(part["index"], {"text": "", "token_ids": [], "logprobs": {}, "prompts": []})
        whole["text"] += part["text"]
        whole["token_ids"] += part["token_ids"]
        whole["prompts"].append(part.get("prompt_token_ids"))
        for name, values in part["logprobs"].items():
            whole["logprobs"].setdefault(name, []).extend(values)
        whole |= {name: part.get(name) for name in ("finish_reason", "seed_used")}
    return found


@pytest.mark.parametrize("echo", [False, True])
def test_each_sample_of_each_prompt_has_what_is_its_own_whole_and_in_parts(served: Served, echo: bool) -> None:
    body = {"prompt": ["one", "other"], "n": 2, "logprobs": 1, "return_token_ids": True, "echo": echo}
    answer = served.ask(COMPLETIONS, **body, prompt_logprobs=0)
    parts = joined(served.chunks(COMPLETIONS, **body))
    assert [choice["index"] for choice in answer["choices"]] == sorted(parts) == [0, 1, 2, 3]
    for index, choice in enumerate(answer["choices"]):
        place, sample = divmod(index, 2)
        begin = 10 + 4 * place + 2 * sample
        prompt = [40 + place, 50 + place]
        assert choice["text"] == ("one", "other")[place] * echo + f"Abc{place}{sample}"
        assert (choice["token_ids"], choice["prompt_token_ids"]) == ([begin, begin + 1], prompt)
        assert (choice["seed_used"], choice["finish_reason"]) == (100 * place + sample, "stop")
        scores = [*([None, -(50 + place) / 8] if echo else []), -begin / 8, -(begin + 1) / 8]
        assert choice["logprobs"]["token_logprobs"] == scores
        assert choice["prompt_logprobs"][0] is None and list(choice["prompt_logprobs"][1]) == [str(50 + place)]
        own = parts[index]
        assert own["prompts"] == [prompt, None]
        same = ("text", "token_ids", "logprobs", "finish_reason", "seed_used")
        assert {name: own[name] for name in same} == {name: choice[name] for name in same}


@pytest.mark.parametrize("along", [False, True])
def test_the_usage_counts_all_samples_of_all_prompts_whole_and_at_the_end_of_a_stream(
    served: Served, along: bool
) -> None:
    served.limit = 7
    body = {"prompt": ["one", "other"], "n": 2}
    options = {"include_usage": True, "continuous_usage_stats": along}
    usages = [
        served.ask(COMPLETIONS, **body)["usage"],
        served.chunks(COMPLETIONS, **body, stream_options=options)[-1]["usage"],
    ]
    details = {"accepted_prediction_tokens": 6, "rejected_prediction_tokens": 8, "max_tokens": 7}
    for usage in usages:
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (4, 8, 12)
        assert usage["completion_tokens_details"] == details


@pytest.mark.parametrize("samples", [1, 2, 3])
def test_each_sample_of_a_chat_begins_with_its_role_once_and_ends_once(served: Served, samples: int) -> None:
    body = {"n": samples, "logprobs": True, "return_token_ids": True}
    answer = served.ask(CHAT, **body)
    chunks = served.chunks(CHAT, **body)
    assert all(len(chunk["choices"]) == 1 for chunk in chunks)
    for index, choice in enumerate(answer["choices"]):
        own = [chunk for chunk in chunks if chunk["choices"][0]["index"] == index]
        parts = [chunk["choices"][0] for chunk in own]
        assert [part["delta"].get("role") for part in parts] == ["assistant", *[None] * (len(parts) - 1)]
        assert [chunk.get("prompt_token_ids") for chunk in own] == [[40, 50], *[None] * (len(parts) - 1)]
        assert (
            "".join(part["delta"].get("content", "") for part in parts)
            == choice["message"]["content"]
            == f"Abc0{index}"
        )
        assert [token for part in parts for token in part.get("token_ids", ())] == choice["token_ids"]
        found = [each for part in parts if part["logprobs"] for each in part["logprobs"]["content"]]
        assert found == choice["logprobs"]["content"]
        assert [each["logprob"] for each in found] == [-token / 8 for token in choice["token_ids"]]
        ends = [part["finish_reason"] for part in parts if part["finish_reason"]]
        assert ends == [choice["finish_reason"]] == ["stop"]
        assert (parts[-1]["seed_used"], choice["seed_used"], choice["index"]) == (index, index, index)


@pytest.mark.parametrize("top", [0, 2])
@pytest.mark.parametrize("wanted", [0, 1, 2])
def test_a_prompt_has_as_many_alternatives_as_its_own_field_wants(served: Served, wanted: int, top: int) -> None:
    chat = served.ask(CHAT, prompt_logprobs=wanted, logprobs=True, top_logprobs=top)
    first, *_ = served.ask(COMPLETIONS, prompt_logprobs=wanted, logprobs=top)["choices"]
    for found in (chat["prompt_logprobs"], first["prompt_logprobs"]):
        assert found[0] is None and list(found[1]) == ["50", "3"][: max(wanted, 1)]
    tokens = chat["choices"][0]["logprobs"]["content"]
    assert [len(each["top_logprobs"]) for each in tokens] == [top, top]
    assert [len(each) for each in first["logprobs"]["top_logprobs"]] == [max(top, 1)] * 2
    for path in PATHS:
        plain = served.ask(path)
        assert "prompt_logprobs" not in {**plain, **plain["choices"][0]}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", [None, ValueError("planted")])
def test_what_runs_for_an_answer_is_left_when_it_has_ended_or_failed(
    served: Served, monkeypatch: pytest.MonkeyPatch, path: str, stream: bool, fault: Exception | None
) -> None:
    made: list[StubGeneration] = []

    async def generate(*given: Any, **named: Any) -> StubGeneration:
        made.append(StubGeneration([TextDelta("r", 0, "A", (5,), None if fault else "stop")], fault))
        return made[-1]

    monkeypatch.setattr(served.frontend, "generate", generate)
    body = {**PATHS[path], "stream": stream, **({"prompt": ["a", "b"]} if path == COMPLETIONS else {})}
    status = served.send("POST", path, body).status_code
    assert status == (200 if stream or fault is None else 500)
    assert [each.aborted for each in made] == [True] * (2 if path == COMPLETIONS else 1)


DOCUMENTED: dict[str, tuple[type[Answer], type[Answer]]] = {
    COMPLETIONS: (CompletionAnswer, CompletionChunk),
    CHAT: (ChatAnswer, ChatChunk),
}


@pytest.mark.parametrize("path", PATHS)
def test_every_field_of_an_answer_is_in_the_document_with_its_type(served: Served, path: str) -> None:
    served.limit, served.steps = 7, [PromptProgress("r", 9, 4, 5)]
    scores = {"logprobs": 1} if path == COMPLETIONS else {"logprobs": True, "top_logprobs": 1}
    body = {"n": 2, "return_token_ids": True, **scores}
    whole, part = DOCUMENTED[path]
    found = [(whole, served.ask(path, **body, prompt_logprobs=1))]
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = served.chunks(path, **body, return_progress=True, stream_options=options)
    assert all(each["usage"]["prompt_tokens"] == 2 for each in chunks) and "prompt_progress" in chunks[0]
    found += [(part, each) for each in chunks]
    stored = (FOLDER / f"{'completions' if path == COMPLETIONS else 'chat'}.json").read_text(encoding="utf-8")
    for case in json.loads(stored.replace('"<int of time>"', "5")).values():
        found += [(whole, case["whole"]["answer"])] if case["whole"]["status"] == 200 else []
        parts = [event for (event,) in case["stream"]["answer"] if event != "[DONE]" and "id" in event]
        found += [(part, event) for event in parts]
    for model, value in found:
        assert model.model_validate(value, strict=True).model_dump(exclude_unset=True) == value


@pytest.mark.parametrize("path", PATHS)
def test_progress_is_a_chunk_of_its_own_before_the_text(served: Served, path: str) -> None:
    served.steps = [PromptProgress("r", 9, 4, 5), PromptProgress("r", 9, 4, 9)]
    chunks = served.chunks(path, return_progress=True)
    steps = [(step.total, step.cached, step.processed) for step in served.steps]
    told = [chunk.get("prompt_progress") for chunk in chunks]
    names = ("total", "cached", "processed")
    assert told == [*(dict(zip(names, step, strict=True)) for step in steps), *[None] * (len(chunks) - 2)]
    assert [bool(chunk["choices"]) for chunk in chunks] == [False, False, *[True] * (len(chunks) - 2)]


def test_a_token_without_text_is_a_part_for_those_who_ask_for_scores(served: Served) -> None:
    served.silent = True
    parts = [chunk["choices"][0] for chunk in served.chunks(COMPLETIONS, logprobs=0)]
    assert [(part["text"], part["logprobs"]["token_logprobs"]) for part in parts] == [
        ("", [-10 / 8]),
        ("c00", [-11 / 8]),
    ]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("known", ["", RUN])
def test_an_answer_names_the_engine_that_ran_it_and_else_the_one_at_its_arrival(
    served: Served, path: str, known: str
) -> None:
    served.fingerprint = known
    chunks = served.chunks(path, stream_options={"include_usage": True})
    found = {each["system_fingerprint"] for each in (*chunks, served.ask(path))}
    assert found == {known or ARRIVAL}
    assert len({(each["id"], each["created"], each["object"]) for each in chunks}) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("limit", "user"), [(None, None), (7, None), (None, "u"), (7, "u"), (0, "u")])
def test_a_limit_and_fields_without_effect_are_told_side_by_side(
    served: Served, path: str, stream: bool, limit: int | None, user: str | None
) -> None:
    served.limit = limit
    answer = served.send("POST", path, {**PATHS[path], "stream": stream, "user": user})
    told = answer.headers.get(CUT), answer.headers.get(WARNINGS)
    assert told == (None if limit is None else str(limit), None if user is None else f"ignored: {user and 'user'}")


@pytest.mark.parametrize(
    ("given", "special", "progress"),
    [
        ({}, True, False),
        ({"add_special_tokens": True}, True, False),
        ({"add_special_tokens": False}, False, False),
        ({"add_special_tokens": None, "return_progress": True}, True, False),
        ({"stream": True, "return_progress": True}, True, True),
        ({"stream": True}, True, False),
    ],
)
@pytest.mark.parametrize("count", [1, 3])
def test_each_prompt_is_run_as_the_request_says_under_an_id_of_the_answer(
    served: Served, given: Any, special: bool, progress: bool, count: int
) -> None:
    answer = served.send("POST", COMPLETIONS, {"prompt": ["a"] * count, **given})
    name = answer.text.partition('"id":"')[2].partition('"')[0]
    assert answer.status_code == 200 and name.startswith("cmpl-")
    assert [(each["special"], each["progress"]) for each in served.named] == [(special, progress)] * count
    ids = [(each["request_id"], each["answer_id"]) for each in served.named]
    assert ids == ([(name, "")] if count == 1 else [(f"{name}-{place}", name) for place in range(count)])
