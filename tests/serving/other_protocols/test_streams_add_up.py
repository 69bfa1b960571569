"""Answers of random parts: each protocol tells all reasoning, text and calls in their order, and
its stream adds up to its whole answer."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from random import Random
from typing import Any

import pytest

from sglcore.config.server_config import ServerConfig
from sglcore.serving.chat.parsers.delta import Delta
from tests.serving.scripted import Stage, staged
from tests.serving.whole_answers import ASKS, SCORES, TOOLS, answer

SEEDS = range(8)
Block = tuple[str, str, str]
"""Kind ("reasoning", "text" or a call's name), id of the call, and text or arguments."""


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    with staged(ServerConfig()) as stage:
        yield stage


def deltas_of(draw: Random) -> list[Delta]:
    """Reasoning, texts and whole calls in any order."""
    found: list[Delta] = []
    calls = 0
    for place in range(draw.randint(1, 6)):
        kind = draw.choice(["content", "reasoning", "call"])
        if kind == "call":
            found.append(Delta("tool_start", index=calls, name=f"f{place}", call_id=f"call_{place}"))
            text = json.dumps({"at": f"{place}é"}, ensure_ascii=False) if draw.random() < 0.7 else ""
            cut = draw.randint(0, len(text))
            found += [Delta("tool_arguments", part, index=calls) for part in (text[:cut], text[cut:]) if part]
            calls += 1
        else:
            found += [Delta(kind, f"{kind[0]}{place}{part} ") for part in "abc"[: draw.randint(1, 3)]]  # pyright: ignore[reportArgumentType]
    return found


def tokens_of(deltas: list[Delta], draw: Random) -> list[list[Delta]]:
    """The deltas of each token: none, one or several."""
    tokens: list[list[Delta]] = [[]]
    for delta in deltas:
        tokens += [[] for _ in range(draw.choice([0, 1, 1, 1, 2]))]
        tokens[-1].append(delta)
    return tokens


def blocks_of(deltas: list[Delta]) -> list[Block]:
    """The blocks that these deltas are."""
    starts = {delta.index: delta for delta in deltas if delta.kind == "tool_start"}

    def owner(delta: Delta) -> tuple[str, str]:
        if delta.kind.startswith("tool"):
            start = starts[delta.index]
            return start.name, start.call_id
        return "text" if delta.kind == "content" else "reasoning", ""

    return [(*key, "".join(each.text for each in group)) for key, group in groupby(deltas, owner)]


def ask(stage: Stage, protocol: str, tokens: list[list[Delta]], *, streams: bool) -> Any:
    body = {**ASKS[protocol][1], **TOOLS[protocol], **SCORES.get(protocol, {})}
    found = answer(stage, protocol, {"says": tokens}, body, streams)
    assert found["status"] == 200, found
    return found["answer"]


def of_messages(content: list[Any]) -> list[Block]:
    kinds = {"text": ("text", "text"), "thinking": ("reasoning", "thinking")}
    return [
        (each["name"], each["id"], json.dumps(each["input"], ensure_ascii=False))
        if each["type"] == "tool_use"
        else (kinds[each["type"]][0], "", each[kinds[each["type"]][1]])
        for each in content
    ]


def built(events: list[Any]) -> list[Any]:
    """The blocks of a streamed message, of which one at a time is open."""
    made, texts, is_open = list[dict[str, Any]](), list[str](), False
    for name, event in events:
        if name == "content_block_start":
            assert not is_open and event["index"] == len(made)
            made.append({**event["content_block"]})
            texts, is_open = [], True
        elif name == "content_block_delta":
            assert is_open and event["index"] == len(made) - 1
            texts.append(
                next((event["delta"][key] for key in ("text", "thinking", "partial_json") if key in event["delta"]), "")
            )
        elif name == "content_block_stop":
            assert is_open and event["index"] == len(made) - 1
            key = {"text": "text", "thinking": "thinking"}.get(made[-1]["type"], "input")
            made[-1][key] = json.loads("".join(texts) or "{}") if key == "input" else "".join(texts)
            is_open = False
    assert not is_open
    return made


@pytest.mark.parametrize("seed", SEEDS)
def test_a_message_has_each_block_and_its_stream_the_same(stage: Stage, seed: int) -> None:
    draw = Random(seed)
    deltas = deltas_of(draw)
    tokens = tokens_of(deltas, draw)
    wanted = [(kind, name, text or "{}" if name else text) for kind, name, text in blocks_of(deltas)]
    whole, events = (ask(stage, "messages", tokens, streams=streams) for streams in (False, True))
    assert of_messages(whole["content"]) == wanted and built(events) == whole["content"]
    last = next(event for name, event in events if name == "message_delta")
    assert last["usage"] == whole["usage"] and whole["usage"]["output_tokens"] == len(tokens)
    assert last["delta"] == {name: whole[name] for name in ("stop_reason", "stop_sequence")}
    assert whole["stop_reason"] == ("tool_use" if any(name for _, name, _ in wanted) else "end_turn")


@pytest.mark.parametrize("seed", SEEDS)
def test_a_response_has_each_item_and_its_last_event_the_same(stage: Stage, seed: int) -> None:
    draw = Random(seed)
    deltas = deltas_of(draw)
    tokens = tokens_of(deltas, draw)
    whole, events = (ask(stage, "responses", tokens, streams=streams) for streams in (False, True))
    found = [
        (each["name"], each["call_id"], each["arguments"])
        if each["type"] == "function_call"
        else ("text" if each["type"] == "message" else "reasoning", "", each["content"][0]["text"])
        for each in whole["output"]
    ]
    assert found == blocks_of(deltas)
    last = events[-1][1]["response"]
    for each in (*last["output"], *whole["output"]):
        each["id"] = ""
    assert {**last, "id": "", "system_fingerprint": ""} == {**whole, "id": "", "system_fingerprint": ""}
    assert whole["usage"]["output_tokens"] == len(tokens)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_chat_of_ollama_has_all_text_and_each_call_and_its_lines_the_same(stage: Stage, seed: int) -> None:
    draw = Random(seed)
    deltas = deltas_of(draw)
    tokens = tokens_of(deltas, draw)
    whole, parts = (ask(stage, "ollama_chat", tokens, streams=streams) for streams in (False, True))
    blocks = blocks_of(deltas)
    calls = [
        {"id": name, "function": {"index": place, "name": kind, "arguments": json.loads(text or "{}")}}
        for place, (kind, name, text) in enumerate(each for each in blocks if each[1])
    ]
    said = whole["message"]
    assert said["content"] == "".join(text for kind, _, text in blocks if kind == "text")
    assert said.get("thinking", "") == "".join(text for kind, _, text in blocks if kind == "reasoning")
    assert said.get("tool_calls", []) == calls
    for name in ("content", "thinking"):
        assert "".join(part["message"].get(name, "") for part in parts) == said.get(name, "")
    assert [call for part in parts for call in part["message"].get("tool_calls", ())] == calls
    assert [score for part in parts for score in part.get("logprobs", ())] == whole["logprobs"]
    assert len(whole["logprobs"]) == whole["eval_count"] == parts[-1]["eval_count"] == len(tokens)
    ending = set(whole) - {"message", "logprobs"}
    assert {name: parts[-1][name] for name in ending} == {name: whole[name] for name in ending}
