"""Returned hidden states are transformers' own: whatever the chunks, neighbours, prefix hits,
preemption, overlap and graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from sglcore.models.transformers_backend import transformers_model
from sglcore.schedule import batch_builder, returned_states, scheduler
from sglcore.schedule.request import Request
from sglcore.schedule.request_errors import RequestError
from sglcore.step import hidden_rows as step_states
from tests.checkpoints import exaone4, falcon, falcon_h1, gemma3, lfm2_moe, llama, nemotron_h, qwen3_next, save
from tests.laws.engine import TokenEngine, random_prompts
from tests.laws.hidden import check_states, make_requests, run_for_states
from tests.planted import planted

pytestmark = pytest.mark.needs("device")

CONTEXT = 128
MODELS: MappingProxyType[str, Callable[..., Any]] = MappingProxyType(
    {
        "llama": llama,
        "gemma3": gemma3,
        "lfm2-moe": lfm2_moe,
        "nemotron-h": nemotron_h,
        "qwen3-next": qwen3_next,
        "exaone4-transformers": exaone4,
        "falcon-h1-transformers": falcon_h1,
        "falcon-transformers": falcon,
    }
)
LENGTHS = (1, 5, 30, 17, 9)
KINDS = (
    {"return_hidden_states": "all"},
    {"return_hidden_states": "last"},
    {},
    {"return_hidden_states": "all", "return_hidden_states_before_norm": True},
    {"return_hidden_states": "last", "return_hidden_states_before_norm": True},
)
"""One request of each kind, so that a step has rows of all of them."""


class Case:
    """A saved checkpoint and its oracle; `kinds`: the kinds of requests that run together."""

    def __init__(self, name: str, folder: Path) -> None:
        self.oracle = MODELS[name](max_position_embeddings=CONTEXT)
        self.folder = save(self.oracle, folder)
        self.kinds = KINDS

    def requests(self, seed: int, lengths: tuple[int, ...] = LENGTHS, count: int = 12) -> list[Request]:
        """Return requests with random prompts of these lengths, of all kinds."""
        prompts = random_prompts(seed, lengths)
        kinds = [self.kinds[place % len(self.kinds)] for place in range(len(prompts))]
        return [make_requests([prompt], count, **kind)[0] for prompt, kind in zip(prompts, kinds, strict=True)]


@pytest.fixture(scope="module", params=list(MODELS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield Case(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case("llama", tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize(("chunk", "overlap"), [(128, True), (5, True), (7, False)])
def test_the_states_of_prompts_and_output_are_those_of_transformers(case: Case, chunk: int, overlap: bool) -> None:
    engine = TokenEngine(case.folder, graph="off", max_batch_tokens=chunk, overlap=overlap)
    requests = case.requests(chunk)
    check_states(requests, run_for_states(engine, requests, stagger=2), case.oracle)


def test_graphs_change_nothing_and_replay_states_after_the_norm(case: Case, graph: str) -> None:
    engine = TokenEngine(case.folder, graph=graph, graph_token_buckets=(16,), max_batch_tokens=24, poison=True)
    after = [kind for kind in case.kinds if len(kind) < 2]
    requests = [make_requests([ids], 12, **after[i % 3])[0] for i, ids in enumerate(random_prompts(4, LENGTHS))]
    check_states(requests, run_for_states(engine, requests, stagger=2), case.oracle)
    assert graph == "off" or any(path.startswith(("full:", "native:")) for path in engine.paths)
    assert not any("norm" in path for path in engine.paths)
    requests = case.requests(5)
    check_states(requests, run_for_states(engine, requests, stagger=2), case.oracle)
    assert graph == "off" or "eager:return_hidden_states_before_norm" in engine.paths


def test_a_request_that_wants_none_runs_by_the_same_paths_and_reads_back_nothing(tiny: Case, graph: str) -> None:
    paths = []
    for kind in ({}, {"return_hidden_states": "all"}):
        engine = TokenEngine(tiny.folder, graph=graph)
        requests = make_requests(random_prompts(1, (9,)), 8, **kind)
        check_states(requests, run_for_states(engine, requests), tiny.oracle)
        paths.append(engine.paths)
    assert paths[0] == paths[1]


def test_a_prompt_in_the_prefix_cache_has_all_its_states_and_the_last_one_comes_from_the_cache(case: Case) -> None:
    engine = TokenEngine(case.folder, graph="off")
    (prompt,) = random_prompts(8, (33,))
    for kind, hit in (("all", 0), ("all", 0), ("last", 32), ("all", 0)):
        requests = make_requests([prompt], 4, return_hidden_states=kind)
        check_states(requests, run_for_states(engine, requests), case.oracle)
        assert requests[0].cached_tokens == hit or engine.worker.limits.keeps_state


def test_samples_of_one_prompt_each_have_its_states(tiny: Case) -> None:
    engine = TokenEngine(tiny.folder, graph="off", max_batch_tokens=16)
    requests = make_requests(random_prompts(2, (21,)) * 3, 6, return_hidden_states="all")
    for request in requests[1:]:
        request.leader = requests[0]
    check_states(requests, run_for_states(engine, requests), tiny.oracle)


def retracted(case: Case, **settings: Any) -> tuple[list[Request], list[Any]]:
    """Run requests that do not all fit, so that some are preempted, in their prompts too."""
    pages = CONTEXT // 4 + 2
    bytes_of_page = 4 * case.oracle.config.num_hidden_layers * 2 * case.oracle.config.num_key_value_heads * 12 * 4
    settings = {"graph": "off", "kv_cache_memory": pages * bytes_of_page, "max_requests": 4, **settings}
    engine = TokenEngine(case.folder, **settings)
    requests = case.requests(10, (20, 24, 28, 22), 30)
    found = run_for_states(engine, requests, stagger=1)
    assert engine.scheduler.stats().retractions > 0
    return requests, found


@pytest.mark.parametrize("chunk", [128, 6])
def test_preemption_neither_loses_nor_doubles_states(tiny: Case, chunk: int) -> None:
    requests, found = retracted(tiny, max_batch_tokens=chunk)
    check_states(requests, found, tiny.oracle)


DEFECTS = {
    "states are doubled after preemption": (
        returned_states, "take_hidden_states", scheduler, "states[first :", "states[0:",
    ),
    "the state of another token is returned": (
        step_states, "hidden_rows", None, "np.arange(first, last, dtype=np.int32)",
        "np.arange(first, last, dtype=np.int32) - (first > 0)",
    ),
    "states before and after the norm are swapped": (
        step_states, "hidden_rows", None, "((AFTER, modes > 0), (BEFORE, modes < 0))",
        "((AFTER, modes < 0), (BEFORE, modes > 0))",
    ),
    "only the first decode step returns states": (
        returned_states, "put_hidden_mode", batch_builder, "if batch.hidden_modes is not None:", "if False:",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", DEFECTS)
def test_planted_defects_are_caught(tiny: Case, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, function, user, sound, defect = DEFECTS[name]
    from sglcore.runtime import tp_worker

    bad = getattr(planted(module, sound, defect), function)
    monkeypatch.setattr(tp_worker if user is None else user, function, bad)
    with pytest.raises((AssertionError, ValueError, IndexError, RuntimeError)):
        requests, found = retracted(tiny)
        check_states(requests, found, tiny.oracle)


def test_taking_the_prompt_from_the_cache_is_caught(tiny: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Request, "needs_prefill", property(lambda self: False))
    engine = TokenEngine(tiny.folder, graph="off")
    (prompt,) = random_prompts(8, (33,))
    with pytest.raises(AssertionError):
        for _ in range(2):
            requests = make_requests([prompt], 4, return_hidden_states="all")
            check_states(requests, run_for_states(engine, requests), tiny.oracle)


def test_norm_inputs_of_a_class_that_ends_otherwise_are_refused_and_others_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers_model, "find_last_norm", lambda model, has_states: None)
    oracle = exaone4(max_position_embeddings=CONTEXT)
    engine = TokenEngine(save(oracle, tmp_path), graph="off")
    requests = make_requests(random_prompts(3, (5, 9)), 4, return_hidden_states="all")
    (bad,) = make_requests(random_prompts(4, (5,)), 4, **KINDS[3])
    engine.scheduler.add(requests[0])
    with pytest.raises(RequestError, match="leave return_hidden_states_before_norm out, or start with --model-impl"):
        engine.scheduler.add(bad)
    engine.scheduler.abort(requests[0].rid)
    check_states(requests[1:], run_for_states(engine, requests[1:]), oracle)
