"""The offline API over an engine that records its calls: how prompts, parameters and settings reach
it, and what a refusal looks like."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglcore.core.errors import ConfigError
from sglcore.engine import llm as llm_module
from sglcore.engine.llm import LLM
from sglcore.engine.progress import Progress
from sglcore.engine.start import embedded_model
from sglcore.engine.tokenizers.text_codec import TextError
from sglcore.sampling.params import SamplingParams
from sglcore.schedule.result_checks import longest_prompt
from tests.schedule.fake_worker import make_limits

LIMITS = make_limits()


class Closable:
    """A worker that counts how often it was closed."""

    def __init__(self) -> None:
        self.limits, self.closed = LIMITS, 0

    def close(self) -> None:
        self.closed += 1


class Refusing:
    """An engine that refuses every prompt, and scores pairs by their lengths."""

    has_work = False

    def __init__(self, worker: Closable, folder: Path, **how: Any) -> None:
        self.worker, self.how = worker, how
        self.codec: Any = SimpleNamespace(render_chat=lambda messages: "rendered", encode=self.encode)
        self.asked: list[Any] = []

    def encode(self, text: str, **how: Any) -> list[int]:
        self.asked.append((text, how))
        return [1]

    def add(self, prompt: Any, params: SamplingParams) -> Any:
        self.asked.append((prompt, params))
        raise TextError("not today")

    def score(self, pairs: Sequence[tuple[str, str]]) -> list[np.ndarray]:
        self.asked.append(pairs)
        labels = self.worker.limits.num_labels
        return [np.arange(labels, dtype=np.float32) + len(first) for first, _ in pairs]

    def close(self) -> None:
        self.worker.close()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Opens the offline API with a recording engine."""
    monkeypatch.setattr(llm_module, "Engine", Refusing)

    def started(config: Any, progress: Any) -> Any:
        ledger = SimpleNamespace(record=print)
        return SimpleNamespace(worker=Closable(), model_path=embedded_model(), overlap=False, ledger=ledger)

    monkeypatch.setattr(llm_module, "start", started)
    return LLM


def test_an_engine_has_the_settings_of_its_configuration(opened: Callable[..., Any]) -> None:
    usual = {"prefix_cache": True, "shards": 1, "skip_tokenizer": False, "grammar_backend": "auto"}
    other = {"prefix_cache": False, "shards": 2, "skip_tokenizer": True, "grammar_backend": "off"}
    for given, wanted in (
        ({}, usual),
        ({"prefix_cache": False, "dp": 2, "tp": 2, "skip_tokenizer": True, "grammar_backend": "off"}, other),
    ):
        with opened(**given) as found:
            assert found.engine.how == {**wanted, "overlap": False, "record": print}
        assert found.engine.worker.closed == 1


def test_a_worker_is_closed_if_its_engine_can_not_be_made(
    opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    workers: list[Closable] = []

    def broken(worker: Closable, *given: Any, **how: Any) -> None:
        workers.append(worker)
        raise ConfigError("no tokenizer")

    monkeypatch.setattr(llm_module, "Engine", broken)
    with pytest.raises(ConfigError, match="no tokenizer"):
        opened()
    assert [each.closed for each in workers] == [1]


@pytest.mark.parametrize(
    ("prompts", "taken"),
    [
        ("text", [("text", [])]),
        (["one", "two"], [("one", []), ("two", [])]),
        ([5, 6], [(None, [5, 6])]),
        ([5, np.int64(6)], [(None, [5, 6])]),
        (np.array([5, 6]), [(None, [5, 6])]),
        ([[5, 6], "two", np.array([7])], [(None, [5, 6]), ("two", []), (None, [7])]),
        (b"bytes", [(None, list(b"bytes"))]),
        ([], []),
    ],
    ids=str,
)
def test_a_refused_prompt_is_an_output_with_the_prompt_the_seed_and_the_reason(
    opened: Callable[..., Any], prompts: Any, taken: list[Any]
) -> None:
    with opened() as found:
        for seed in (None, 9):
            outputs = found.generate(prompts, SamplingParams(seed=seed))
            assert [(each.prompt, each.prompt_token_ids) for each in outputs] == taken
            for output in outputs:
                (completion,) = output.outputs
                assert (completion.finish_reason, completion.error) == ("error", "not today") and output.finished
                assert completion.seed == (seed or 0)


def test_each_prompt_has_its_own_parameters_or_all_have_the_same(opened: Callable[..., Any]) -> None:
    one, two = SamplingParams(seed=1), SamplingParams(seed=2)
    with opened() as found:
        found.generate(["a", "b"], [one, two])
        found.generate(["a", "b"], two)
        assert found.engine.asked == [("a", one), ("b", two), ("a", two), ("b", two)]
        with pytest.raises(TextError, match="found 1 sampling parameters for 2 prompts"):
            found.generate(["a", "b"], [one])


def test_a_conversation_has_no_further_special_tokens_and_a_prompt_has_them(opened: Callable[..., Any]) -> None:
    with opened() as found:
        found.chat_prompt([{"role": "user", "content": "hi"}])
        found.prompt("plain")
        found.prompt("bare", special=False)
        most = longest_prompt(LIMITS)
        assert found.engine.asked == [
            (text, {"special": special, "most": most})
            for text, special in (("rendered", False), ("plain", True), ("bare", False))
        ]


@pytest.mark.parametrize("labels", [1, 3])
def test_scores_have_a_row_for_each_pair_and_a_column_for_each_of_several_labels(
    opened: Callable[..., Any], labels: int
) -> None:
    with opened() as found:
        found.engine.worker.limits = make_limits(num_labels=labels)
        for queries, documents, pairs in (
            ("q", "d", [("q", "d")]),
            ("q", ["d", "e", "f"], [("q", "d"), ("q", "e"), ("q", "f")]),
            (["q", "rr"], ["d", "e"], [("q", "d"), ("rr", "e")]),
            ([], [], []),
            ("q", [], []),
        ):
            scores = found.score(queries, documents)
            assert found.engine.asked[-1] == pairs and scores.dtype == np.float32
            wanted = [[len(first) + label for label in range(labels)] for first, _ in pairs]
            assert scores.shape == ((len(pairs),) if labels == 1 else (len(pairs), labels))
            assert scores.reshape(len(pairs), labels).tolist() == wanted
        with pytest.raises(TextError, match="found 2 queries for 3 documents"):
            found.score(["q", "r"], ["d", "e", "f"])


@pytest.mark.parametrize("enabled", [True, False])
def test_bars_are_made_with_the_first_phase_and_anew_each_time(enabled: bool) -> None:
    progress = Progress(enabled=enabled)
    for _ in range(2):
        with progress:
            assert progress._bars is None
            for done in range(3):
                progress.phase("weights", done, 2)
            progress.phase("graphs", 0, 1)
            bars: Any = progress._bars
            assert (bars is not None) is enabled
            assert not enabled or [(each.description, each.completed) for each in bars.tasks] == [
                ("weights", 2),
                ("graphs", 0),
            ]
        assert progress._bars is None


def test_parameters_of_a_checkpoint_are_those_of_its_file(opened: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.25, "do_sample": True}))
    with opened() as found:
        found.started.model_path = tmp_path
        assert found.default_params == SamplingParams(temperature=0.25)
    with opened(generation_config="none") as found:
        found.started.model_path = tmp_path
        assert found.default_params == SamplingParams()
