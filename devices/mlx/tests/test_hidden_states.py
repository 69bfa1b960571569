"""Returned hidden states on this device are transformers' own, in compiled decode steps, slices of
layers and verifications too."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from devices.mlx.tests.parity import CONTEXT, TokenEngine
from devices.mlx.tests.test_parity import make_model
from sglcore.conformance.inputs.prompts import random_prompts
from sglcore.schedule.request import Request
from sglcore_mlx import stepper

pytestmark = pytest.mark.needs("torch")

LENGTHS = (1, 5, 30, 17, 9)
KINDS = (
    {"return_hidden_states": "all"},
    {"return_hidden_states": "last"},
    {},
    {"return_hidden_states": "all", "return_hidden_states_before_norm": True},
    {"return_hidden_states": "last", "return_hidden_states_before_norm": True},
)


@pytest.fixture(scope="module", params=["llama", "qwen3-moe", "qwen3-next"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    from tests.checkpoints import save

    model = make_model(request.param)
    yield save(model, tmp_path_factory.mktemp(request.param)), model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    from tests.checkpoints import save

    model = make_model("llama")
    return save(model, tmp_path_factory.mktemp("tiny")), model


def make_kinds(seed: int, repeats: int = 1) -> list[Request]:
    from tests.laws.hidden import make_requests

    prompts = [prompt * repeats for prompt in random_prompts(seed, LENGTHS)]
    return [make_requests([prompt], 12, **kind)[0] for prompt, kind in zip(prompts, KINDS, strict=True)]


def check(
    case: tuple[Path, Any], requests: list[Request], settings: dict[str, Any], paths: set[str] | None = None, **how: Any
) -> Any:
    """Run the requests in one session and compare; return the session. `paths` gets the paths of
    the steps."""
    from tests.laws.hidden import check_states, run_for_states

    paths = set[str]() if paths is None else paths
    engine = TokenEngine(case[0], **settings)
    try:
        session = engine.session(**how)
        check_states(requests, run_for_states(session, requests, stagger=2), case[1])
        paths.update(engine.recorder.paths)
        return session
    finally:
        engine.close()


@pytest.mark.parametrize("graph", ["off", "compiled"])
@pytest.mark.parametrize("overlap", [True, False])
def test_the_states_are_those_of_transformers(case: tuple[Path, Any], graph: str, overlap: bool) -> None:
    check(case, make_kinds(1), {"graph": graph}, chunk=7, overlap=overlap)


def test_a_prompt_in_slices_of_layers_has_its_states(tiny: tuple[Path, Any]) -> None:
    paths = set[str]()
    check(tiny, make_kinds(2), {"prompt_slices": "9"}, paths, overlap=True)
    assert "layers 1 to 2" in paths


@pytest.mark.parametrize("graph", ["off", "compiled"])
def test_only_accepted_draft_tokens_have_states(tiny: tuple[Path, Any], graph: str) -> None:
    requests = make_kinds(3, repeats=3)
    session = check(tiny, requests, {"speculative": "ngram", "draft_tokens": 3, "graph": graph}, overlap=True)
    assert sum(session.scheduler.drafts.values()) > 0


def test_accepted_draft_tokens_on_recurrent_states_have_states(tmp_path: Path) -> None:
    from tests.checkpoints import save

    model = make_model("qwen3-next")
    settings = {"speculative": "ngram", "draft_tokens": 3, "graph": "compiled"}
    session = check((save(model, tmp_path), model), make_kinds(4, repeats=3), settings, overlap=True)
    assert sum(session.scheduler.drafts.values()) > 0


@pytest.mark.parametrize("graph", ["off", "compiled"])
@pytest.mark.parametrize("width", [1, 2], ids=["chains", "trees"])
@pytest.mark.parametrize("kind", ["eagle3", "standalone"])
def test_a_draft_model_changes_no_states(kind: str, width: int, graph: str, tmp_path: Path) -> None:
    from tests.checkpoints import llama, save
    from tests.drafts import TARGET, eagle3

    model = llama(max_position_embeddings=CONTEXT, **TARGET)
    folder = save(model, tmp_path)
    if kind == "eagle3":
        eagle3(model, folder / "draft")
    given = str(folder / "draft") if kind == "eagle3" else str(folder)
    settings = {"speculative": kind, "draft_model": given, "draft_tokens": 3, "draft_width": width, "graph": graph}
    session = check((folder, model), make_kinds(5, repeats=2), settings, chunk=7, overlap=True)
    proposed = sum(cell[2] * count for cell, count in session.scheduler.drafts.items())
    accepted = sum(cell[3] * count for cell, count in session.scheduler.drafts.items())
    assert proposed > 0 and (accepted > 0 or kind == "eagle3")


def test_preemption_neither_loses_nor_doubles_states(tiny: tuple[Path, Any]) -> None:
    from tests.laws.hidden import make_requests

    prompts = random_prompts(10, (20, 24, 28, 22))
    requests = [make_requests([ids], 30, **KINDS[i])[0] for i, ids in enumerate(prompts)]
    session = check(tiny, requests, {"max_requests": 4}, pages=CONTEXT // 4 + 2)
    assert session.scheduler.stats().retractions > 0


def test_the_state_of_another_token_is_caught(tiny: tuple[Path, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stepper, "_taken", lambda states, tokens: states[mx.maximum(tokens - 1, 0)].astype(mx.float32))
    with pytest.raises(AssertionError):
        check(tiny, make_kinds(1), {})
