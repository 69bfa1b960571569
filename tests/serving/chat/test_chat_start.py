"""How a chat begins: a message that goes on with tools and variables, and what the engine is asked
for."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from sglcore.config.engine_config import EngineConfig
from sglcore.config.server_config import ServerConfig
from sglcore.engine.outputs import TextDelta
from sglcore.engine.tokenizers.chat_template import TextError
from sglcore.sampling.grammar_spec import Grammar, Thinking
from sglcore.sampling.params import SamplingParams
from sglcore.serving.chat.chat_frontend import ChatFrontend
from sglcore.serving.chat.format import ChatFormat
from sglcore.serving.chat.run import ChatRequest, collect_chat, count_prompt, start_chat
from sglcore.serving.replicas.server_errors import InvalidRequest
from tests.serving.chat.checkpoints import make_codec
from tests.serving.scripted import PROMPT, Script, ScriptedFormat, ScriptedFrontend, content
from tests.serving.staged_replicas import Stage
from tests.serving.stubs import gives, make_frontend

USER = {"role": "user", "content": "Hi"}
BEGUN = {"role": "assistant", "content": "The answer is "}
TOOLS = [{"type": "function", "function": {"name": "look", "description": "", "parameters": {"type": "object"}}}]
GO_ON: dict[str, Any] = {"continue_final_message": True, "add_generation_prompt": False}


@pytest.mark.parametrize("name", ["hermes", "thinking", "mistral named", "coder", "glm"])
@pytest.mark.parametrize("choice", ["auto", "required", "none"])
def test_a_message_that_goes_on_has_the_same_tools_before_it(
    formats: dict[str, ChatFormat], name: str, choice: str
) -> None:
    given: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice}
    whole = formats[name].render([USER, BEGUN], add_generation_prompt=False, **given).text
    begun = formats[name].render([USER, BEGUN], **GO_ON, **given).text
    assert whole.startswith(begun.rstrip()) and begun.endswith("The answer is ")
    assert ("look" in begun) is (choice != "none")


def test_a_message_that_goes_on_has_the_variables_of_the_request_and_names_those_that_are_not_read(
    tmp_path: Path,
) -> None:
    template = "{{ mood }}|{% for m in messages %}{{ m.content }}{% endfor %}"
    found = ChatFormat.detect(make_codec(tmp_path, template)).render(
        [USER, BEGUN], **GO_ON, chat_template_kwargs={"mood": "good", "speed": 1, "age": 2}
    )
    assert (found.text, found.ignored) == ("good|HiThe answer is ", ("age", "speed"))


@pytest.mark.parametrize(
    ("words", "is_open"),
    [
        (["<think>Well"], True),
        (["<think>Well</think>So"], False),
        (["<think>a</think><think>b"], True),
        (["<think>", "Well"], True),
        (["<think>a", "b</think>", "So"], False),
        (["So"], False),
    ],
)
@pytest.mark.parametrize("has_parts", [False, True])
def test_a_message_that_goes_on_is_in_reasoning_if_it_opens_more_than_it_closes(
    words: list[str], is_open: bool, has_parts: bool, tmp_path: Path
) -> None:
    said = "{% for p in m.content %}[{{ p.text }}]{% endfor %}" if has_parts else "{{ m.content }}"
    template = f"{{% for m in messages %}}{said}{{% endfor %}}{{% if never %}}<think></think>{{% endif %}}"
    found = ChatFormat.detect(make_codec(tmp_path, template))
    assert found.reasoning_parser == "think" and found.form.parts is has_parts
    last = {"role": "assistant", "content": [{"type": "text", "text": word} for word in words]}
    assert found.render([USER, last], **GO_ON).reasoning_open is is_open


def test_a_message_without_any_part_can_not_go_on_where_a_template_reads_parts(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% for p in m.content %}[{{ p.text }}]{% endfor %}{% endfor %}"
    found = ChatFormat.detect(make_codec(tmp_path, template))
    with pytest.raises(TextError, match="no content that could go on"):
        found.render([USER, {"role": "assistant", "content": []}], **GO_ON)
    for empty in ({"content": ""}, {"content": None}, {}):
        assert found.render([USER, {"role": "assistant", **empty}], **GO_ON).text == "[Hi]["


class Noted(ScriptedFrontend):
    """Records what is asked of the engine and of the tokenizer."""

    def __init__(self, script: Script) -> None:
        super().__init__(script, ServerConfig())
        self.asked: list[dict[str, Any]] = []

    async def generate(self, prompt: Any, params: SamplingParams, **given: Any) -> Any:
        self.asked.append({"prompt": prompt, **given})
        return await super().generate(prompt, params, **given)

    async def tokenize(self, prompt: Any, **given: Any) -> list[int]:
        self.asked.append({"prompt": prompt, **given})
        return list(PROMPT)


def request(**given: Any) -> ChatRequest:
    return ChatRequest(**{"messages": [USER], "params": SamplingParams(), **given})


@pytest.mark.parametrize(("progress", "name"), [(False, None), (True, "chatcmpl-1")])
def test_the_template_has_all_special_tokens_of_a_prompt_and_the_engine_the_id_of_the_request(
    progress: bool, name: str | None
) -> None:
    frontend: Any = Noted(Script(says=[content("A")]))

    async def play() -> None:
        async with await start_chat(frontend, request(progress=progress, request_id=name)):
            pass
        assert await count_prompt(frontend, request(), "messages") == len(PROMPT)

    asyncio.run(play())
    started, counted = frontend.asked
    named = {"special": False, "progress": progress, "request_id": name, "answer_id": "", "prompts": 1}
    assert started == {"prompt": "prompt", **named}
    assert counted == {"prompt": "prompt", "special": False}


class Thinks(ScriptedFormat):
    """A format with reasoning that has a budget."""

    def thinking(self, *given: Any, budget: int | None = None, **more: Any) -> Any:
        return None if budget is None else Thinking("</think>", "</think>", budget=budget)


@pytest.mark.parametrize("budget", [None, 0, 5])
@pytest.mark.parametrize("thinks", [False, True])
def test_a_budget_of_reasoning_is_told_as_ignored_where_there_is_none(budget: int | None, thinks: bool) -> None:
    script = Script(says=[content("A")], ignored=("mood",))
    frontend: Any = ScriptedFrontend(script, ServerConfig())
    if thinks:
        frontend.format = Thinks(script)

    async def play() -> tuple[str, ...]:
        run = await start_chat(frontend, request(thinking_token_budget=budget))
        async with run:
            return run.ignored

    told = ("thinking_token_budget",) if budget is not None and not thinks else ()
    assert asyncio.run(play()) == ("mood", *told)


@pytest.mark.parametrize(("tools", "reasoning"), [("auto", "auto"), ("off", "auto"), ("auto", "none")])
def test_a_frontend_has_the_parsers_that_its_server_is_told(tools: str, reasoning: str) -> None:
    async def play() -> tuple[str, str]:
        server = ServerConfig(tool_parser=tools, reasoning_parser=reasoning)
        frontend = ChatFrontend(EngineConfig(), server, launcher=Stage(is_remote=False))
        await frontend.stop()
        return frontend.format.tool_reason, frontend.format.reasoning_reason

    found = asyncio.run(play())
    assert [reason == "turned off" for reason in found] == [tools != "auto", reasoning != "auto"]


SAID = '<think>Hm.</think>{"a": 1}<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'


@pytest.mark.parametrize(
    ("name", "bound", "choice", "reads"),
    [
        ("hermes", False, None, "thoughts"),
        ("hermes", True, None, ""),
        ("hermes", True, "none", ""),
        ("hermes", True, "auto", "thoughts and calls"),
        ("hermes", True, "required", "thoughts and calls"),
        ("hermes", False, "auto", "thoughts and calls"),
        ("hermes", False, "none", "thoughts"),
    ],
)
def test_an_answer_that_a_form_binds_at_once_is_read_as_it_is_unless_calls_are_offered(
    formats: dict[str, ChatFormat], name: str, bound: bool, choice: str | None, reads: str
) -> None:
    frontend: Any = ScriptedFrontend(Script(says=[SAID]), ServerConfig(), formats[name])
    params = SamplingParams(grammar=Grammar("json_object") if bound else None)
    tools: dict[str, Any] = {} if choice is None else {"tools": TOOLS, "tool_choice": choice}

    async def play() -> Any:
        run = await start_chat(frontend, request(params=params, **tools))
        async with run:
            return (await collect_chat(run))[0]

    found = asyncio.run(play())
    assert [call.name for call in found.tool_calls] == (["look"] if "calls" in reads else [])
    assert found.reasoning == ("Hm." if "thoughts" in reads else "")
    assert ("<think>" in found.content) is ("thoughts" not in reads)
    assert ("<tool_call>" in found.content) is ("calls" not in reads)


@pytest.mark.parametrize(
    ("bound", "choice", "form"),
    [
        (False, "auto", ""),
        (False, "none", ""),
        (True, "auto", "text.format"),
        (True, "none", "text.format"),
        (False, "required", "tools"),
        (True, "required", "tools"),
        (True, {"type": "function", "function": {"name": "look"}}, "tools"),
    ],
)
def test_what_an_engine_refuses_of_a_grammar_is_blamed_on_the_field_that_it_comes_from(
    formats: dict[str, ChatFormat], bound: bool, choice: Any, form: str
) -> None:
    frontend: Any = ScriptedFrontend(Script(says=["{}"]), ServerConfig(), formats["hermes"])
    params = SamplingParams(grammar=Grammar("json_object") if bound else None)

    async def play() -> str:
        async with await start_chat(
            frontend, request(params=params, tools=TOOLS, tool_choice=choice, form="text.format")
        ) as run:
            return run.form

    assert asyncio.run(play()) == form


@pytest.mark.parametrize(
    ("parameters", "choice", "param"),
    [
        ({"type": "object"}, {"type": "function", "function": {"name": "other"}}, "tool_choice"),
        ({"type": "array"}, "required", "tools"),
        ({"type": "array"}, {"type": "function", "function": {"name": "look"}}, "tools"),
    ],
)
def test_a_choice_of_no_tool_and_parameters_of_no_object_are_refused_by_their_own_fields(
    formats: dict[str, ChatFormat], parameters: Any, choice: Any, param: str
) -> None:
    frontend: Any = ScriptedFrontend(Script(says=["{}"]), ServerConfig(), formats["hermes"])
    tools = [{"type": "function", "function": {"name": "look", "parameters": parameters}}]
    with pytest.raises(InvalidRequest) as refused:
        asyncio.run(start_chat(frontend, request(tools=tools, tool_choice=choice)))
    assert refused.value.param == param


def test_each_sample_of_a_chat_is_read_by_itself(formats: dict[str, ChatFormat]) -> None:
    said = [SAID.replace("look", name) for name in ("look", "see")]
    pieces = [said[index][place : place + 7] for place in range(0, len(SAID), 7) for index in range(2)]
    deltas = [TextDelta("r", place % 2, text, (5,)) for place, text in enumerate(pieces)]
    ends = [TextDelta("r", index, "", (), "stop") for index in range(2)]
    frontend: Any = make_frontend(gives(*deltas, *ends))
    frontend.format = formats["hermes"]
    tools = [{"type": "function", "function": {"name": name}} for name in ("look", "see")]

    async def play() -> Any:
        run = await start_chat(frontend, request(params=SamplingParams(n=2), tools=tools))
        async with run:
            return await collect_chat(run)

    first, second = asyncio.run(play())
    assert [[call.name for call in each.tool_calls] for each in (first, second)] == [["look"], ["see"]]
    assert first.content == second.content == '{"a": 1}' and first.reasoning == second.reasoning == "Hm."
    assert first.tool_calls[0].call_id != second.tool_calls[0].call_id


@pytest.mark.parametrize("name", ["hermes", "mistral named", "glm", "coder"])
def test_a_choice_names_a_tool_in_full(formats: dict[str, ChatFormat], name: str) -> None:
    tools = [{"type": "function", "function": {**TOOLS[0]["function"], "name": each}} for each in ("look_up", "look")]

    def forced(choice: str, *places: int) -> Any:
        return formats[name].tool_grammar([tools[place] for place in places], {"function": {"name": choice}})

    assert forced("look", 0, 1) == forced("look", 1) != forced("look_up", 0, 1) == forced("look_up", 0)
    for wrong in ("loo", "LOOK", ""):
        with pytest.raises(TextError, match=f"names '{wrong}'; wanted one of look_up, look"):
            forced(wrong, 0, 1)
