"""Whole answers of every protocol to scripted models, as they are sent.

`python -m tests.serving.whole_answers` rewrites them after an intended change; review the
difference like code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from sglcore.config.server_config import ServerConfig
from tests.serving.scripted import Stage, call, content, reasoning, staged

FOLDER = Path(__file__).parent / "answers"
USER = {"role": "user", "content": "How is it?"}
WEATHER: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "weather", "description": "How it is there.", "parameters": WEATHER}
CLOCK = {**FUNCTION, "name": "clock"}

SAYS: dict[str, dict[str, Any]] = {
    "text": {"says": [content("It is"), content(" w"), content("ét.")]},
    "nothing": {"says": []},
    "cut": {"says": [content("It"), content(" is")], "reason": "length"},
    "stopped": {"says": [content("It")], "stop_cause": "is"},
    "thought": {"says": [reasoning("Look"), reasoning(" out."), content("Wet.")]},
    "thought_alone": {"says": [reasoning("Look"), reasoning(" out")], "reason": "length"},
    "called": {"says": call("weather", '{"city":', ' "Oslo"}')},
    "thought_said_and_called": {
        "says": [
            reasoning("Ask."),
            content("One moment."),
            *call("weather", '{"city": "Oslo"}'),
            *call("clock", "{}", index=1),
        ]
    },
    "failed": {"says": [content("It")], "reason": "error", "error": "the model gave no finite number"},
}
"""The model's answers: fields of a `Script`."""

ASKS: dict[str, tuple[str, dict[str, Any]]] = {
    "chat": ("/v1/chat/completions", {"messages": [USER]}),
    "completions": ("/v1/completions", {"prompt": "How is it?"}),
    "responses": ("/v1/responses", {"input": "How is it?", "store": False}),
    "messages": ("/v1/messages", {"messages": [USER], "max_tokens": 9}),
    "ollama_chat": ("/api/chat", {"messages": [USER]}),
    "ollama_generate": ("/api/generate", {"prompt": "How is it?"}),
    "llama": ("/completion", {"prompt": "How is it?"}),
    "sglang": ("/generate", {"text": "How is it?"}),
}
"""{protocol: (path, body)}"""
TOOLS: dict[str, Any] = {
    "chat": {"tools": [{"type": "function", "function": each} for each in (FUNCTION, CLOCK)]},
    "responses": {"tools": [{"type": "function", **each} for each in (FUNCTION, CLOCK)]},
    "messages": {
        "tools": [{"name": each["name"], "description": "How.", "input_schema": WEATHER} for each in (FUNCTION, CLOCK)]
    },
    "ollama_chat": {"tools": [{"type": "function", "function": each} for each in (FUNCTION, CLOCK)]},
}
"""{protocol: fields of a body that allows calls}"""
SCORES: dict[str, Any] = {
    "chat": {"logprobs": True, "top_logprobs": 2},
    "completions": {"logprobs": 2},
    "responses": {"top_logprobs": 2},
    "ollama_chat": {"logprobs": True, "top_logprobs": 2},
    "ollama_generate": {"logprobs": True, "top_logprobs": 2},
    "llama": {"n_probs": 2},
    "sglang": {"return_logprob": True, "top_logprobs_num": 2},
}
"""{protocol: fields of a body that requests log-probabilities}"""
USAGE: dict[str, Any] = {"stream_options": {"include_usage": True}}
TEXTS = ("completions", "llama", "sglang")
"""Protocols without messages: the answer is plain text."""

_CLOCK = re.compile(r"(?:created|_at|_duration|_ms|_per_second|_latency|_time)(?:$|_)")
_NAME = re.compile(r"\b([a-z]{2,9}[-_])(?=[0-9a-f]*[0-9])[0-9a-f]{12,}\b|\b[0-9a-f]{32}\b")


def cases(protocol: str) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """(name, script, body) of each case."""
    body = ASKS[protocol][1]
    for name, script in SAYS.items():
        kinds = {delta.kind for token in script["says"] for delta in token}
        if (protocol in TEXTS and kinds - {"content"}) or ("tool_start" in kinds and protocol not in TOOLS):
            continue
        yield name, script, {**body, **TOOLS[protocol]} if "tool_start" in kinds else body
    if protocol in SCORES:
        yield "scored", SAYS["text"], {**body, **SCORES[protocol]}
    if protocol in ("chat", "completions"):
        yield "counted", SAYS["text"], {**body, **USAGE}


def answer(stage: Stage, protocol: str, script: Mapping[str, Any], body: Mapping[str, Any], streams: bool) -> Any:
    """The status and the decoded answer (JSON, server-sent events or lines); waits for the end of
    the answer."""
    says = script["says"]
    if protocol in TEXTS:
        says = ["".join(delta.text for delta in token) for token in says]
    stage.speak(*says, **{name: value for name, value in script.items() if name != "says"})
    asked = {key: value for key, value in body.items() if streams or key != "stream_options"}
    found = httpx.post(stage.url + ASKS[protocol][0], json={**asked, "stream": streams}, trust_env=False)
    return {"status": found.status_code, "answer": steady(_events(found) if streams else found.json())}


def _events(found: httpx.Response) -> list[Any]:
    """The name (if any) and data of each event; or each line of an answer in lines."""
    if "event-stream" not in found.headers["content-type"]:
        return [json.loads(line) for line in found.text.splitlines()]
    events: list[Any] = []
    for block in found.text.strip().split("\n\n"):
        lines = [line.partition(": ") for line in block.splitlines()]
        named = [value for key, _, value in lines if key == "event"]
        data = "\n".join(value for key, _, value in lines if key == "data")
        events.append([*named, data if data == "[DONE]" else json.loads(data)])
    return events


def steady(value: Any) -> Any:
    """The answer with values that change between runs replaced: times by their kind, ids by the
    order of their first use."""
    return _steady(value, {})


def _steady(value: Any, names: dict[str, str]) -> Any:
    if isinstance(value, dict):
        return {key: _moment(held) if _is_moment(key, held) else _steady(held, names) for key, held in value.items()}
    if isinstance(value, list):
        return [_steady(each, names) for each in value]
    if isinstance(value, str):
        return _NAME.sub(lambda found: names.setdefault(found[0], f"{found[1] or ''}<{len(names)}>"), value)
    return value


def _is_moment(key: str, value: Any) -> bool:
    is_plain = isinstance(value, int | float | str) and not isinstance(value, bool)
    return is_plain and value != 0 and _CLOCK.search(key) is not None


def _moment(value: Any) -> str:
    return f"<{type(value).__name__} of time>"


def answers(stage: Stage, protocol: str) -> dict[str, Any]:
    """{case: the answer, whole and as a stream}"""
    return {
        name: {
            "whole": answer(stage, protocol, script, body, streams=False),
            "stream": answer(stage, protocol, script, body, streams=True),
        }
        for name, script, body in cases(protocol)
    }


def write(protocols: Sequence[str]) -> None:
    """Write the current answers, one file per protocol."""
    with staged(ServerConfig()) as stage:
        for protocol in protocols:
            (FOLDER / f"{protocol}.json").write_text(_text(answers(stage, protocol)), encoding="utf-8")


def _text(found: Mapping[str, Any]) -> str:
    """JSON with one event per line, so that a difference shows the changed events."""
    lines = []
    for name, forms in found.items():
        whole, stream = forms["whole"], forms["stream"]
        events = ",\n   ".join(json.dumps(event, ensure_ascii=False) for event in stream["answer"])
        lines.append(
            f'{json.dumps(name)}: {{\n  "whole": {json.dumps(whole, ensure_ascii=False)},\n'
            f'  "stream": {{"status": {stream["status"]}, "answer": [\n   {events}\n  ]}}\n }}'
        )
    return "{\n " + ",\n ".join(lines) + "\n}\n"


if __name__ == "__main__":
    write(tuple(ASKS))
