"""Answers to several prompts or samples in the forms of other servers: each has its own values."""

from __future__ import annotations

import json
from typing import Any

from sglcore.engine.outputs import TextDelta
from sglcore.schedule.request_output import TokenLogprob
from tests.serving.stubs import Application, StubGeneration, make_frontend


def test_each_sample_of_sglang_has_its_own_values() -> None:
    async def generate(prompt: Any, *given: Any, **named: Any) -> StubGeneration:
        place = int(prompt)
        made = StubGeneration([TextDelta("r", index, f"{place}{index}", (), "length") for index in range(2)])
        made.output.prompt_token_ids, made.output.cached_tokens = [5] * (3 + place), place
        for sample in made.output.outputs:
            number = 10 * place + sample.index
            sample.seed, sample.token_ids, sample.warnings = number, [number] * (1 + sample.index), [f"w{number}"]
            sample.logprobs = [TokenLogprob(number, -float(number), 1, ((number, -float(number)),))]
        return made

    body = {"text": ["0", "1"], "sampling_params": {"n": 2}, "return_logprob": True, "top_logprobs_num": 1}
    served = Application(make_frontend(generate))
    whole = served.send("POST", "/generate", body).json()
    lines = [line[6:] for line in served.send("POST", "/generate", {**body, "stream": True}).text.splitlines() if line]
    streamed = {each["index"]: each for each in map(json.loads, lines[:-1])}
    for found in (whole, [streamed[index] for index in range(4)]):
        assert [each["text"] for each in found] == ["00", "01", "10", "11"]
        about = [each["meta_info"] for each in found]
        assert [each["seed"] for each in about] == [0, 1, 10, 11]
        assert [each["warnings"] for each in about] == [["w0"], ["w1"], ["w10"], ["w11"]]
        assert [each["completion_tokens"] for each in about] == [1, 2, 1, 2]
        assert [(each["prompt_tokens"], each["cached_tokens"]) for each in about] == [(3, 0), (3, 0), (4, 1), (4, 1)]
        for name, wanted in (
            ("output_token_logprobs", [0, 1, 10, 11]),
            ("output_top_logprobs", [[0], [1], [10], [11]]),
        ):
            tokens = [each[name][0] for each in about]
            known = [each[1] if name == "output_token_logprobs" else [one[1] for one in each] for each in tokens]
            assert known == wanted, name


def test_each_prompt_of_llama_server_has_its_own_counts() -> None:
    async def generate(prompt: Any, *given: Any, **named: Any) -> StubGeneration:
        place = int(prompt)
        made = StubGeneration([TextDelta("r", 0, prompt, (), "length")])
        made.output.prompt_token_ids, made.output.cached_tokens = [5] * (3 + place), place
        made.output.outputs[0].seed, made.output.outputs[0].token_ids = 40 + place, [7] * (1 + place)
        return made

    served = Application(make_frontend(generate))
    whole = served.send("POST", "/completion", {"prompt": ["0", "1", "2"]}).json()
    streamed = served.send("POST", "/completion", {"prompt": ["0", "1", "2"], "stream": True}).text.splitlines()
    ends = sorted((json.loads(line[6:]) for line in streamed if '"stop":true' in line), key=lambda each: each["index"])
    for found in (whole, ends):
        assert [each["index"] for each in found] == [0, 1, 2]
        assert [each["generation_settings"]["seed"] for each in found] == [40, 41, 42]
        counts = [(each["tokens_evaluated"], each["tokens_cached"], each["tokens_predicted"]) for each in found]
        assert counts == [(3, 0, 1), (4, 1, 2), (5, 2, 3)]
    assert [each["content"] for each in whole] == ["0", "1", "2"] and not any(each["content"] for each in ends)
