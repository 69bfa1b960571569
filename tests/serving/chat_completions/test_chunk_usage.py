"""Streams of completions and chats: which chunks have usage, and where fields of one choice begin
and end."""

from __future__ import annotations

import json
from typing import Any

import pytest

from sglcore.engine.outputs import TextDelta
from sglcore.schedule.request_output import TokenLogprob
from sglcore.serving.chat.parsers.delta import Delta
from tests.serving.stubs import Application, StubGeneration, make_frontend

PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "a"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}]},
}


def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object, of which no field comes twice."""
    found = dict(pairs)
    assert len(found) == len(pairs), pairs
    return found


class Served(Application):
    """An application whose model gives each prompt these deltas."""

    def __init__(self) -> None:
        self.frontend: Any = make_frontend(self.generate)
        self.deltas: list[TextDelta] = []
        self.cause: Any = None
        self.proposed = self.accepted = 0
        self.ids = [5, 6]
        self.scores: list[TokenLogprob] | None = None
        super().__init__(self.frontend)

    async def generate(self, prompt: Any, *given: Any, **named: Any) -> StubGeneration:
        """Return the deltas as a generation."""
        made = StubGeneration(list(self.deltas))
        made.output.prompt = prompt if isinstance(prompt, str) else None
        for sample in made.output.outputs:
            sample.stop_cause, sample.token_ids = self.cause, self.ids
            sample.seed, sample.logprobs = 7 + sample.index, self.scores
            sample.proposed_tokens, sample.accepted_tokens = self.proposed, self.accepted
        return made

    def chunks(self, path: str, **body: Any) -> list[Any]:
        """The parsed chunks of a stream that ends well."""
        answer = self.send("POST", path, {**PATHS[path], "stream": True, **body})
        assert answer.status_code == 200, answer.text
        *events, end = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert end == "[DONE]"
        return [json.loads(event, object_pairs_hook=once) for event in events]


@pytest.fixture(scope="module")
def alone() -> Served:
    return Served()


@pytest.fixture
def served(alone: Served) -> Served:
    """The application with a model that says A and then B."""
    alone.deltas = [TextDelta("r", 0, "A", (5,)), TextDelta("r", 0, "B", (6,), "stop")]
    alone.cause, alone.proposed, alone.accepted, alone.scores = None, 0, 0, None
    alone.ids = [5, 6]
    return alone


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("options", "along", "at_end"),
    [
        (None, "absent", False),
        ({}, "absent", False),
        ({"include_usage": False}, "absent", False),
        ({"include_usage": True}, "null", True),
        ({"include_usage": True, "continuous_usage_stats": False}, "null", True),
        ({"include_usage": True, "continuous_usage_stats": True}, "counts", True),
        ({"continuous_usage_stats": True}, "counts", True),
        ({"include_usage": False, "continuous_usage_stats": True}, "counts", True),
    ],
)
def test_usage_is_where_it_was_asked_for(served: Served, path: str, options: Any, along: str, at_end: bool) -> None:
    chunks = served.chunks(path, **({} if options is None else {"stream_options": options}))
    own = [chunk for chunk in chunks if chunk["choices"]]
    kinds = {"absent" if "usage" not in each else "null" if each["usage"] is None else "counts" for each in own}
    assert kinds == {along} and len(chunks) - len(own) == at_end
    if at_end:
        assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("proposed", "accepted"), [(0, 0), (3, 0), (3, 3), (5, 2)])
def test_draft_tokens_are_counted_where_there_were_any(served: Served, path: str, proposed: int, accepted: int) -> None:
    served.proposed, served.accepted = proposed, accepted
    wanted = {"accepted_prediction_tokens": accepted, "rejected_prediction_tokens": proposed - accepted}
    for usage in (
        served.chunks(path, stream_options={"include_usage": True})[-1]["usage"],
        served.send("POST", path, PATHS[path]).json()["usage"],
    ):
        assert usage.get("completion_tokens_details") == (wanted if proposed else None)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("wanted", [None, False, True])
def test_ids_of_tokens_are_in_each_part_and_those_of_the_prompt_in_the_first(
    served: Served, path: str, wanted: bool | None
) -> None:
    served.deltas = [TextDelta("r", index, "A", (5 + index,)) for index in range(2)]
    served.deltas += [TextDelta("r", index, "", (), "stop") for index in range(2)]
    chunks = [chunk for chunk in served.chunks(path, n=2, return_token_ids=wanted) if chunk["choices"]]
    for index in range(2):
        own = [(chunk, chunk["choices"][0]) for chunk in chunks if chunk["choices"][0]["index"] == index]
        ids = [token for _, choice in own for token in choice.get("token_ids", ())]
        prompts = ["prompt_token_ids" in {**chunk, **choice} for chunk, choice in own]
        assert ids == ([5 + index] if wanted else [])
        assert prompts == [bool(wanted), *[False] * (len(own) - 1)]
    whole = served.send("POST", path, {**PATHS[path], "n": 2, "return_token_ids": wanted}).json()
    assert all(("token_ids" in choice) is bool(wanted) for choice in whole["choices"])
    assert ("prompt_token_ids" in {**whole, **whole["choices"][0]}) is bool(wanted)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("cause", "asked", "shown"),
    [(None, [7], None), (7, [7], 7), (7, [8], None), (7, None, None), ("x", None, "x"), (0, [0], 0)],
)
def test_a_stop_that_was_asked_for_is_named(
    served: Served, path: str, stream: bool, cause: Any, asked: Any, shown: Any
) -> None:
    served.cause = cause
    given = {} if asked is None else {"stop_token_ids": asked}
    if stream:
        choice = next(
            each["choices"][0] for each in served.chunks(path, **given) if each["choices"][0]["finish_reason"]
        )
    else:
        choice = served.send("POST", path, {**PATHS[path], **given}).json()["choices"][0]
    assert (choice["finish_reason"], choice["stop_reason"], choice["seed_used"]) == ("stop", shown, 7)


@pytest.mark.parametrize("reason", ["stop", "length"])
@pytest.mark.parametrize("stream", [False, True])
def test_a_text_that_was_only_scored_ends_by_its_length_and_has_no_token(
    served: Served, reason: Any, stream: bool
) -> None:
    served.deltas = [TextDelta("r", 0, "A", (5,), reason)]
    body = {"prompt": "abc", "max_tokens": 0, "echo": True, "return_token_ids": True}
    if stream:
        (chunk,) = served.chunks("/v1/completions", **body)
        choice = chunk["choices"][0]
    else:
        answer = served.send("POST", "/v1/completions", body).json()
        choice, usage = answer["choices"][0], answer["usage"]
        assert (usage["completion_tokens"], usage["total_tokens"], usage["prompt_tokens"]) == (0, 2, 2)
    assert (choice["text"], choice["finish_reason"], choice["token_ids"]) == ("abc", "length", [])
    assert choice["prompt_token_ids"] == [1, 2]


@pytest.mark.parametrize("limit", [0, 5])
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
def test_each_sample_has_its_own_end(served: Served, path: str, stream: bool, limit: int) -> None:
    served.deltas = [TextDelta("r", 1, "A", (5,)), TextDelta("r", 0, "", (), "error", error="planted")]
    served.deltas.append(TextDelta("r", 1, "", (), "stop"))
    body = {"n": 2, **({"max_tokens": limit, "echo": not limit} if path == "/v1/completions" else {})}
    if stream:
        ends = [each["choices"][0] for each in served.chunks(path, **body) if each["choices"][0]["finish_reason"]]
    else:
        ends = served.send("POST", path, {**PATHS[path], **body}).json()["choices"]
    found = {end["index"]: (end["seed_used"], end["finish_reason"], "error" in end) for end in ends}
    is_scored = path == "/v1/completions" and not limit
    assert found == {0: (7, "error", True), 1: (8, "length" if is_scored else "stop", False)}


@pytest.mark.parametrize("wanted", [False, True])
def test_a_token_without_text_is_a_part_for_those_who_ask_for_ids(served: Served, wanted: bool) -> None:
    served.deltas = [TextDelta("r", 0, "", (5,)), TextDelta("r", 0, "", (6,)), TextDelta("r", 0, "A", (7,), "stop")]
    parts = [each["choices"][0] for each in served.chunks("/v1/completions", return_token_ids=wanted)]
    assert [part.get("token_ids") for part in parts] == ([[5], [6], [7]] if wanted else [None])
    assert "".join(part["text"] for part in parts) == "A"


@pytest.mark.parametrize("limit", [None, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_log_probabilities_are_those_of_all_tokens_whatever_their_limit(
    served: Served, limit: int | None, stream: bool
) -> None:
    scores = tuple(TokenLogprob(token, -0.5, 1, ((token, -0.5), (3, -1.5))) for token in (5, 6))
    served.scores = [*scores]
    served.deltas = [TextDelta("r", 0, "AB", (5, 6), "stop", scores)]
    body = {"logprobs": 1, "max_tokens": limit}
    if stream:
        (chunk,) = served.chunks("/v1/completions", **body)
        found = chunk["choices"][0]["logprobs"]
    else:
        found = served.send("POST", "/v1/completions", {"prompt": "a", **body}).json()["choices"][0]["logprobs"]
    assert found["token_logprobs"] == [-0.5, -0.5] and [len(each) for each in found["top_logprobs"]] == [1, 1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("prompt", "shows"), [("abc", None), ("", None), ([5, 6], None), ([5, 6], True), ([5, 6], False)]
)
def test_an_echo_is_the_prompt_as_it_was_given_or_as_its_tokens_read(
    served: Served, prompt: Any, shows: bool | None, stream: bool
) -> None:
    decoded: list[bool] = []

    def decode(ids: list[int], *, skip_special_tokens: bool) -> str:
        decoded.append(skip_special_tokens)
        return "by ids"

    served.frontend.codec.decode = decode
    try:
        body = {"prompt": prompt, "echo": True, "skip_special_tokens": shows}
        if stream:
            parts = [each["choices"][0] for each in served.chunks("/v1/completions", **body)]
        else:
            parts = served.send("POST", "/v1/completions", body).json()["choices"]
    finally:
        del served.frontend.codec.decode
    given = prompt if isinstance(prompt, str) else "by ids"
    assert "".join(part["text"] for part in parts) == f"{given}AB"
    assert decoded == ([] if isinstance(prompt, str) else [shows is not False])


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("failed", [0, 1, 2])
def test_whichever_sample_fails_says_so_and_no_other(served: Served, path: str, stream: bool, failed: int) -> None:
    served.deltas = [TextDelta("r", index, "A", (5,)) for index in range(3)]
    served.deltas += [
        TextDelta(
            "r", index, "", (), "error" if index == failed else "stop", error="planted" if index == failed else ""
        )
        for index in range(3)
    ]
    if stream:
        ends = [each["choices"][0] for each in served.chunks(path, n=3) if each["choices"][0]["finish_reason"]]
    else:
        ends = served.send("POST", path, {**PATHS[path], "n": 3}).json()["choices"]
    assert [end["index"] for end in ends if "error" in end] == [failed] and len(ends) == 3
    (error,) = [end["error"] for end in ends if "error" in end]
    assert error.keys() == {"message", "type", "param", "code"} and "planted" in error["message"]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("wants", [False, True])
def test_scores_of_no_token_are_empty_lists_for_those_who_ask_for_them(served: Served, path: str, wants: bool) -> None:
    is_chat = "chat" in path
    served.deltas = [TextDelta("r", 0, "", (), "stop", () if wants else None)]
    served.scores, served.ids = [] if wants else None, []
    names = ("content", "refusal") if is_chat else ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    empty = {name: None if name == "refusal" else [] for name in names}
    bodies: list[dict[str, Any]] = [{"logprobs": (True if is_chat else 0) if wants else None}]
    if not (is_chat or wants):
        bodies.append({"max_tokens": 0, "echo": True, "prompt": ""})
    for body in bodies:
        ends = [each["choices"][0] for each in served.chunks(path, **body) if each["choices"][0]["finish_reason"]]
        whole = served.send("POST", path, {**PATHS[path], **body}).json()["choices"]
        assert [choice["logprobs"] for choice in (*ends, *whole)] == [empty if wants else None] * 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("shows", "counts"), [(None, False), (True, False), (False, True)])
def test_offsets_count_special_tokens_where_the_text_shows_them(
    served: Served, shows: bool | None, counts: bool, stream: bool
) -> None:
    tokenizer = served.frontend.codec.tokenizer
    special = next(token_id for token_id, token in tokenizer.get_added_tokens_decoder().items() if token.special)
    length = len(tokenizer.id_to_token(special))
    scores = tuple(TokenLogprob(token, -0.5, 1, ()) for token in (special, special))
    served.scores, served.deltas = [*scores], [TextDelta("r", 0, "", (special, special), "stop", scores)]
    body = {"logprobs": 0, "skip_special_tokens": shows}
    if stream:
        (chunk,) = served.chunks("/v1/completions", **body)
    else:
        served.ids = [special, special]
        chunk = served.send("POST", "/v1/completions", {"prompt": "a", **body}).json()
    assert chunk["choices"][0]["logprobs"]["text_offset"] == [0, length * counts]


class Parser:
    """Reads a text as a call."""

    def push(self, text: str) -> list[Delta]:
        return [Delta("tool_start", index=0, name="f", call_id="c"), Delta("tool_arguments", "{}", 0)]

    def finish(self) -> list[Delta]:
        return []


def test_the_content_beside_a_call_is_null_and_else_a_text(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    path = "/v1/chat/completions"
    served.deltas = [TextDelta("r", 0, "", (), "stop")]
    assert served.send("POST", path, PATHS[path]).json()["choices"][0]["message"]["content"] == ""
    served.deltas = [TextDelta("r", 0, "x", (5,), "stop")]
    monkeypatch.setattr(type(served.frontend.format), "stream", lambda *given, **named: Parser())
    message = served.send("POST", path, PATHS[path]).json()["choices"][0]["message"]
    assert message["content"] is None and message["tool_calls"][0]["id"] == "c"
    first, *rest = [each["choices"][0]["delta"] for each in served.chunks(path)]
    assert first == {"role": "assistant", "content": ""} and all("content" not in each for each in rest)
