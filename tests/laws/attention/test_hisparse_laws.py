"""hisparse: chosen KV entries are swapped in from host memory, and chunks, prefix hits, preemption,
aborts and graphs change nothing."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest

from sglcore.conformance.session import result_of
from sglcore.core.errors import CheckpointError, ConfigError
from sglcore.runtime.hisparse import hisparse_coordinator, hisparse_staging
from sglcore.runtime.hisparse.hisparse_coordinator import HiSparseCoordinator
from sglcore.runtime.memory.kv_rows import FP8
from sglcore.sampling.params import SamplingParams
from tests.checkpoints import Oracle, llama, save
from tests.deepseek_v4 import deepseek_v4
from tests.latent import INDEXER, deepseek_v32, glm_moe_dsa
from tests.laws.engine import Result, TokenEngine, check_logprobs, random_prompts
from tests.laws.test_model_laws import check_paths

TOLERANCE = 5e-5
FEW = '{"device_buffer_size": 1}'
RESIDENT: Mapping[str, Any] = MappingProxyType({"hisparse": "off"})
CONTEXT, PAGE = 160, 16
MODELS: Mapping[str, tuple[Callable[..., Oracle], str, int]] = MappingProxyType(
    {
        "compressed": (deepseek_v4, "compressed", 8),
        "latent": (deepseek_v32, "latent", INDEXER["index_topk"]),
        "shared": (glm_moe_dsa, "latent", INDEXER["index_topk"]),
    }
)
"""The function that makes the model, its attention backend, and the number of entries that a token
reads."""


class Case:
    """A saved checkpoint and its oracle."""

    def __init__(self, name: str, folder: Path) -> None:
        make, self.backend, self.top_k = MODELS[name]
        self.oracle = make(max_position_embeddings=CONTEXT)
        self.folder = save(self.oracle, folder)

    def engine(self, rows: int, **settings: Any) -> TokenEngine:
        """Make an engine with `rows` entries of each layer on the device per request; unwritten
        entries are poisoned."""
        given = {"max_requests": 4, "max_model_len": CONTEXT, "page_size": PAGE, "poison": True, "max_batch_tokens": 24}
        hisparse = json.dumps({"device_buffer_size": rows, "host_to_device_ratio": 100})
        given |= {"attention_backend": self.backend, "hisparse": hisparse, "graph_token_buckets": (24,)}
        return TokenEngine(self.folder, scramble_pages=3, **{**given, **settings})

    def check(self, results: list[Result]) -> None:
        """Compare with transformers."""
        check_logprobs(results, self.oracle, TOLERANCE)


@pytest.fixture(scope="module", params=["compressed", "latent"])
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    yield Case(request.param, tmp_path_factory.mktemp("hisparse"))


GRAPHS = pytest.mark.parametrize(
    "graph",
    [
        pytest.param("off", marks=pytest.mark.needs("host_rows")),
        *(
            pytest.param(kind, marks=pytest.mark.needs("host_rows", f"graphs.{kind}"))
            for kind in ("full", "breakable", "piecewise")
        ),
    ],
)


@GRAPHS
def test_what_is_swapped_in_is_what_was_stored(case: Case, graph: str) -> None:
    """Ragged arrivals in chunks, prefix hits, and preemption, with only as many places on the
    device as a token reads."""
    engine = case.engine(case.top_k, graph=graph)
    case.check(engine.run(random_prompts(1, (5, 60, 17, 34)), 8, score_prompts=True, stagger=2))
    base = random_prompts(8, (70,))[0]
    others = [base[:37] + tail for tail in random_prompts(9, (3, 1, 40))]
    for prompts in ([base], [base], others, others):
        case.check(engine.run(prompts, 4))
    assert engine.scheduler.stats().hit_tokens >= 64 + 3 * 32
    check_paths(engine, graph)


@pytest.mark.needs("host_rows", "host")
def test_texts_that_are_given_up_leave_nothing_behind(case: Case) -> None:
    """Aborts requests while they wait, between two chunks of a prompt, during decode, and after
    preemption; the others continue."""
    engine = case.engine(case.top_k, graph="off")
    free = engine.scheduler.stats().free_pages
    for steps in (0, 1, 2, 3, 5, 9):
        prompts = random_prompts(steps, (55, 20, 33, 9, 41, 12, 30))
        params = SamplingParams(temperature=0.0, logprobs=0, ignore_eos=True, max_tokens=12)
        requests = [engine.request(prompt, params) for prompt in prompts]
        for request in requests:
            engine.scheduler.add(request)
        for _ in range(steps):
            engine.loop.step()
        for request in requests[::2]:
            engine.scheduler.abort(request.rid)
        while engine.loop.has_work:
            engine.loop.step()
        engine.scheduler.audit()
        case.check([result_of(request) for request in requests[1::2]])
    stats = engine.scheduler.stats()
    assert stats.free_pages + stats.cached_pages == free


@pytest.mark.needs("host_rows", "host")
def test_rows_that_give_way_are_brought_again(case: Case) -> None:
    """With only the places that a token reads (all in use), and with 200 (some stay unused)."""
    for rows, wanted in ((case.top_k, True), (200, False)):
        engine = case.engine(rows, graph="off")
        case.check(engine.run(random_prompts(5, (90, 70)), 12))
        hisparse = engine.worker.runner.attn_backend.hisparse
        assert isinstance(hisparse, HiSparseCoordinator)
        held = hisparse.caches.held[:, 1:3].flatten(0, 1)
        assert bool((held >= 0).all()) is wanted


@pytest.mark.needs("host_rows", "host")
def test_what_is_budgeted_is_what_is_allocated(case: Case) -> None:
    """The sizes match to the byte, for each request slot and the padding slot, and for the staging
    rooms."""
    engine = case.engine(case.top_k + 3, graph="off")
    hisparse, slots = engine.worker.runner.attn_backend.hisparse, engine.worker.limits.max_requests + 1
    assert isinstance(hisparse, HiSparseCoordinator)
    shape, resident = hisparse.shape, case.engine(case.top_k + 3, graph="off", hisparse="off")
    assert hisparse.num_bytes == slots * shape.slot_bytes + shape.room_bytes
    more = engine.worker.limits.state_bytes - resident.worker.limits.state_bytes
    assert more == slots * shape.slot_bytes


@pytest.mark.needs("host_rows", "host")
@pytest.mark.parametrize("dtype", ["auto", FP8])
@pytest.mark.parametrize("name", list(MODELS))
def test_a_text_has_the_very_numbers_that_it_has_with_all_rows_on_the_device(
    name: str, dtype: str, tmp_path: Path
) -> None:
    """Same chunks and steps, for both dtypes, including layers that share another layer's
    choice."""
    case, found = Case(name, tmp_path), []
    for rows in (RESIDENT, {}):
        engine = case.engine(case.top_k, graph="off", kv_cache_dtype=dtype, **rows)
        (result,) = engine.run(random_prompts(3, (60,)), 30, score_prompts=True)
        found.append((result.tokens, result.prompt_logprobs, result.logprobs))
    assert found[0] == found[1]


@pytest.mark.needs("host_rows", "host")
def test_what_does_not_go_together_is_refused_by_name_before_loading(case: Case, tmp_path: Path) -> None:
    """Refused before loading: there are no weights to load."""
    given = {"page_size": PAGE, "max_model_len": CONTEXT, "attention_backend": case.backend}
    for config, asked, words in (
        (case.folder, {"hisparse": FEW}, f"device_buffer_size of hisparse is 1; wanted at least {case.top_k}"),
        (
            save(llama(max_position_embeddings=CONTEXT), tmp_path / "dense"),
            {},
            "no layer of LlamaForCausalLM chooses the rows that it reads",
        ),
    ):
        shutil.copy(config / "config.json", tmp_path)
        with pytest.raises(ConfigError, match=words):
            TokenEngine(tmp_path, **{**given, "hisparse": "on", **asked})
    shutil.copy(case.folder / "config.json", tmp_path)
    with pytest.raises(CheckpointError, match="safetensors"):
        TokenEngine(tmp_path, hisparse="on", **given)


def forgets_who_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: a new request takes the entries of the slot's earlier request as its own."""
    monkeypatch.setattr(HiSparseCoordinator, "enter", lambda *given: None)


def loses_new_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: copies pages only for a step that begins at page 0, so the new entries of later
    chunks are lost."""
    copies = hisparse_staging._PageRows.copies

    def made(rows: Any, begin: Any, count: Any, total: int) -> Any:
        found = copies(rows, begin, count, total)
        return replace(found, counts=found.counts * int(not begin.any()))

    monkeypatch.setattr(hisparse_staging._PageRows, "copies", made)


def stages_for_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: assigns every request's pages to the first request."""
    plan_parts = hisparse_coordinator.plan_parts

    def planned(*given: Any) -> Any:
        found = plan_parts(*given)
        return replace(found, owners=found.owners * 0)

    monkeypatch.setattr(hisparse_coordinator, "plan_parts", planned)


def loads_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: a decode step does not load chosen entries that are missing on the device."""
    swap_in = HiSparseCoordinator.swap_in

    def swapped(self: Any, *given: Any) -> Any:
        rows, loads = swap_in(self, *given)
        loads.all[0].counts.zero_()
        return rows, loads

    monkeypatch.setattr(HiSparseCoordinator, "swap_in", swapped)


@pytest.mark.needs("host_rows", "host")
@pytest.mark.parametrize(
    "defect", [forgets_who_left, loses_new_rows, stages_for_the_first, loads_nothing], ids=lambda each: each.__name__
)
def test_a_defect_is_caught(
    case: Case, defect: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    defect(monkeypatch)
    engine = case.engine(case.top_k, graph="off", max_requests=2)
    with pytest.raises(AssertionError):
        for seed in (1, 2):
            case.check(engine.run(random_prompts(seed, (60, 34, 21)), 8, stagger=1))
            case.check(engine.run(random_prompts(seed, (9, 10)), 2))
