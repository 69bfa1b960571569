"""Facts that every protocol tells in its own words: by which name the model answers, and how long
an answer took."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from sglcore.engine.outputs import RequestOutput, TextDelta
from sglcore.serving.apis.answer import CUT
from sglcore.serving.apis.anthropic.body import CountRequest
from sglcore.serving.apis.anthropic.request import unread
from sglcore.serving.apis.ollama.models import capabilities, short
from sglcore.serving.apis.openai.body import Message
from tests.serving.stubs import DEMO, Application, StubGeneration, gives, make_frontend

NAMES = ("first", "second:7b", "third")
MESSAGES = [{"role": "user", "content": "How is it?"}]
OLLAMA = {"/api/chat": {"messages": MESSAGES, "stream": False}, "/api/generate": {"prompt": "a", "stream": False}}
ASKED: dict[str, Any] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "a"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 4},
    "/v1/responses": {"input": "a"},
    "/completion": {"prompt": "a"},
    **OLLAMA,
}
"""A request of each protocol whose answers name the model."""


class Served(Application):
    """One application for all tests. A test may replace what its frontend generates."""

    def __init__(self) -> None:
        self.frontend: Any = make_frontend()
        self.frontend.names, self.frontend.model_path = NAMES, DEMO
        super().__init__(self.frontend)


@pytest.fixture(scope="module")
def alone() -> Served:
    return Served()


@pytest.fixture
def served(alone: Served) -> Served:
    """The application, with a model that says A."""
    alone.frontend.generate = gives(TextDelta("r", 0, "A", (5,), "stop"))
    return alone


@pytest.mark.parametrize("path", ASKED)
def test_an_answer_has_the_name_that_was_asked_for_and_else_the_first(served: Served, path: str) -> None:
    for asked, wanted in ((None, NAMES[0]), ("", NAMES[0]), *zip(NAMES, NAMES, strict=True)):
        answer = served.send("POST", path, {**ASKED[path], **({} if asked is None else {"model": asked})})
        assert answer.json()["model"] == wanted, asked
    refused = served.send("POST", path, {**ASKED[path], "model": "fourth"})
    assert refused.status_code == 404 and all(name in refused.text for name in ("'fourth'", *NAMES))


@pytest.mark.parametrize("path", OLLAMA)
def test_the_tag_latest_may_be_added_and_another_one_may_not(served: Served, path: str) -> None:
    assert served.send("POST", path, {**OLLAMA[path], "model": "third:latest"}).json()["model"] == "third:latest"
    for other in ("second", "second:latest", "third:7b"):
        assert served.send("POST", path, {**OLLAMA[path], "model": other}).status_code == 404, other


def test_lists_have_all_names_in_their_order(served: Served) -> None:
    models = served.send("GET", "/v1/models").json()["data"]
    assert [each["id"] for each in models] == list(NAMES) and {each["root"] for each in models} == {NAMES[0]}
    page = served.send("GET", "/v1/models", anthropic_version="2023-06-01").json()
    assert [each["id"] for each in page["data"]] == list(NAMES)
    assert (page["first_id"], page["last_id"], page["has_more"]) == (NAMES[0], NAMES[-1], False)
    tags = served.send("GET", "/api/tags").json()["models"]
    assert [each["name"] for each in tags] == ["first:latest", "second:7b", "third:latest"]


class Timed(StubGeneration):
    """The first of three tokens comes after a quarter of a second, the last one half a second
    later."""

    def __init__(self, now: list[float], has_first: bool) -> None:
        super().__init__([TextDelta("r", 0, "A", (5, 6, 7), "stop")])
        self._now, self._has_first = now, has_first

    async def wait(self) -> RequestOutput:
        """Return the whole output."""
        await self.ended()
        return await super().wait()

    async def ended(self) -> None:
        """Let the time pass."""
        self._now[0] += 0.25
        self.first_token_at = self._now[0] if self._has_first else None
        self._now[0] += 0.5
        self.output.outputs[0].token_ids = [5, 6, 7]
        self.output.cached_tokens = 1


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The time by `time.perf_counter()`."""
    found = [1000.0]
    monkeypatch.setattr("time.perf_counter", lambda: found[0])
    return found


def timed(served: Served, now: list[float], path: str, *, has_first: bool = True) -> Any:
    async def generate(*given: Any, **named: Any) -> Timed:
        return Timed(now, has_first)

    served.frontend.generate = generate
    answer = served.send("POST", path, {"/generate": {"text": "a"}, **ASKED}[path])
    assert answer.status_code == 200, answer.text
    return answer.json()


@pytest.mark.parametrize("path", OLLAMA)
def test_times_of_ollama_are_nanoseconds_before_and_after_the_first_token(
    served: Served, path: str, now: list[float]
) -> None:
    found = timed(served, now, path)
    times = [found[name] for name in ("total_duration", "prompt_eval_duration", "eval_duration", "load_duration")]
    assert times == [750_000_000, 250_000_000, 500_000_000, 0]
    assert (found["prompt_eval_count"], found["eval_count"]) == (2, 3)


def test_without_a_first_token_all_time_is_the_prompts_and_no_time_is_zero(served: Served, now: list[float]) -> None:
    """Clients divide by these times."""
    found = timed(served, now, "/api/chat", has_first=False)
    assert (found["prompt_eval_duration"], found["eval_duration"]) == (750_000_000, 1)


def test_times_of_llama_server_are_milliseconds_and_counts_leave_out_what_was_cached(
    served: Served, now: list[float]
) -> None:
    assert timed(served, now, "/completion")["timings"] == {
        "prompt_n": 1,
        "cache_n": 1,
        "predicted_n": 3,
        "predicted_ms": 750.0,
        "predicted_per_second": 4.0,
    }


def test_the_latency_of_sglang_is_in_seconds(served: Served, now: list[float]) -> None:
    about = timed(served, now, "/generate")["meta_info"]
    assert (about["e2e_latency"], about["prompt_tokens"], about["cached_tokens"]) == (0.75, 2, 1)


@pytest.mark.parametrize(
    ("cuts", "told"), [((None, None), None), ((None, 9), 9), ((9, None), 9), ((9, 4), 4), ((4, 9), 4)]
)
def test_the_usage_is_the_sum_over_prompts_and_the_limit_the_smallest(
    served: Served, cuts: tuple[int | None, ...], told: int | None
) -> None:
    made: list[StubGeneration] = []

    async def generate(*given: Any, **named: Any) -> StubGeneration:
        place = len(made)
        made.append(StubGeneration([TextDelta("r", 0, "A", (5,), "stop")]))
        output = made[-1].output
        output.prompt_token_ids, output.cached_tokens = [[1, 2], [1, 2, 3]][place], (1, 2)[place]
        output.max_tokens, sample = cuts[place], output.outputs[0]
        sample.token_ids = [[5, 6, 7], [5, 6, 7, 8]][place]
        sample.proposed_tokens, sample.accepted_tokens = ((5, 2), (6, 3))[place]
        return made[-1]

    served.frontend.generate = generate
    answer = served.send("POST", "/v1/completions", {"prompt": ["a", "b"]})
    details = {"accepted_prediction_tokens": 5, "rejected_prediction_tokens": 6}
    assert answer.json()["usage"] == {
        "prompt_tokens": 5,
        "completion_tokens": 7,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": details if told is None else {**details, "max_tokens": told},
    }
    assert answer.headers.get(CUT) == (None if told is None else str(told))


@pytest.mark.parametrize(
    ("declared", "status"),
    [
        ("application/json", 200),
        ("Application/JSON; charset=utf-8", 200),
        ("application/problem+json", 200),
        ("application/vnd.own+json;v=1", 200),
        ("application/jsonl", 415),
        ("text/json", 415),
        ("json", 415),
    ],
)
def test_a_body_may_be_declared_as_any_kind_of_json(served: Served, declared: str, status: int) -> None:
    answer = served.send("POST", "/v1/completions", ASKED["/v1/completions"], content_type=declared)
    assert answer.status_code == status, answer.text
    assert status == 200 or repr(declared.lower()) in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("count", "shown"),
    [
        (999, "999"),
        (1000, "1.0K"),
        (6_241_000, "6.2M"),
        (10**6, "1.0M"),
        (7_250_000_001, "7.3B"),
        (10**9, "1.0B"),
        (10**12, "1.0T"),
        (1_040 * 10**12, "1040.0T"),
    ],
)
def test_a_number_of_parameters_is_short(count: int, shown: str) -> None:
    assert short(count) == shown


@pytest.mark.parametrize(("labels", "wanted"), [(0, ["embedding"]), (1, []), (3, [])])
def test_a_model_that_generates_nothing_embeds_unless_it_scores(labels: int, wanted: list[str]) -> None:
    frontend: Any = SimpleNamespace(info=SimpleNamespace(generates=False, limits={"num_labels": labels}))
    assert capabilities(frontend) == wanted


CALL = {"id": "a", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        ({"content": "a", "reasoning": "r"}, {"content": "a", "reasoning_content": "r"}),
        ({"reasoning": "r", "reasoning_content": "own"}, {"reasoning_content": "own"}),
        ({"refusal": "no"}, {"content": "no"}),
        ({"content": "a", "refusal": "no"}, {"content": "a"}),
        ({"content": "", "refusal": "no"}, {"content": ""}),
        ({"content": None, "annotations": [], "name": None}, {}),
        (
            {"content": [{"type": "text", "text": "a"}, {"type": "refusal", "refusal": "no"}]},
            {"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "no"}]},
        ),
        (
            {"tool_calls": [{**CALL, "index": place, "id": name} for place, name in enumerate("abc")]},
            {"tool_calls": [{**CALL, "type": "function", "id": name} for name in "abc"]},
        ),
    ],
)
def test_an_answer_that_is_sent_back_is_a_message_of_the_template(given: Any, plain: Any) -> None:
    message = Message.model_validate({"role": "assistant", **given})
    assert message.plain() == {"role": "assistant", **plain}


@pytest.mark.parametrize(
    ("own", "ignored", "told"),
    [
        ({}, ["enable_thinking", "thinking"], ["thinking"]),
        ({}, ["thinking"], []),
        ({"enable_thinking": True}, ["thinking"], ["thinking"]),
        ({"enable_thinking": True}, [], []),
        ({"speed": 1}, ["speed"], ["chat_template_kwargs.speed"]),
        ({}, ["reasoning_effort"], ["output_config.effort"]),
        ({"reasoning_effort": "low"}, ["reasoning_effort"], ["chat_template_kwargs.reasoning_effort"]),
        ({}, ["thinking_token_budget"], ["thinking.budget_tokens"]),
    ],
)
def test_of_messages_those_fields_are_unread_whose_variables_are(own: Any, ignored: list[str], told: list[str]) -> None:
    thinking = {"type": "enabled", "budget_tokens": 5}
    body = CountRequest.model_validate({"messages": MESSAGES, "thinking": thinking, "chat_template_kwargs": own})
    assert unread(body, ignored) == told
