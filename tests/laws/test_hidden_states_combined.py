"""Returned hidden states with other features: prompts in slices of layers, steps in two
micro-batches, draft tokens of every shape."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from sglcore.runtime.speculative import verify_worker
from sglcore.runtime.speculative.tree_worker import TreeWorker
from sglcore.schedule.request import Request
from sglcore.step import hidden_rows, step_output
from tests.checkpoints import llama, qwen3_next, save
from tests.drafts import TARGET, eagle, eagle3
from tests.laws.engine import TokenEngine, random_prompts
from tests.laws.hidden import check_states, make_requests, run_for_states
from tests.laws.test_hidden_states import KINDS, LENGTHS
from tests.planted import planted

pytestmark = pytest.mark.needs("device")

CONTEXT = 128
Case = tuple[Path, Any]


def make_kinds(seed: int, repeats: int = 1) -> list[Request]:
    """Return one request of each kind."""
    prompts = [prompt * repeats for prompt in random_prompts(seed, LENGTHS)]
    return [make_requests([prompt], 12, **kind)[0] for prompt, kind in zip(prompts, KINDS, strict=True)]


@pytest.fixture(scope="module")
def drafting(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """A checkpoint with drafts."""
    target = llama(**TARGET, max_position_embeddings=CONTEXT)
    folder = save(target, tmp_path_factory.mktemp("drafting"))
    eagle(target, folder / "eagle")
    eagle3(target, folder / "eagle3")
    return folder, target


@pytest.mark.parametrize("make", [llama, qwen3_next])
def test_prompts_in_slices_of_layers_have_their_states(make: Callable[..., Any], tmp_path: Path) -> None:
    oracle = make(max_position_embeddings=CONTEXT)
    engine = TokenEngine(
        save(oracle, tmp_path), prompt_slices="20", max_model_len=CONTEXT, max_batch_tokens=24, poison=True, graph="off"
    )
    requests = make_kinds(1)
    check_states(requests, run_for_states(engine, requests, stagger=2), oracle)
    assert any(path.startswith("layers") for path in engine.paths)


def test_steps_in_two_micro_batches_have_their_states(drafting: Case) -> None:
    engine = TokenEngine(drafting[0], two_batch_overlap="on", graph="off", max_batch_tokens=11)
    requests = make_kinds(2)
    check_states(requests, run_for_states(engine, requests, stagger=2), drafting[1])
    assert "eager:halves" in engine.paths


SPECULATIONS: MappingProxyType[str, dict[str, Any]] = MappingProxyType(
    {
        "ngram": {"speculative": "ngram", "draft_tokens": 3},
        "suffix": {"speculative": "suffix", "draft_tokens": 3},
        "eagle": {"speculative": "eagle", "draft_tokens": 3},
        "eagle tree": {"speculative": "eagle", "draft_width": 3, "draft_depth": 3, "draft_tokens": 7},
        "eagle3": {"speculative": "eagle3", "draft_tokens": 3},
        "rejection": {"speculative": "eagle", "draft_tokens": 3, "speculative_verify": "rejection"},
    }
)


def speculating(case: Case, name: str, **settings: Any) -> TokenEngine:
    given = dict(SPECULATIONS[name])
    if given["speculative"].startswith("eagle"):
        given["draft_model"] = str(case[0] / given["speculative"])
    return TokenEngine(case[0], **{**given, "graph_token_buckets": (64,), "graph_buckets": (1, 2, 5), **settings})


def check_speculating(case: Case, engine: TokenEngine, name: str) -> None:
    try:
        requests = make_kinds(3, repeats=3)
        check_states(requests, run_for_states(engine, requests, stagger=1), case[1])
        # The random draft of EAGLE-3 is never right; it is here for its features.
        assert any(accepted for *_, accepted in engine.scheduler.drafts) or name == "eagle3"
    finally:
        engine.worker.close()


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("name", SPECULATIONS)
def test_accepted_draft_tokens_have_states_and_others_none(drafting: Case, name: str, overlap: bool) -> None:
    engine = speculating(drafting, name, graph="off", overlap=overlap)
    assert isinstance(engine.worker, TreeWorker) == ("tree" in name)
    check_speculating(drafting, engine, name)


@pytest.mark.parametrize("name", ["ngram", "eagle tree", "eagle3"])
def test_verifications_that_graphs_replay_have_states(drafting: Case, name: str, graph: str) -> None:
    engine = speculating(drafting, name, graph=graph)
    check_speculating(drafting, engine, name)
    assert graph == "off" or engine.paths - {"eager"}


DEFECTS = {
    "rejected draft tokens have states": (
        hidden_rows, "accepted_states", step_output, "states[: counts[row]]", "states[-counts[row] :]",
    ),
    "of each request only one row is returned": (
        hidden_rows, "hidden_rows", verify_worker, "LAST and not width:", "LAST:",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
def test_planted_defects_are_caught(drafting: Case, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, function, user, sound, defect = DEFECTS[name]
    monkeypatch.setattr(user, function, getattr(planted(module, sound, defect), function))
    with pytest.raises((AssertionError, ValueError, IndexError)):
        check_speculating(drafting, speculating(drafting, "ngram", graph="off"), "ngram")


def test_the_row_of_another_branch_is_caught(drafting: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = speculating(drafting, "eagle tree", graph="off")
    decided = TreeWorker._decided
    monkeypatch.setattr(
        TreeWorker, "_decided", lambda self, *given: decided(self, *given)._replace(hidden=given[3], order=None)
    )
    with pytest.raises((AssertionError, ValueError, IndexError)):
        check_speculating(drafting, engine, "eagle tree")
