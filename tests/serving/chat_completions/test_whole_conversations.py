"""A conversation reaches the template complete, each part once and in order, in every protocol and
for every form of template."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple

import pytest

from sglcore.sampling.params import SamplingParams
from sglcore.serving.apis.anthropic.body import CountRequest as AnthropicBody
from sglcore.serving.apis.anthropic.request import chat_request as of_anthropic
from sglcore.serving.apis.ollama.body import OllamaChatBody
from sglcore.serving.apis.ollama.request import chat_request as of_ollama
from sglcore.serving.apis.openai.body import ChatBody
from sglcore.serving.apis.openai.request import template_request
from sglcore.serving.apis.responses.body import CountRequest as ResponsesBody
from sglcore.serving.apis.responses.request import chat_request as of_responses
from sglcore.serving.chat.conversation import MessageForm, as_template_reads
from tests.serving.stubs import make_frontend

NO_PARAMS = SamplingParams()
FRONTEND = make_frontend()


class Said(NamedTuple):
    """A part of a conversation: its kind (`user`, `result`, `thought`, `text` or `call`), its
    words, and the id of its call."""

    kind: str
    words: str
    call: str = ""


Talk = list[list[Said]]
"""Alternating turns of the user and the model; a user's turn may hold results."""


def talk_of(seed: int) -> Talk:
    """A random talk: every call has its result in the next turn, in any order and with any text
    around it."""
    draw = Random(seed)
    words = (f"word{number}" for number in range(10_000))
    found: Talk = []
    open_calls: list[str] = []
    for _ in range(draw.randint(1, 4)):
        user = [Said("result", next(words), call) for call in open_calls]
        draw.shuffle(user)
        for _ in range(draw.randint(0 if user else 1, 3)):
            user.insert(draw.randint(0, len(user)), Said("user", next(words)))
        open_calls = [next(words) for _ in range(draw.randint(0, 3))]
        model = [Said("thought", next(words))] * draw.randint(0, 1)
        model += [Said("text", next(words)) for _ in range(draw.randint(0 if open_calls else 1, 2))]
        found += [user, [*model, *(Said("call", next(words), call) for call in open_calls)]]
    return [*found, [*(Said("result", next(words), call) for call in open_calls), Said("user", next(words))]]


def pieces(turn: Sequence[Said], draw: Random) -> Iterator[list[Said]]:
    """The turn, split into several messages."""
    cuts = sorted(draw.sample(range(1, len(turn)), draw.randint(0, len(turn) - 1)))
    for begin, end in zip([0, *cuts], [*cuts, len(turn)], strict=True):
        yield list(turn[begin:end])


def arguments(said: Said) -> dict[str, str]:
    return {"of": said.words}


def by_anthropic(talk: Talk, draw: Random) -> Sequence[Mapping[str, Any]]:
    def block(said: Said) -> dict[str, Any]:
        if said.kind == "thought":
            return {"type": "thinking", "thinking": said.words, "signature": ""}
        if said.kind == "call":
            return {"type": "tool_use", "id": said.call, "name": "look", "input": arguments(said)}
        if said.kind == "result":
            content = draw.choice([said.words, [{"type": "text", "text": said.words}]])
            return {"type": "tool_result", "tool_use_id": said.call, "content": content}
        return {"type": "text", "text": said.words}

    messages = [
        {"role": ("user", "assistant")[place % 2], "content": [block(said) for said in piece]}
        for place, turn in enumerate(talk)
        for piece in pieces(turn, draw)
    ]
    return of_anthropic(AnthropicBody.model_validate({"messages": messages}), NO_PARAMS).messages


def by_responses(talk: Talk, draw: Random) -> Sequence[Mapping[str, Any]]:
    def item(said: Said) -> dict[str, Any]:
        if said.kind == "thought":
            return {"type": "reasoning", "content": [{"type": "reasoning_text", "text": said.words}]}
        if said.kind == "call":
            called = {"call_id": said.call, "name": "look", "arguments": json.dumps(arguments(said))}
            return {"type": "function_call", **called}
        if said.kind == "result":
            return {"type": "function_call_output", "call_id": said.call, "output": said.words}
        role, word = ("user", "input_text") if said.kind == "user" else ("assistant", "output_text")
        return {"role": role, "content": draw.choice([said.words, [{"type": word, "text": said.words}]])}

    earlier: list[dict[str, Any]] = []
    items = [item(said) for turn in talk for said in turn]
    cut = draw.randint(0, len(items) - 1)
    for part in filter(None, (items[:cut], items[cut:])):  # in one request, or in two
        body = ResponsesBody.model_validate({"input": part})
        earlier = [dict(message) for message in of_responses(body, earlier, NO_PARAMS).messages]
    return earlier


def chat_messages(turn: list[Said], draw: Random, kind_of: Callable[[str], dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages of a turn in OpenAI's and Ollama's form; `kind_of` writes a text."""
    if turn[0].kind in ("user", "result"):
        return [
            {"role": "user", **kind_of(said.words)}
            if said.kind == "user"
            else {"role": "tool", "tool_call_id": said.call, **kind_of(said.words)}
            for said in turn
        ]
    texts = "".join(said.words for said in turn if said.kind == "text")
    calls = [
        {"id": said.call, "function": {"name": "look", "arguments": arguments(said)}}
        for said in turn
        if said.kind == "call"
    ]
    thoughts = [said.words for said in turn if said.kind == "thought"]
    message = {"role": "assistant", **(kind_of(texts) if texts else {})}
    return [{**message, **({"calls": calls} if calls else {}), **({"thoughts": thoughts[0]} if thoughts else {})}]


def by_openai(talk: Talk, draw: Random) -> Sequence[Mapping[str, Any]]:
    def written(message: dict[str, Any]) -> dict[str, Any]:
        thoughts, calls = message.pop("thoughts", None), message.pop("calls", ())
        if thoughts:
            message[draw.choice(["reasoning", "reasoning_content"])] = thoughts
        if calls:
            message["tool_calls"] = [
                {**each, "function": {**each["function"], "arguments": json.dumps(each["function"]["arguments"])}}
                for each in calls
            ]
        if message["role"] == "assistant" and isinstance(content := message.get("content"), str):
            forms = {"content": content}, {"content": None, "refusal": content}
            parts = [{"type": "text", "text": content}], [{"type": "refusal", "refusal": content}]
            message |= draw.choice([*forms, *({"content": each} for each in parts)])
        return message

    def kind_of(text: str) -> dict[str, Any]:
        return {"content": text}

    messages = [written(each) for turn in talk for each in chat_messages(turn, draw, kind_of)]
    body = ChatBody.model_validate({"messages": messages})
    return template_request(body, body.messages).messages


def by_ollama(talk: Talk, draw: Random) -> Sequence[Mapping[str, Any]]:
    messages = [each for turn in talk for each in chat_messages(turn, draw, lambda text: {"content": text})]
    for message in messages:
        message |= {"thinking": message.pop("thoughts")} if "thoughts" in message else {}
        message |= {"tool_calls": message.pop("calls")} if "calls" in message else {}
    return of_ollama(OllamaChatBody.model_validate({"messages": messages}), FRONTEND).messages


PROTOCOLS = {"anthropic": by_anthropic, "responses": by_responses, "openai": by_openai, "ollama": by_ollama}


def told(messages: Sequence[Mapping[str, Any]], thoughts: str = "reasoning_content") -> list[Said]:
    """The parts of the messages in order; adjacent texts of the model are joined."""
    found: list[Said] = []
    for message in messages:
        content = message.get("content")
        texts = [content] if isinstance(content, str) else [part["text"] for part in content or ()]
        if message["role"] == "assistant":
            found += [Said("thought", message[thoughts])] if message.get(thoughts) else []
            found += [Said("text", text) for text in texts if text]
            for call in message.get("tool_calls") or ():
                given = call["function"]["arguments"]
                found.append(Said("call", (json.loads(given) if isinstance(given, str) else given)["of"], call["id"]))
        elif message["role"] == "tool":
            found.append(Said("result", "".join(texts), message["tool_call_id"]))
        else:
            found += [Said("user", word) for text in texts for word in text.split("\n")]
    return joined(found)


def joined(found: Sequence[Said]) -> list[Said]:
    result: list[Said] = []
    for said in found:
        if result and said.kind == result[-1].kind == "text":
            result[-1] = Said("text", result[-1].words + said.words)
        else:
            result.append(said)
    return result


def flat(talk: Talk) -> list[Said]:
    return joined([said for turn in talk for said in turn])


@pytest.mark.parametrize("protocol", list(PROTOCOLS))
def test_every_part_of_a_conversation_is_told_once_and_in_its_order(protocol: str) -> None:
    for seed in range(40):
        talk = talk_of(seed)
        assert told(PROTOCOLS[protocol](talk, Random(seed))) == flat(talk), seed


FORMS = [
    MessageForm(parts=parts, arguments=arguments, empty=empty)
    for parts in (False, True)
    for arguments in (False, True)
    for empty in (False, True)
]


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_no_form_of_messages_loses_a_part(form: MessageForm) -> None:
    for seed in range(20):
        talk = talk_of(seed)
        messages = by_anthropic(talk, Random(seed))
        for name in ("reasoning_content", "reasoning", "thinking"):
            assert told(as_template_reads(messages, form), name) == flat(talk), seed


@pytest.mark.parametrize("empty", [False, True])
def test_calls_that_are_told_one_by_one_each_come_before_their_own_result(empty: bool) -> None:
    for seed in range(40):
        talk = talk_of(seed)
        found = told(as_template_reads(by_anthropic(talk, Random(seed)), MessageForm(single=True, empty=empty)))
        assert sorted(found) == sorted(flat(talk)), seed
        kept = ("thought", "text", "user", "call")
        for kind in kept:
            assert [each for each in found if each.kind == kind] == [each for each in flat(talk) if each.kind == kind]
        for place, said in enumerate(found):
            if said.kind == "result" and found[place - 1].kind == "call":
                assert found[place - 1].call == said.call, seed


def test_calls_that_are_numbered_keep_their_results() -> None:
    for seed in range(20):
        talk = talk_of(seed)
        found = told(as_template_reads(by_openai(talk, Random(seed)), MessageForm(numbered=True)))
        names = {said.call: f"functions.look:{place}" for place, said in enumerate(calls_of(talk))}
        assert found == [Said(kind, words, names.get(call, call)) for kind, words, call in flat(talk)], seed


def calls_of(talk: Talk) -> list[Said]:
    return [said for said in flat(talk) if said.kind == "call"]
