"""Calls of the offline API over an engine that takes any prompt: what is one prompt and what are
several, and what becomes of the others when a call fails."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglcore import PromptEmbeds
from sglcore.engine import llm as llm_module
from sglcore.engine.llm import LLM
from sglcore.engine.outputs import Completion, RequestOutput, TextDelta
from sglcore.engine.progress import Progress
from sglcore.engine.start import embedded_model
from sglcore.engine.tokenizers.text_codec import TextError
from sglcore.sampling.params import SamplingParams
from tests.schedule.fake_worker import make_limits


class Taking:
    """An engine that takes every prompt; each step ends one sample. Adding the prompt `bad` raises
    the error."""

    def __init__(self, worker: Any, folder: Path, **how: Any) -> None:
        self.worker = worker
        self.codec: Any = SimpleNamespace(render_chat=lambda messages: "rendered", encode=lambda text, **how: [1, 2])
        self.added: list[tuple[Any, Any]] = []
        self.aborted: list[str] = []
        self.waiting: list[tuple[RequestOutput, Completion]] = []
        self.bad: Any = None
        self.error: BaseException = KeyboardInterrupt()
        self.fails = self.is_newest_first = False

    @property
    def has_work(self) -> bool:
        return bool(self.waiting)

    def add(self, prompt: Any, params: SamplingParams) -> RequestOutput:
        if isinstance(prompt, str) and prompt == self.bad:
            raise self.error
        self.added.append((prompt, params))
        samples = [Completion(index, 0) for index in range(params.n)]
        output = RequestOutput(f"r{len(self.added) - 1}", None, [1], samples)
        self.waiting += [(output, sample) for sample in samples]
        return output

    def step(self) -> list[TextDelta]:
        if self.fails:
            raise self.error
        output, sample = self.waiting.pop(-1 if self.is_newest_first else 0)
        sample.finish_reason, sample.text = "stop", "done"
        return [TextDelta(output.request_id, sample.index, "done", (1,), "stop")]

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        self.waiting = [each for each in self.waiting if each[0].request_id != request_id]

    def embed(self, prompts: list[Any], name: str | None) -> list[np.ndarray]:
        self.added += [(each, name) for each in prompts]
        return [np.full(3, place, np.float32) for place in range(len(prompts))]

    def close(self) -> None: ...


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Opens the offline API with an engine that takes any prompt."""
    monkeypatch.setattr(llm_module, "Engine", Taking)
    worker = SimpleNamespace(limits=make_limits(), close=lambda: None)
    started = SimpleNamespace(
        worker=worker, model_path=embedded_model(), overlap=False, ledger=SimpleNamespace(record=print)
    )
    monkeypatch.setattr(llm_module, "start", lambda config, progress: started)
    return LLM


EMBEDS = PromptEmbeds(np.zeros((2, 4), np.float32))


@pytest.mark.parametrize(
    ("prompts", "count"),
    [
        *(("text", 1), (b"a", 1), (bytearray(b"ab"), 1), (memoryview(b"ab"), 1), ({"a": 1, "b": 2}, 1), (EMBEDS, 1)),
        *(([1, 2], 1), ((1, 2), 1), (np.array([1, 2]), 1), ([np.int32(1), 2], 1), (range(3), 1)),
        *(([[1, 2]], 1), (["a"], 1), ([EMBEDS, "a"], 2), ([1, "a"], 2), (("a", [1, 2], "c"), 3), ([], 0), ([[]], 1)),
    ],
    ids=range(18),
)
def test_one_prompt_is_told_from_several(opened: Callable[..., Any], prompts: Any, count: int) -> None:
    with opened() as llm:
        assert len(llm.generate(prompts, SamplingParams())) == count == len(llm.engine.added)
        assert llm.embed(prompts).shape == ((count, 3) if count else (0, 0))


@pytest.mark.parametrize(
    "params",
    [{"temperature": 1.0}, {}, [SamplingParams(), {"temperature": 1.0}], [{"n": 1}, SamplingParams()], [None, None]],
    ids=str,
)
def test_what_are_no_parameters_is_refused_before_anything_is_added(opened: Callable[..., Any], params: Any) -> None:
    with opened() as llm:
        with pytest.raises(TextError, match="as sampling parameters; wanted SamplingParams"):
            llm.generate(["a", "b"], params)
        assert not llm.engine.added


@pytest.mark.parametrize("when", ["adding", "running"])
def test_all_prompts_of_a_call_that_fails_are_aborted(opened: Callable[..., Any], when: str) -> None:
    with opened() as llm:
        llm.engine.bad, llm.engine.fails = "c" if when == "adding" else None, when == "running"
        with pytest.raises(KeyboardInterrupt):
            llm.generate(["a", "b", "c"], SamplingParams())
        assert llm.engine.aborted == (["r0", "r1"] if when == "adding" else ["r0", "r1", "r2"])
        assert not llm.engine.has_work


@pytest.mark.parametrize("error", [TextError("too long"), ValueError("too long")])
def test_a_prompt_that_is_refused_leaves_the_others_alone(opened: Callable[..., Any], error: Exception) -> None:
    with opened() as llm:
        llm.engine.bad, llm.engine.error = "b", error
        found = llm.generate(["a", "b", "c"], SamplingParams(n=2))
        assert [[each.finish_reason for each in output.outputs] for output in found] == [
            *(["stop", "stop"], ["error"], ["stop", "stop"])
        ]
        assert not llm.engine.aborted and not llm.engine.has_work


def test_progress_counts_the_samples_of_the_call_and_no_others(
    opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, int, int]] = []
    monkeypatch.setattr(Progress, "phase", lambda self, *word: told.append(word))
    with opened() as llm:
        llm.engine.bad, llm.engine.error = "b", ValueError("no")
        stream = llm.stream("other", SamplingParams(n=3))
        assert next(stream).text == "done"
        llm.generate(["a", "b"], SamplingParams(n=2))
        # One of the three is refused before the first step; two steps serve the stream.
        assert told == [("generating", done, 3) for done in (1, 1, 2, 3)]
        assert [each.index for each in stream] == [1, 2]
        assert not llm._streams and llm.engine.aborted == ["r0"]


def test_a_call_leaves_an_open_stream_where_it_is_and_else_no_work(opened: Callable[..., Any]) -> None:
    with opened() as llm:
        llm.engine.is_newest_first = True
        stream = llm.stream("other", SamplingParams(n=3))
        assert next(stream).index == 2
        llm.generate(["a", "b"], SamplingParams(n=2))
        assert len(llm.engine.waiting) == 2, "its next part is computed when it is asked for"
        assert [each.index for each in stream] == [1, 0]
        llm.engine.add("of another caller", SamplingParams())
        llm.generate("a", SamplingParams())
        assert not llm.engine.has_work


@pytest.mark.parametrize("error", [KeyboardInterrupt(), TextError("no tokenizer")])
def test_a_worker_is_closed_however_the_start_of_its_engine_ends(
    error: BaseException, opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []

    def broken(worker: Any, *given: Any, **how: Any) -> None:
        monkeypatch.setattr(worker, "close", lambda: closed.append("worker"))
        raise error

    monkeypatch.setattr(llm_module, "Engine", broken)
    with pytest.raises(type(error)):
        opened()
    assert closed == ["worker"]


def test_a_sample_that_ended_does_not_end_its_prompt() -> None:
    ended, other = Completion(0, 0, finish_reason="stop"), Completion(1, 0)
    assert RequestOutput("r", None, [1], [ended]).finished
    assert not RequestOutput("r", None, [1], [ended, other]).finished
    assert not RequestOutput("r", None, [1], [other, ended]).finished


def test_a_conversation_has_the_parameters_that_are_given_or_the_usual_ones(opened: Callable[..., Any]) -> None:
    with opened() as llm:
        output = llm.chat([{"role": "user", "content": "hi"}], SamplingParams(seed=9))
        assert output.request_id == "r0"
        llm.chat([{"role": "user", "content": "hi"}])
        list(llm.stream("a", SamplingParams(seed=8)))
        list(llm.stream("a"))
        given = [SamplingParams(seed=9), llm.default_params, SamplingParams(seed=8), llm.default_params]
        assert llm.engine.added == list(zip([[1, 2], [1, 2], "a", "a"], given, strict=True))


def test_a_named_prompt_is_given_to_the_engine(opened: Callable[..., Any]) -> None:
    with opened() as llm:
        assert llm.embed(["a", "b"], prompt_name="query")[:, 0].tolist() == [0, 1]
        assert llm.engine.added == [("a", "query"), ("b", "query")]


@pytest.mark.parametrize("shown", [None, False, True])
def test_bars_are_drawn_where_they_are_asked_for(opened: Callable[..., Any], shown: bool | None) -> None:
    with opened(**({} if shown is None else {"show_progress": shown})) as llm:
        assert llm._progress._enabled is bool(shown)


def test_bars_are_on_standard_error_follow_their_totals_and_end(capsys: pytest.CaptureFixture[str]) -> None:
    progress = Progress()
    with pytest.raises(KeyboardInterrupt), progress:
        progress.phase("weights", 1, 2)
        progress.phase("weights", 1, 5)
        bars: Any = progress._bars
        assert bars.console.stderr and bars.live.is_started
        assert [(each.completed, each.total) for each in bars.tasks] == [(1, 5)]
        raise KeyboardInterrupt
    assert not bars.live.is_started and progress._bars is None
    assert not capsys.readouterr().out
