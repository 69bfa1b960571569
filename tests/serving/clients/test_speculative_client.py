"""With speculation, the `openai` client sees the same as without; a client that leaves early leaves
nothing behind on the server."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from sglcore.engine.start import embedded_model
from tests.serving.conftest import SCHEMA
from tests.serving.in_process import served_here

MODEL: Any = {"dtype": "float32", "threads": 1, "max_requests": 8, "kv_cache_memory": 64 << 20}
REPEATS = "red green blue red green blue red green blue red green"
MESSAGES = [{"role": "user", "content": "Say it again and again: one two three, one two three, one two three."}]
FORM = {"type": "json_schema", "json_schema": {"name": "trip", "schema": SCHEMA, "strict": True}}
DRAWN = {"temperature": 1.0, "seed": 11}
ASKED: list[dict[str, Any]] = [
    {"prompt": REPEATS, "temperature": 0.0, "max_tokens": 40, "logprobs": 3},
    {"prompt": REPEATS, **DRAWN, "max_tokens": 40, "logprobs": 2, "n": 2},
    {"prompt": REPEATS, **DRAWN, "max_tokens": 60, "stop": ["blue r", "re"], "extra_body": {"ignore_eos": True}},
    {"messages": MESSAGES, "temperature": 0.0, "max_tokens": 40, "stop": "two"},
    {"messages": MESSAGES, **DRAWN, "max_tokens": 40, "logprobs": True, "top_logprobs": 2},
    {"messages": MESSAGES, **DRAWN, "max_tokens": 60, "response_format": FORM},
    {"messages": MESSAGES, **DRAWN, "top_p": 0.9, "presence_penalty": 0.5, "max_tokens": 40, "n": 2},
]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """A server with n-gram drafts."""
    with served_here(embedded_model(), speculative="ngram", draft_tokens=4, **MODEL) as found:
        yield found


def client_of(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)


def asked(client: openai.OpenAI, body: dict[str, Any], stream: bool) -> list[Any]:
    """(text, reason, tokens with log-probabilities) of each choice."""
    endpoint: Any = client.chat.completions if "messages" in body else client.completions
    answer = endpoint.create(model=client.models.list().data[0].id, stream=stream, **body)
    found: dict[int, list[Any]] = {}
    for part in answer if stream else [answer]:
        for choice in part.choices:
            text, reason, scores = found.setdefault(choice.index, ["", None, []])
            said = choice.text if "prompt" in body else (choice.delta if stream else choice.message).content
            found[choice.index] = [text + (said or ""), choice.finish_reason or reason, scores + scored(choice)]
    return [found[index] for index in sorted(found)]


def scored(choice: Any) -> list[tuple[str, float]]:
    """Tokens and log-probabilities, if present."""
    if choice.logprobs is None:
        return []
    if choice.logprobs.model_dump().get("content") is not None:
        return [(each.token, round(each.logprob, 3)) for each in choice.logprobs.content]
    return [
        (token, round(value, 3))
        for token, value in zip(choice.logprobs.tokens, choice.logprobs.token_logprobs, strict=True)
    ]


def same(one: list[Any], other: list[Any]) -> None:
    assert [choice[:2] for choice in one] == [choice[:2] for choice in other]
    for (_, _, mine), (_, _, wanted) in zip(one, other, strict=True):
        assert [token for token, _ in mine] == [token for token, _ in wanted]
        assert [value for _, value in mine] == pytest.approx([value for _, value in wanted], abs=2e-3)


def counters(url: str) -> dict[str, float]:
    """Metrics by name, summed over labels."""
    found: dict[str, float] = {}
    for family in text_string_to_metric_families(httpx.get(f"{url}/metrics").text):
        for each in family.samples:
            found[each.name] = found.get(each.name, 0.0) + each.value
    return found


@pytest.fixture(scope="module")
def wanted() -> list[list[Any]]:
    """The answers of a server without speculation."""
    with served_here(embedded_model(), speculative="off", **MODEL) as plain, client_of(plain) as client:
        found = [asked(client, body, stream=False) for body in ASKED]
        assert "sglcore_draft_tokens_total" not in counters(plain)
    assert json.loads(found[5][0][0])["city"] in ("Rome", "Oslo")
    return found


def check_answers(url: str, wanted: list[list[Any]]) -> None:
    """Ask everything concurrently, whole and streamed, and compare."""
    with client_of(url) as client, ThreadPoolExecutor(8) as pool:
        for stream in (False, True):
            found = list(pool.map(lambda body, how=stream: asked(client, body, how), ASKED))
            for one, other in zip(found, wanted, strict=True):
                same(one, other)


def test_nothing_is_told_before_the_first_request() -> None:
    """Draft tokens of the warm-up are not counted."""
    with served_here(embedded_model(), speculative="ngram", draft_tokens=4, **MODEL) as fresh:
        deadline = time.monotonic() + 10
        while not counters(fresh).get("sglcore_steps_total"):
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert "sglcore_draft_tokens_total" not in counters(fresh)
        assert httpx.get(f"{fresh}/server_info/stats").json()["verified_steps"] == 0


def test_every_answer_is_that_of_a_server_without_proposals(url: str, wanted: list[list[Any]]) -> None:
    check_answers(url, wanted)


@pytest.mark.parametrize(("head", "settings"), [("eagle3", {"draft_tokens": 3}), ("mtp", {})])
def test_so_is_every_answer_with_the_heads_that_the_model_brings(
    head: str, settings: dict[str, Any], wanted: list[list[Any]]
) -> None:
    with served_here(embedded_model(), speculative=head, **settings, **MODEL) as found:
        check_answers(found, wanted)
        deadline = time.monotonic() + 5
        while not counters(found).get("sglcore_draft_tokens_accepted_total"):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_what_came_of_proposals_is_told(url: str) -> None:
    with client_of(url) as client:
        model = client.models.list().data[0].id
        body: Any = {"model": model, "prompt": REPEATS, "temperature": 0.0, "max_tokens": 41}
        wait_until_idle(url)
        before = counters(url)
        usage = client.completions.create(**body, extra_body={"ignore_eos": True}).usage
    assert usage is not None and usage.completion_tokens_details is not None
    details = usage.completion_tokens_details
    right, wrong = details.accepted_prediction_tokens, details.rejected_prediction_tokens
    assert right is not None and wrong is not None and right > 0
    deadline = time.monotonic() + 5
    while (after := counters(url))["sglcore_generation_tokens_total"] < 41 + before["sglcore_generation_tokens_total"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    gained = {name: value - before.get(name, 0.0) for name, value in after.items()}
    assert gained["sglcore_draft_tokens_total"] == right + wrong
    assert gained["sglcore_draft_tokens_accepted_total"] == gained["sglcore_accepted_draft_tokens_sum"] == right
    for by in ("context", "cached", "tokens"):
        assert gained[f"sglcore_draft_accepted_by_{by}_total"] == right
        assert gained[f"sglcore_draft_steps_by_{by}_total"] == 40 - right
    stats = httpx.get(f"{url}/server_info/stats").json()
    assert stats["accepted_tokens"] >= right and stats["verified_steps"] >= 40 - right
    rows = {row["topic"]: row for row in httpx.get(f"{url}/server_info").json()["ledger"]}
    assert rows["speculative"]["effective"] == "ngram, 4 tokens a step"


def wait_until_idle(url: str) -> None:
    """Wait until no request runs and the draft counters stand still."""
    deadline, seen = time.monotonic() + 10, None
    while True:
        stats = httpx.get(f"{url}/server_info/stats").json()
        now = {name: value for name, value in counters(url).items() if name.startswith("sglcore_draft")}
        if stats["running"] == 0 and now == seen:
            return
        assert time.monotonic() < deadline, stats
        seen = now
        time.sleep(0.2)


def test_who_leaves_early_leaves_nothing(url: str) -> None:
    before = httpx.get(f"{url}/server_info/stats").json()["generation_tokens"]
    with client_of(url) as client:
        model = client.models.list().data[0].id
        bodies: list[dict[str, Any]] = [{"n": 2, **DRAWN}, {"temperature": 0.0}, {**DRAWN, "logprobs": 1}]
        for body in bodies:
            stream = client.completions.create(
                model=model, prompt=REPEATS, max_tokens=400, stream=True, extra_body={"ignore_eos": True}, **body
            )
            for _ in range(3):
                next(iter(stream))
            stream.close()
    deadline = time.monotonic() + 10
    while (stats := httpx.get(f"{url}/server_info/stats").json())["running"] or stats["kv_used"]:
        assert time.monotonic() < deadline, stats
        time.sleep(0.05)
    assert stats["generation_tokens"] - before < 400, "nobody saw them leave"
    assert httpx.get(f"{url}/server_info/audit").json() == {"problems": []}
