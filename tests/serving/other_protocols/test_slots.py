"""The state of the server in the form of llama-server: its properties, and what each slot does."""

from __future__ import annotations

from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest

from sglcore.engine.output_processor import OutputProcessor
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.request_output import EngineOutput
from sglcore.serving.replicas.ipc import EngineStats, GenerateRequest, pack_params
from sglcore.serving.replicas.prompt_generation import Generation
from tests.serving.stubs import Application, make_frontend

PROMPT = [5, 6, 7, 8]


@cache
def shared() -> tuple[Any, Application]:
    """A frontend and the application over it, made once: each `Served` sets the frontend anew."""
    frontend = make_frontend()
    return frontend, Application(frontend)


class Served:
    """An application over a frontend whose engines run these generations."""

    def __init__(self, *, replicas: int = 1, places: int = 4, running: int = 0) -> None:
        self.frontend, self.application = shared()
        self.frontend.supervisor = SimpleNamespace(generations=[], replicas=dict.fromkeys(range(replicas)))
        self.frontend.info.limits["max_requests"], self.frontend.model_path = places, "folder"
        self.frontend.stats = lambda: EngineStats(running=running)

    def run(self, name: str, *outputs: EngineOutput, **params: Any) -> None:
        asked = SamplingParams(**params)
        processor = OutputProcessor(self.frontend.codec, name, None, PROMPT, asked, 4)
        request = GenerateRequest(name, b"", pack_params(asked), 4)
        generation = Generation(request, processor, self.frontend.metrics.clock())
        for output in outputs:
            generation.deliver(output)
        self.frontend.supervisor.generations.append(generation)

    def get(self, path: str) -> Any:
        answer = self.application.send("GET", path)
        assert answer.status_code == 200, answer.text
        return answer.json()


@pytest.mark.parametrize(("replicas", "places"), [(1, 3), (2, 3), (3, 1)])
def test_every_replica_has_slots_of_its_own(replicas: int, places: int) -> None:
    served = Served(replicas=replicas, places=places)
    assert [each["id"] for each in served.get("/slots")] == list(range(replicas * places))
    assert served.get("/props")["total_slots"] == replicas * places


def test_more_samples_than_slots_fill_each_slot_once() -> None:
    served = Served(places=2, running=9)
    served.run("a", n=3, max_tokens=9)
    assert [(each["id"], each["is_processing"]) for each in served.get("/slots")] == [(0, True), (1, True)]


def test_a_sample_that_has_ended_leaves_its_slot_and_those_that_run_move_up() -> None:
    served = Served(running=0)
    served.run(
        "a", EngineOutput("a", 0, [9], "length"), EngineOutput("a", 1, [8]), EngineOutput("a", 2, [7, 6]), n=3,
        max_tokens=9,
    )  # fmt: skip
    served.run("b", EngineOutput("b", 0, [9], "stop"), max_tokens=9)
    made = [each["next_token"][0]["n_decoded"] for each in served.get("/slots") if each["is_processing"]]
    assert made == [1, 2]


@pytest.mark.parametrize("cached", [0, 1, 3])
@pytest.mark.parametrize(("tokens", "limit"), [([9], 5), ([9, 8, 7], 3), ([9, 8], None)])
def test_a_slot_tells_what_its_sample_has_read_and_what_it_may_still_say(
    tokens: list[int], limit: int | None, cached: int
) -> None:
    served = Served()
    output = EngineOutput("a", 0, tokens, cached_tokens=cached)
    served.run("a", output, max_tokens=limit, temperature=0.25, seed=5)
    slot = served.get("/slots")[0]
    read = [slot[name] for name in ("n_prompt_tokens", "n_prompt_tokens_processed", "n_prompt_tokens_cache")]
    assert read == [len(PROMPT), len(PROMPT) - cached, cached]
    remain = -1 if limit is None else limit - len(tokens)
    assert slot["next_token"] == [{"has_next_token": True, "n_remain": remain, "n_decoded": len(tokens)}]
    asked = {"n_predict": -1 if limit is None else limit, "temperature": 0.25}
    seed = served.frontend.supervisor.generations[0].output.outputs[0].seed
    assert slot["params"] == {**asked, "seed": seed} and (slot["id"], slot["n_ctx"]) == (0, 64)


def test_a_sample_that_runs_before_its_first_token_has_read_nothing() -> None:
    served = Served(running=1)
    served.run("a", max_tokens=5)
    slot = served.get("/slots")[0]
    assert (slot["request_id"], slot["n_prompt_tokens"], slot["n_prompt_tokens_processed"]) == ("a", len(PROMPT), 0)
    assert slot["next_token"] == [{"has_next_token": True, "n_remain": 5, "n_decoded": 0}]


@pytest.mark.parametrize(
    ("special", "wanted"),
    [
        ({"bos_token": "<b>", "eos_token": "<e>"}, ("<b>", "<e>")),
        ({"eos_token": "<e>"}, ("", "<e>")),
        ({"bos_token": "<b>", "eos_token": None}, ("<b>", "")),
    ],
)
@pytest.mark.parametrize("template", [None, "{{ messages }}"])
def test_the_properties_are_those_of_the_model_that_is_served(
    special: Any, wanted: Any, template: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    served = Served()
    written = SimpleNamespace(special_tokens=special, source=lambda: template)
    monkeypatch.setattr(served.frontend, "names", ("first", "second"))
    monkeypatch.setattr(served.frontend, "sampling", {"temperature": 0.25, "top_k": 7})
    monkeypatch.setattr(served.frontend.codec, "template", written)
    found = served.get("/props")
    assert (found["bos_token"], found["eos_token"]) == wanted and found["chat_template"] == (template or "")
    assert (found["model_alias"], found["model_path"]) == ("first", "folder")
    settings = {"n_ctx": 64, "params": {"temperature": 0.25, "top_k": 7}}
    assert found["default_generation_settings"] == settings
